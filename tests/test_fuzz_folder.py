"""Some hundred of the inputs of scripts/fuzz_folder.py; CI runs it for a minute (.ci/run)."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT


def test_a_folder_that_was_tampered_with_gives_an_error_of_padless_or_the_right_data() -> None:
    """Every end that is neither, a crash and a hang among them, is a finding with exit 1."""
    script = ROOT / "scripts" / "fuzz_folder.py"
    run = subprocess.run(
        [sys.executable, script, "--inputs", "300", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.startswith("300 inputs")
