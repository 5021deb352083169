"""README's tables of loss curves and of ranks that wait, made from their rows for readme_tables.py."""

from __future__ import annotations

import statistics
from typing import Any

Rows = list[dict[str, Any]]


def loss_curves(rows: Rows) -> str:
    """How far each way of training is from one sequence at a time, over all steps: median and largest."""
    curves = {(row["case"], row["arm"], row["metric"]): row["values"] for row in rows if "values" in row}
    last = [row for row in rows if "values" in row][-1]

    def cell(these: list[float] | None, those: list[float] | None) -> str:
        if these is None or those is None or len(these) != len(those):
            return "-"
        found = [abs(a - b) / abs(b) for a, b in zip(these, those, strict=True)]
        return f"{statistics.median(found):.1e}, {max(found):.1e}"

    lines = [
        "| sequences, model | trained | loss apart | gradient norm apart | loss from fp32's |",
        "|---|---|---|---|---|",
    ]
    for case, arm, metric in curves:
        if metric == "loss" and arm != "one by one" or (metric == "loss" and ", bf16," in case):
            one, exact = (case, "one by one"), (case.replace(", bf16,", ", fp32,"), "one by one")
            apart = (
                "-" if arm == "one by one" else cell(curves[case, arm, name], curves.get((*one, name)))
                for name in ("loss", "gradient norm")
            )
            from_exact = cell(curves[case, arm, "loss"], curves.get((*exact, "loss")))
            told = from_exact if exact[0] != case else "-"
            lines.append(f"| {case} | {arm} | {' | '.join(apart)} | {told} |")
    wanted = ("torch", "transformers")
    versions = ", ".join(f"{name} {last['versions'][name]}" for name in wanted)
    return "\n".join([*lines, "", f"{last['hardware']}; {versions}; {last['date']}."])


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
