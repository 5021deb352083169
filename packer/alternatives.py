"""What other strategies and lengths would give the same sequences, from their lengths alone."""

from __future__ import annotations

from typing import Any

from padless.packer.errors import InputError
from padless.packer.plan import lower_bound
from padless.packer.strategies import CUTS, STRATEGIES
from padless.packer.strategies.constraints import padded_lengths
from padless.runtime.reader import Array

_FACTORS = (0.5, 2, 4)
_AT_OTHER_LENGTHS = ("bfd", "spread")


def lengths_to_try(max_length: int, align: int = 1) -> list[int]:
    """The pack length itself, and those around it that `align` divides."""
    others = [int(max_length * factor) // align * align for factor in _FACTORS]
    return [max_length, *(length for length in sorted(set(others)) if length not in (0, max_length))]


def try_plans(
    lengths: Array,
    choices: list[tuple[str, int]],
    *,
    max_sequences_per_pack: int | None = None,
    align: int = 1,
    times: int = 1,
) -> list[dict[str, Any]]:
    """One row for each (strategy, max_length): packs, bound, utilization; [N] `lengths` in tokens.

    Sequences that are longer than a pack are left out and counted (`too_long`). Where `lengths` are every
    `times`-th of more, counts are scaled up. Choices that cannot be planned are left out.
    """
    rows = []
    for strategy, max_length in choices:
        fit = lengths[lengths <= max_length]
        if not len(fit):
            continue
        padded = padded_lengths(fit, align)
        try:
            plan = STRATEGIES[strategy](
                fit, max_length, max_sequences_per_pack=max_sequences_per_pack, align=align
            )
            bound = lower_bound(padded, max_length, max_sequences_per_pack)
        except InputError:  # an alignment that another length is no multiple of
            continue
        tokens = int(fit.sum(dtype="int64"))
        rows.append(
            {
                "strategy": strategy,
                "max_length": max_length,
                "packs": len(plan) * times,
                "bound_packs": bound * times,
                "utilization": tokens / (len(plan) * max_length),
                "sequences_per_pack": len(fit) / len(plan),
                "too_long": (len(lengths) - len(fit)) * times,
            }
        )
    return rows


def choices_around(strategy: str | None, max_length: int, align: int = 1) -> list[tuple[str, int]]:
    """Every strategy at the length that is there, and the usual ones at others."""
    here = [(name, max_length) for name in STRATEGIES if name not in CUTS]
    usual = list(_AT_OTHER_LENGTHS)
    if strategy is not None and strategy not in (*usual, *CUTS):
        usual.append(strategy)
    others = [length for length in lengths_to_try(max_length, align) if length != max_length]
    return here + [(name, length) for length in others for name in usual]
