"""Tests of the real data are skipped where the data are missing, and fail where they must not be.

A clone of its own is made for each case, with nothing in it but our conftest and one test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ONE_TEST = "def test_reads(shared):\n    assert (shared / 'data').is_dir()\n"


def run_in_clone(clone: Path, **environment: str) -> str:
    """Run the one test in a fresh clone; gives pytest's output."""
    (clone / "tests").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("conftest.py"), clone / "tests" / "conftest.py")
    (clone / "tests" / "test_one.py").write_text(ONE_TEST)
    (clone / "pytest.ini").write_text("[pytest]\n")
    settings = {"CI", "PADLESS_SHARED", "PADLESS_REQUIRE_SHARED", "PYTEST_ADDOPTS"}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    command = [sys.executable, "-P", "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    run = subprocess.run(
        command, cwd=clone, env=kept | environment, capture_output=True, text=True, check=False
    )
    return run.stdout


def make_data(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "tokenizers").mkdir()


def test_without_the_data_a_test_is_skipped_with_the_reason(tmp_path: Path) -> None:
    output = run_in_clone(tmp_path / "a" / "b" / "clone")
    assert "1 skipped" in output
    assert "no real data" in output
    assert "PADLESS_SHARED" in output


@pytest.mark.parametrize("setting", [{"CI": "true"}, {"PADLESS_REQUIRE_SHARED": "1"}])
def test_where_the_data_are_required_the_same_is_no_skip(tmp_path: Path, setting: dict[str, str]) -> None:
    output = run_in_clone(tmp_path / "a" / "b" / "clone", **setting)
    assert "1 error" in output
    assert "required here" in output
    assert "skipped" not in output


@pytest.mark.parametrize("place", ["a/b/shared", "a/shared"])
def test_the_data_are_found_up_to_two_levels_above_the_checkout(tmp_path: Path, place: str) -> None:
    make_data(tmp_path / place)
    assert "1 passed" in run_in_clone(tmp_path / "a" / "b" / "clone")


def test_the_data_may_be_named(tmp_path: Path) -> None:
    make_data(tmp_path / "elsewhere")
    named = str(tmp_path / "elsewhere")
    assert "1 passed" in run_in_clone(tmp_path / "a" / "b" / "clone", PADLESS_SHARED=named)
