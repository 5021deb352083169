"""What bench_training.py measured, as the README's table, with what the claims are held against.

Padding alone explains a gain of 1 / useful share of the padded arm: its other tokens are computed for
nothing. What is more than that is the runtime's. The fastest arm of padless stands for it in what is derived
here. Arms update after every batch, and those of packs are larger, so the gain without the optimizer's time
stands beside the gain. Speed is that of all steps; where there are few of packs, which hold like numbers of
tokens, it is that of the median step, which a kernel that is compiled meanwhile does not change. Padded
batches are a draw: where they are of a few shapes, their speed over all batches of the epoch is known too.
An arm that has no room for its activations is held against as it runs with checkpointing: each as fast as its
memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Rows = Sequence[dict[str, Any]]
BASE = "padded, 8 rows"
SPEED, PLAIN, FULL = "tokens a second", "tokens a second, without updates", "out of memory"
EPOCH, EPOCH_USEFUL = "tokens a second, epoch", "useful, epoch"
MEMORY = "activation memory, same sequences"
PEERS = ("transformers", "unsloth")
PACKED = 0.99
"""Useful share from which on batches are packed and alike."""
FEW = 30
"""Steps below which one slow step would tell."""
APART = 0.03
"""By how much two ratios differ to be told both."""
IDLE = 0.1
"""Idle share of the device that is told of."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one folder: arm -> metric -> value, the last that was measured."""

    name: str
    arms: dict[str, dict[str, float]]
    checkpointed: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same arms with checkpointing, where this case is without."""

    def without_room(self, arm: str) -> bool:
        """Whether an arm stands for itself by what it does with checkpointing, having no room here."""
        return FULL in self.arms[arm] and SPEED in self.checkpointed.get(arm, {})

    def found(self, arm: str) -> dict[str, float] | None:
        """What was measured of an arm, with checkpointing where it has no room without."""
        if arm not in self.arms:
            return None
        found = self.checkpointed[arm] if self.without_room(arm) else self.arms[arm]
        return found if SPEED in found else None

    @property
    def base(self) -> dict[str, float] | None:
        """The padded arm that the others are held against, where it was measured."""
        return self.found(BASE)

    @property
    def best(self) -> str | None:
        """The fastest arm of padless."""
        own = [arm for arm, found in self.arms.items() if arm.startswith("padless") and SPEED in found]
        return max(own, key=lambda arm: speed(self.arms[arm]), default=None)


def speed(found: dict[str, float], *, updates: bool = True) -> float:
    """Real tokens a second of an arm; without its optimizer's time where `updates` is False."""
    if found["useful"] < PACKED or found["steps"] >= FEW:
        return found[SPEED if updates else PLAIN]
    tokens, seconds = found["tokens a step"], found["step"] / 1e3
    return tokens / (seconds if updates else seconds - tokens * (1 / found[SPEED] - 1 / found[PLAIN]))


def cases_of(rows: Rows) -> list[Case]:
    """In the order in which they were first measured; of an arm padded ones first, padless last."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        found.setdefault(row["case"], {}).setdefault(row["arm"], {})[row["metric"]] = row["value"]
    kinds = ("padded", *PEERS, "padless")

    def place(arm: str) -> int:
        return next((number for number, kind in enumerate(kinds) if arm.startswith(kind)), len(kinds))

    return [
        Case(
            name=name,
            arms={arm: arms[arm] for arm in sorted(arms, key=place)},
            checkpointed=found.get(f"{name}, checkpointed", {}),
        )
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
    if case.best is None:
        return None
    own, told = case.arms[case.best], []

    def named(arm: str) -> str:
        return f"`{arm}`" + (" (checkpointed: without it has no room)" * case.without_room(arm))

    if case.base is not None:
        explained = 1 / case.base["useful"]
        gain, plain = (speed(own, updates=on) / speed(case.base, updates=on) for on in (True, False))
        told.append(
            f"{gain:.2f} times the tokens a second of {named(BASE)}, {plain:.2f} without the optimizer's "
            f"time; its useful share of {case.base['useful']:.1%} alone explains {explained:.2f}, so "
            f"{gain / explained:.2f} times ({plain / explained:.2f}) is the rest"
        )
        if EPOCH in case.base:
            whole, explained = speed(own) / case.base[EPOCH], 1 / case.base[EPOCH_USEFUL]
            told.append(
                f"over all padded batches of the epoch, {case.base[EPOCH_USEFUL]:.1%} useful, "
                f"{whole:.2f} times ({whole / explained:.2f} times what padding explains)"
            )
        if case.base.get("idle", 0) > IDLE:
            told.append(f"the GPU waits for Python for {case.base['idle']:.0%} of the padded arm's time")
    for arm in case.arms:
        if arm.startswith(PEERS) and (found := case.found(arm)) is not None:
            told.append(f"{speed(own) / speed(found):.2f} times {named(arm)}{middle(own, found)}")
    if case.base is not None and not case.without_room(BASE) and MEMORY in own and MEMORY in case.base:
        less = 1 - own[MEMORY] / case.base[MEMORY]
        told.append(
            f"activations of the same {own['tokens, same sequences']:,.0f} tokens take {less:.0%} less"
        )
    return f"- {case.name}: `{case.best}` trains {'; '.join(told)}." if told else None


def middle(own: dict[str, float], found: dict[str, float]) -> str:
    """How many steps, where few; or the ratio by median steps, where slow steps make the speeds' another."""
    if found["steps"] < FEW:
        return f", by the median of its {found['steps']:.0f} steps"
    by_step = own["tokens a step"] / own["step"] / (found["tokens a step"] / found["step"])
    by_all = speed(own) / speed(found)
    return "" if abs(by_step / by_all - 1) < APART else f", {by_step:.2f} by their median steps"


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

    of_base = None if base is None else speed(found) / speed(base)
    low, middle, high = (found[metric] for metric in ("step, 10 %", "step", "step, 90 %"))
    return [
        f"{speed(found):,.0f}",
        "-" if of_base is None else f"{of_base:.2f} x",
        f"{middle:,.0f} ms, {low:,.0f} to {high:,.0f}",
        cell("useful", ".1%"),
        f"{found['MFU'] * speed(found) / found[SPEED]:.1%}" if "MFU" in found else "-",
        f"{max(0.0, found['idle']):.1%}" if "idle" in found else "-",
        f"{cell('peak memory', '.0f')} GiB" if "peak memory" in found else "-",
        f"{cell(MEMORY, '.1f')} GiB" if MEMORY in found else "-",
    ]
