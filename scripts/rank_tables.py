"""README's tables of loss curves and of ranks that wait, made from their rows for readme_tables.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

Rows = list[dict[str, Any]]
Arm = tuple[str, str]
"""A case, and who did it."""
Curves = dict[tuple[str, str, str], list[float]]
"""By case, arm and metric: a number for each step."""
REFERENCE = "one by one"


def relative(curves: Curves, these: Arm, those: Arm, metric: str) -> Iterator[float]:
    """The relative difference at each step; none where one of the arms was not run."""
    a, b = (curves.get((*arm, metric), []) for arm in (these, those))
    if len(a) == len(b):
        yield from (abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def loss_curves(rows: Rows) -> str:
    """How far each way of training is from one sequence at a time, over all steps: median and largest."""
    curves = {(row["case"], row["arm"], row["metric"]): row["values"] for row in rows if "values" in row}

    def cell(these: Arm, those: Arm, metric: str) -> str:
        if these == those or not (found := list(relative(curves, these, those, metric))):
            return "-"
        return f"{statistics.median(found):.1e}, {max(found):.1e}"

    lines = [
        "| sequences, model | trained | loss apart | gradient norm apart | loss from fp32's |",
        "|---|---|---|---|---|",
    ]
    for case, arm in dict.fromkeys((case, arm) for case, arm, _ in curves):
        one, exact = (case, REFERENCE), (case.replace(", bf16,", ", fp32,"), REFERENCE)
        if arm == REFERENCE and exact == one:
            continue
        apart = [cell((case, arm), one, metric) for metric in ("loss", "gradient norm")]
        from_exact = "-" if exact == one else cell((case, arm), exact, "loss")
        lines.append(f"| {' | '.join((case, arm, *apart, from_exact))} |")
    return "\n".join([*lines, "", *machines(rows)])


def machines(rows: Rows) -> list[str]:
    """For the folder of each case, what it was last measured on."""
    lines = []
    for folder, row in {row["case"].split(", ")[0]: row for row in rows if "values" in row}.items():
        versions = ", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "transformers"))
        lines.append(f"{folder}: {row['hardware']}; {versions}; {row['date']}.")
    return ["  \n".join(lines)]


def ranks_idle(rows: Rows) -> str:
    """How long ranks wait, by the clock and as predicted, and what whole steps make of it."""
    last = {(row["case"], row["arm"], row["metric"]): row["value"] for row in rows}

    def cell(case: str, arm: str, metric: str, form: str) -> str:
        value = last.get((case, arm, metric))
        return "-" if value is None else format(value, form)

    lines = [
        "| model, packs | order | predicted | idle | waited | DDP | FSDP2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        for order in ("random", "balanced", "same packs"):
            shares = [cell(case, order, metric, ".2%") for metric in ("predicted", "idle", "waited")]
            speeds = [cell(case, f"{wrap}, {order}", "tokens a second", ",.0f") for wrap in ("ddp", "fsdp2")]
            lines.append(f"| {' | '.join((case, order, *shares, *speeds))} |")
    about = rows[-1]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    return "\n".join([*lines, "", f"{about['hardware']}; {versions}; {about['date']}."])
