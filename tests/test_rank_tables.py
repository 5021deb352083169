"""The README's tables of loss curves and of ranks that wait, from rows written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import ROOT

WHERE = {"hardware": "a machine", "versions": {"torch": "2", "transformers": "5"}, "date": "a day"}


def row(case: str, arm: str, metric: str, value: float, *values: float) -> dict[str, Any]:
    curve = {"values": list(values)} if values else {}
    return {"case": case, "arm": arm, "metric": metric, "value": value} | curve | WHERE


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_loss_curves_stand_beside_those_of_single_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from rank_tables import loss_curves

    found = loss_curves(
        [
            row("a, fp32, 3 steps", "one by one", "loss", 1, 4.0, 2.0, 1.0),
            row("a, fp32, 3 steps", "one by one", "gradient norm", 1, 1.0, 1.0, 1.0),
            row("a, fp32, 3 steps", "packed", "loss", 1, 4.0, 2.2, 0.8),
            row("a, fp32, 3 steps", "packed", "gradient norm", 1, 1.0, 1.0, 1.5),
            row("a, fp32, 3 steps", "packed", "seconds", 9),
            row("a, bf16, 3 steps", "one by one", "loss", 1, 4.0, 3.0, 1.0),
            row("a, bf16, 3 steps", "packed", "loss", 1, 4.0, 3.0, 1.1),
        ]
    )
    assert cells(found) == [
        ["a, fp32, 3 steps", "packed", "1.0e-01, 2.0e-01", "0.0e+00, 5.0e-01", "-"],
        ["a, bf16, 3 steps", "one by one", "-", "-", "0.0e+00, 5.0e-01"],
        ["a, bf16, 3 steps", "packed", "0.0e+00, 1.0e-01", "-", "1.0e-01, 5.0e-01"],
    ]


def test_ranks_that_wait_stand_beside_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a timeout cut off is a dash."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from rank_tables import ranks_idle

    metrics = {"predicted": 0.08, "idle": 0.13, "waited": 0.125}
    rows = [row("m, 2 ranks", "random", metric, value) for metric, value in metrics.items()]
    rows.append(row("m, 2 ranks", "ddp, random", "tokens a second", 90_000))
    assert cells(ranks_idle(rows)) == [
        ["m, 2 ranks", "random", "8.00%", "13.00%", "12.50%", "90,000", "-"],
        ["m, 2 ranks", "balanced", "-", "-", "-", "-", "-"],
        ["m, 2 ranks", "same packs", "-", "-", "-", "-", "-"],
    ]
