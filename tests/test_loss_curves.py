"""Training on packs is training on their sequences, optimizer and all, by scripts/loss_curves.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from building import DEMO, build
from conftest import ROOT


def test_curves_of_packs_are_those_of_their_sequences_and_mixed_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-001: the loss and the gradient norm of each step, in millionths of them."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import loss_curves

    assert build(DEMO, tmp_path / "packed", "--max-length", 512, "--overflow", "drop").code == 0
    rows = tmp_path / "rows.jsonl"
    words = ["loss_curves.py", str(tmp_path / "packed"), "--size", "tiny", "--steps", "3"]
    arms = ["--arms", "one by one", "packed", "padded", "mixed"]
    monkeypatch.setattr("sys.argv", [*words, *arms, "--output", str(rows)])
    loss_curves.main()
    found = {(row["arm"], row["metric"]): row for row in map(json.loads, rows.read_text().splitlines())}
    for metric, mixed in (("loss", 100), ("gradient norm", 1_000)):
        for arm in ("packed", "padded"):
            assert len(found[arm, metric]["values"]) == 3
            assert found[arm, f"{metric} apart"]["value"] <= 10
        assert found["mixed", f"{metric} apart"]["value"] > mixed
