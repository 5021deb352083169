"""What is installed is what lies in the folders: packages, data files, types, the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("packer", "runtime", "kernels")
BUILD = "import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_hook(hook: str, project: Path, output: Path) -> Path:
    """Build an sdist or a wheel of the project; gives the file."""
    output.mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD.format(hook=hook), output],
        cwd=project,
        check=True,
        capture_output=True,
    )
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that comes of the sdist, built in a copy: a build leaves its litter behind."""
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("wheel")
    project = work / "project"
    project.mkdir()
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, project / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, project / file)
    sdist = run_hook("build_sdist", project, work / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return run_hook("build_wheel", unpacked, work / "built")


def test_the_listed_packages_are_the_folders_with_modules(pyproject: dict[str, Any]) -> None:
    found = {
        ".".join(("padless", *module.parent.relative_to(ROOT).parts))
        for folder in FOLDERS
        for module in (ROOT / folder).rglob("*.py")
    }
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    # kernels is listed from the start, though it may hold no module yet.
    assert set(listed) == found | {"padless.kernels"}


def test_every_folder_is_mapped_below_padless(pyproject: dict[str, Any]) -> None:
    mapped = pyproject["tool"]["setuptools"]["package-dir"]
    assert mapped == {f"padless.{folder}": folder for folder in FOLDERS}
    assert not (ROOT / "padless").exists()


def test_the_wheel_holds_every_module_and_data_file_of_the_folders(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    present = {
        (PurePosixPath("padless") / path.relative_to(ROOT)).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == present
    assert {f"padless/{folder}/py.typed" for folder in FOLDERS} <= names
    assert "padless/runtime/FORMAT.md" in names
    assert "padless/packer/demo_data/instructions.jsonl" in names
    assert "padless/packer/demo_data/tokenizer/tokenizer.json" in names


def test_the_wheel_installs_the_command_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            PurePosixPath(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "[console_scripts]\npack-dataset = padless.packer.cli:main" in texts["entry_points.txt"]
    assert "LICENSE" in texts
    assert "License-Expression: Apache-2.0" in texts["METADATA"]


def test_the_constraints_pin_every_requirement_of_demo_tests_and_checks(
    pyproject: dict[str, Any],
) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    canonical = pytest.importorskip("packaging.utils").canonicalize_name
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        canonical(line.split("==")[0]): line.split("==")[1]
        for line in lines
        if line and not line.startswith("#")
    }
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["test"] + extras["check"]:
        requirement = requirements.Requirement(text)
        version = pinned.get(canonical(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"{requirement} against {version}"
    # A local version ("+cpu") exists on one index only; the constraint must hold on all.
    assert not [version for version in pinned.values() if "+" in version]


def test_an_installed_package_named_kernels_wins_over_our_folder(tmp_path: Path) -> None:
    # transformers imports one; with an __init__.py ours, found through the working folder,
    # would hide it.
    theirs = tmp_path / "kernels" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("")
    assert (ROOT / "kernels").is_dir()
    run = subprocess.run(
        [sys.executable, "-c", "import sys, kernels; print(sys.path[0], kernels.__file__)"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
        | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    # The empty entry is the working folder: it was searched first, and lost.
    assert run.stdout == f" {theirs}\n"


def test_the_scripts_can_be_run() -> None:
    scripts = [ROOT / "scripts" / name for name in ("install", "demo", "test", "check")]
    for script in [*scripts, ROOT / ".ci" / "run"]:
        assert script.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
        assert os.access(script, os.X_OK), f"{script} is not executable"
