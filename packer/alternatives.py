"""What other strategies and lengths would give the same sequences, from their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padless.packer.errors import InputError
from padless.packer.plan import lower_bound
from padless.packer.strategies import CUTS, STRATEGIES
from padless.packer.strategies.by_length import plan_lengths
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
    choices: Sequence[tuple[str, int | tuple[int, ...]]],
    *,
    max_sequences_per_pack: int | None = None,
    align: int = 1,
    times: int = 1,
) -> list[dict[str, Any]]:
    """One row for each (strategy, max_length): packs, bound, utilization; [N] `lengths` in tokens.

    Several lengths make packs of each (`max_lengths`), and `max_length` is the longest. Sequences that are
    longer than a pack are left out and counted (`too_long`). Where `lengths` are every `times`-th of more,
    counts are scaled up. Choices that cannot be planned are left out.
    """
    rows = []
    for strategy, given in choices:
        max_lengths = given if isinstance(given, tuple) else (given,)
        max_length = max_lengths[-1]
        fit = lengths[lengths <= max_length]
        if not len(fit):
            continue
        padded = padded_lengths(fit, align)
        try:
            plan = plan_lengths(
                STRATEGIES[strategy],
                fit,
                max_lengths,
                max_sequences_per_pack=max_sequences_per_pack,
                align=align,
            )
            parts = plan.by_bucket(max_length)
            bound = sum(
                lower_bound(padded[part.order], length, max_sequences_per_pack) for length, part in parts
            )
        except InputError:  # an alignment that another length is no multiple of
            continue
        tokens = int(fit.sum(dtype="int64"))
        rows.append(
            {
                "strategy": strategy,
                "max_length": max_length,
                **({"max_lengths": list(max_lengths)} if len(max_lengths) > 1 else {}),
                "packs": len(plan) * times,
                "bound_packs": bound * times,
                "utilization": tokens / sum(length * len(part) for length, part in parts),
                "sequences_per_pack": len(fit) / len(plan),
                "too_long": (len(lengths) - len(fit)) * times,
            }
        )
    return rows


def choices_around(
    strategy: str | None, max_lengths: tuple[int, ...], align: int = 1
) -> list[tuple[str, int | tuple[int, ...]]]:
    """Every strategy at the length that is there, or at all of them, and the usual ones at others.

    Where there are several, the others are each of them alone.
    """
    several = len(max_lengths) > 1
    here = max_lengths if several else max_lengths[0]
    others = max_lengths if several else lengths_to_try(max_lengths[0], align)[1:]
    usual = list(_AT_OTHER_LENGTHS)
    if strategy is not None and strategy not in (*usual, *CUTS):
        usual.append(strategy)
    return [
        *((name, here) for name in STRATEGIES if name not in CUTS),
        *((name, length) for length in others for name in usual),
    ]
