"""Which part may import which, and what an import may cost.

packer -> runtime's contract, reader and storage; runtime -> kernels; kernels -> torch and triton. A machine
that trains needs no packer, and one that packs loads no torch. The direction is read from the
source, the weight is measured in processes of their own.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("packer", "runtime", "kernels")
HEAVY = {"ray", "torch", "pandas", "transformers", "datasets", "numba", "scipy"}
CONTRACT = ("padless.runtime.format", "padless.runtime.reader", "padless.runtime.storage")


def imports(source: str, package: str) -> Iterator[tuple[str, bool]]:
    """Every imported name in full, and whether the import stands inside a function."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from ((f"{base}.{alias.name}", inside) for alias in node.names)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


def is_below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_allowed(name: str, inside: bool, file: str) -> bool:
    """Whether the file (its path in the repository) may import the name."""
    folder, top = file.split("/")[0], name.split(".")[0]
    if top in FOLDERS:
        return False  # a second copy of our own module, or somebody else's package
    if folder == "kernels":
        ours = is_below(name, "padless.kernels")
        return ours or top in {"torch", "triton"} or top in sys.stdlib_module_names
    if top != "padless":
        return True
    if file == "runtime/plans.py" and inside and is_below(name, "padless.packer.strategies"):
        return True  # who replans at run time plans as the packer does
    if folder == "runtime":
        return is_below(name, "padless.runtime", "padless.kernels")
    if is_below(name, "padless.packer", *CONTRACT):
        return True
    if file == "packer/quick.py":  # what it is for is to give one of these; torch comes when it is called
        return name == "padless.runtime.dataset.PackedDataset"
    return file == "packer/verify.py" and inside and is_below(name, "padless.runtime")


def forbidden(source: str, file: str) -> list[str]:
    package = ".".join(("padless", *file.split("/")[:-1]))
    return [name for name, inside in imports(source, package) if not is_allowed(name, inside, file)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_in_one_direction(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        assert forbidden(path.read_text(encoding="utf-8"), file) == [], file


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/stream.py", "import padless.packer"),
        ("runtime/stream.py", "from padless.packer.plan import PackPlan"),
        ("runtime/stream.py", "def f():\n    from padless import packer"),
        ("runtime/stream.py", "from ..packer import plan"),
        ("runtime/stream.py", "def f():\n    from padless.packer import strategies"),
        ("runtime/plans.py", "from padless.packer import strategies"),
        ("runtime/plans.py", "def f():\n    from padless.packer import write"),
        ("packer/write.py", "from padless.runtime.stream import PackedStream"),
        ("packer/write.py", "from padless.runtime import stream"),
        ("packer/sources/csv.py", "from ...runtime import stream"),
        ("packer/write.py", "from padless.kernels.rope import rope_qk"),
        ("packer/verify.py", "from padless.runtime.models import prepare_model"),
        ("packer/verify.py", "def f():\n    from padless.kernels.rope import rope_qk"),
        ("packer/write.py", "from runtime.format import Manifest"),
        ("kernels/rope.py", "import numpy"),
        ("kernels/rope.py", "from padless.runtime.format import Manifest"),
    ],
)
def test_a_wrong_direction_is_seen(file: str, source: str) -> None:
    assert len(forbidden(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("packer/write.py", "from padless.runtime.format import Manifest"),
        ("packer/write.py", "from padless.runtime import reader"),
        ("packer/sources/csv.py", "from . import text\nfrom ..plan import PackPlan"),
        ("packer/verify.py", "def f():\n    from padless.runtime.models import prepare_model"),
        ("runtime/plans.py", "def f():\n    from padless.packer.strategies import STRATEGIES"),
        ("runtime/models.py", "from padless.kernels import rope\nimport torch"),
        ("kernels/rope.py", "from __future__ import annotations\nimport torch, triton.language"),
        ("kernels/rope.py", "from .rope_ref import rope_ref"),
    ],
)
def test_a_right_direction_is_not_complained_of(file: str, source: str) -> None:
    assert forbidden(source, file) == []


def loaded_by(*arguments: str) -> set[str]:
    """Top-level packages that Python imports while it runs so, child processes included.

    From the log of imports and not from sys.modules at the end: the command may leave without
    running anything after it.
    """
    run = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, re.sub(r"(?m)^import time:.*\n", "", run.stderr) + run.stdout
    names = re.findall(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)", run.stderr)
    return {name.split(".")[0] for name in names}


def test_the_log_of_imports_shows_what_a_child_process_loads() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-X', 'importtime', '-c', %r])"
    assert "colorsys" in loaded_by("-c", child % "import colorsys")
    assert "colorsys" not in loaded_by("-c", child % "import json")


@pytest.mark.parametrize("module", ["padless.runtime.format", "padless.runtime.reader"])
def test_the_reader_loads_neither_torch_nor_pandas(module: str) -> None:
    loaded = loaded_by("-c", f"import {module}")
    assert "padless" in loaded
    assert loaded & HEAVY == set()


def test_build_and_repack_on_local_files_load_no_heavy_library(demo_data: Path, tmp_path: Path) -> None:
    source = tmp_path / "tiny.jsonl"
    lines = (demo_data / "instructions.jsonl").read_text(encoding="utf-8").splitlines()
    source.write_text("\n".join(lines[:20]) + "\n", encoding="utf-8")
    output = tmp_path / "packed"
    loaded = loaded_by(
        *("-c", "from padless.packer.cli import main; main()", "build", str(source)),
        *("--tokenizer", str(demo_data / "tokenizer"), "--max-length", "1024"),
        *("--output", str(output), "--workers", "2", "--quiet"),
    )
    assert (output / "manifest.json").is_file()
    assert loaded & HEAVY == set()
    again = tmp_path / "again"
    loaded = loaded_by(
        *("-c", "from padless.packer.cli import main; main()", "repack", str(output), "--quiet"),
        *("--max-length", "2048", "--output", str(again), "--workers", "2"),
    )
    assert (again / "manifest.json").is_file()
    assert loaded & HEAVY == set()
