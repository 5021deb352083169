"""Sequences that must share a pack (the two of a preference pair, the answers to one prompt).

A group is planned as one sequence of all its tokens, then its members take its place, side by side.
A cap on sequences is kept by as many groups of the largest size as it allows, which is exact where
all groups are of one size and leaves packs emptier where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.errors import InputError, OptionError
from padless.packer.plan import Integers, PackPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """Groups in the order in which their first members came."""

    tokens: NDArray[np.int64]
    """[groups]: tokens of all members."""
    sizes: NDArray[np.int64]
    """[groups]: members."""
    members: NDArray[np.int64]
    """[N]: numbers of the sequences, group after group."""

    def expand(self, plan: PackPlan) -> PackPlan:
        """The plan of the sequences that a plan of the groups stands for."""
        sizes = self.sizes[plan.order]
        ends = np.concatenate(([0], np.cumsum(sizes)))
        begins = (np.cumsum(self.sizes) - self.sizes)[plan.order]
        places = np.arange(ends[-1]) + np.repeat(begins - ends[:-1], sizes)
        return PackPlan(self.members[places].astype(plan.order.dtype), ends[plan.offsets])


def group(lengths: Integers, groups: ArrayLike, max_length: int, cap: int | None) -> Grouped:
    """The groups of sequences: `lengths` [N] in tokens, `groups` [N] any number for each.

    Raises InputError where there is not one number a sequence, and for a group that fits no pack.
    """
    numbers = np.asarray(groups)
    if numbers.shape != lengths.shape or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
        raise InputError(
            f"groups has type {numbers.dtype} and shape {numbers.shape}; give one integer for each of the "
            f"{len(lengths):,} sequences, the same for those that must share a pack"
        )
    names, firsts, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    place = np.empty(len(names), np.int64)
    by_first = np.argsort(firsts)
    place[by_first] = np.arange(len(names))
    at = place[inverse]
    sizes = np.bincount(at, minlength=len(names))
    members = np.argsort(at, kind="stable")
    begins = np.cumsum(sizes) - sizes
    tokens = np.add.reduceat(lengths[members], begins, dtype=np.int64) if len(names) else sizes
    limits = (
        ("max_length", "tokens", tokens, max_length),
        ("max_sequences_per_pack", "sequences", sizes, cap),
    )
    for option, unit, amounts, limit in limits:
        if limit is not None and len(amounts) and int(amounts.max()) > limit:
            worst = int(amounts.argmax())
            raise OptionError(
                f"{option} {limit:,} is too small for what shares a pack: group {names[by_first[worst]]} has "
                f"{amounts[worst]:,} {unit}, a pack holds {limit:,}; raise it, or leave the group out"
            )
    return Grouped(tokens=tokens, sizes=sizes, members=members)
