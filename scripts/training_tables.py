"""What bench_training.py measured, as the README's table, with what the claims are held against.

Padding alone explains a gain of 1 / useful share of the padded arm: its other tokens are computed for
nothing. What is more than that is the runtime's. The fastest arm of padless stands for it in what is derived
here. Arms update after every batch, and those of packs are larger, so the gain without the optimizer's time
stands beside the gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[dict[str, Any]]
BASE = "padded, 8 rows"
SPEED, PLAIN, FULL = "tokens a second", "tokens a second, without updates", "out of memory"
MEMORY = "activation memory, same sequences"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one folder: arm -> metric -> value, the last that was measured."""

    name: str
    arms: dict[str, dict[str, float]]

    @property
    def base(self) -> dict[str, float] | None:
        """The padded arm that the others are held against."""
        return self.arms.get(BASE)

    @property
    def best(self) -> str | None:
        """The fastest arm of padless."""
        own = [arm for arm, found in self.arms.items() if arm.startswith("padless") and SPEED in found]
        return max(own, key=lambda arm: self.arms[arm][SPEED], default=None)


def cases_of(rows: Rows) -> list[Case]:
    """In the order in which they were first measured; of an arm padded ones first, padless last."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        found.setdefault(row["case"], {}).setdefault(row["arm"], {})[row["metric"]] = row["value"]
    kinds = ("padded", "transformers", "unsloth", "padless")

    def place(arm: str) -> int:
        return next((number for number, kind in enumerate(kinds) if arm.startswith(kind)), len(kinds))

    return [
        Case(name=name, arms={arm: arms[arm] for arm in sorted(arms, key=place)})
        for name, arms in found.items()
    ]


def is_done(case: str, label: str, rows: Rows) -> bool:
    """Whether an arm has been measured, or found too large; a label may be without what was taken for it."""
    return any(
        row["case"] == case
        and row["metric"] in (SPEED, FULL)
        and (row["arm"] == label or row["arm"].startswith(f"{label}, "))
        for row in rows
    )


def derived(case: Case) -> str | None:
    """In words: the gain, what padding explains of it, and that over padding-free training."""
    if case.base is None or SPEED not in case.base or case.best is None:
        return None
    own = case.arms[case.best]
    gain, explained = own[SPEED] / case.base[SPEED], 1 / case.base["useful"]
    plain = own[PLAIN] / case.base[PLAIN]
    told = (
        f"- {case.name}: `{case.best}` trains {gain:.2f} times the tokens of `{BASE}` a second ({plain:.2f} "
        f"without the optimizer's time); its useful share of {case.base['useful']:.1%} alone explains "
        f"{explained:.2f}, so {gain / explained:.2f} times ({plain / explained:.2f}) is the rest"
    )
    peers = [
        f"{own[SPEED] / found[SPEED]:.2f} times `{arm}`"
        for arm, found in case.arms.items()
        if arm.startswith(("transformers", "unsloth")) and SPEED in found
    ]
    if peers:
        told += f"; {', '.join(peers)}"
    if MEMORY in own and MEMORY in case.base:
        told += (
            f"; activations of the same {own['tokens, same sequences']:,.0f} tokens take "
            f"{1 - own[MEMORY] / case.base[MEMORY]:.0%} less"
        )
    return told + "."


def training_speed(rows: Rows) -> str:
    """A table of all arms, and for each case what follows from it."""
    lines = [
        "| model, data | arm | real tokens/s | of padded | step, 10 to 90 % | useful | MFU | GPU idle | peak "
        "| activations |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases = cases_of(rows)
    for case in cases:
        for arm, found in case.arms.items():
            lines.append(f"| {case.name} | {arm} | {' | '.join(_cells(found, case.base))} |")
    told = [words for case in cases if (words := derived(case)) is not None]
    about = rows[-1]
    wanted = ("torch", "triton", "transformers", "liger-kernel", "flash-attn-4")
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in wanted)
    return "\n".join([*lines, "", *told, "", f"{about['hardware']}; {versions}; {about['date']}."])


def _cells(found: dict[str, float], base: dict[str, float] | None) -> list[str]:
    if SPEED not in found:
        return [FULL, *["-"] * 7]

    def cell(metric: str, form: str) -> str:
        return format(found[metric], form) if metric in found else "-"

    of_base = found[SPEED] / base[SPEED] if base is not None and SPEED in base else None
    low, middle, high = (found[metric] for metric in ("step, 10 %", "step", "step, 90 %"))
    return [
        f"{found[SPEED]:,.0f}",
        "-" if of_base is None else f"{of_base:.2f} x",
        f"{middle:,.0f} ms, {low:,.0f} to {high:,.0f}",
        cell("useful", ".1%"),
        cell("MFU", ".1%"),
        cell("idle", ".1%"),
        f"{cell('peak memory', '.0f')} GiB" if "peak memory" in found else "-",
        f"{cell(MEMORY, '.1f')} GiB" if MEMORY in found else "-",
    ]
