"""Packs of several lengths in one plan: short sequences in short packs, long ones in long packs.

    lengths 4 and 8, sequences 7 3 1 2 2:   [3] [2 2] | [7 1]      fill 15/16

A sequence goes to the shortest packs that hold it. What a pack of long ones leaves open is filled with
a fair sample of the shorter; a longer pack that would hold none but shorter ones is not made, and its
sequences go down to theirs. Each length is planned by the strategy that was asked for, longest first, and
its packs stand together, the shortest length first.

The trade-off is room: long packs are only as full as there are shorter sequences to fill them with, and
every length has a last pack of its own. Lengths are planned twice (to see what the long ones leave
open), which takes about two and a half times as long as one length does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.plan import Integers, PackPlan, as_lengths, in_a_row, index_type, shuffle_packs
from padless.packer.strategies.constraints import (
    Strategy,
    check_constraints,
    padded_lengths,
    split_packs,
)
from padless.packer.strategies.counting import random_order
from padless.packer.strategies.groups import group

SAMPLE = 1.5
"""Tokens drawn to fill what long sequences leave open, times that room: not all that is drawn fits."""


class _Planning(Protocol):
    """A strategy with its constraints: items' lengths, [N], and the length of packs."""

    def __call__(self, lengths: Integers, max_length: int, /) -> PackPlan: ...


def plan_lengths(
    strategy: Strategy,
    seq_lengths: ArrayLike,
    max_lengths: Sequence[int],
    *,
    cuts: bool = False,
    max_sequences_per_pack: int | None = None,
    seed: int = 0,
    align: int = 1,
    packs_multiple: int = 1,
    plan_window: int | None = None,
    groups: ArrayLike | None = None,
    shuffle: bool = False,
) -> PackPlan:
    """Plan `seq_lengths`, [N] in tokens, into packs of `max_lengths`, ascending; the rest as of a Strategy.

    `align` and `packs_multiple` hold for each length. `cuts`: the strategy cuts sequences; then longer ones
    than all packs go into the longest. Raises InputError for what no plan can hold.
    """
    if len(max_lengths) == 1:
        return strategy(
            seq_lengths,
            max_lengths[0],
            max_sequences_per_pack=max_sequences_per_pack,
            seed=seed,
            align=align,
            packs_multiple=packs_multiple,
            plan_window=plan_window,
            groups=groups,
            shuffle=shuffle,
        )
    cap, longest = max_sequences_per_pack, max_lengths[-1]
    lengths = as_lengths(seq_lengths, longest, cap, cuts=cuts)
    for length in max_lengths:
        check_constraints(length, align, packs_multiple, plan_window)
    items, grouped = padded_lengths(lengths, align), None
    if groups is not None and not cuts:
        grouped = group(items, groups, longest, cap)
        items, cap = grouped.tokens, cap and cap // int(grouped.sizes.max(initial=1))
    planning: _Planning = partial(
        strategy,
        max_sequences_per_pack=cap,
        seed=seed,
        plan_window=plan_window,
        align=align if cuts else 1,  # items are padded
        groups=groups if cuts else None,
    )
    if cuts:
        plan = _cut(planning, lengths, items, max_lengths)
    else:
        step = plan_window or max(len(items), 1)
        windows = [
            _fill(
                planning, items, np.arange(first, min(first + step, len(items))), max_lengths, seed, multiple
            )
            for multiple in (packs_multiple if step >= len(items) else 1,)
            for first in range(0, max(len(items), 1), step)
        ]
        plan = _together(windows, max_lengths)
    if packs_multiple > 1:
        parts = [
            split_packs(part, items, packs_multiple, f"packs of {length:,} tokens")
            for length, part in plan.by_bucket(longest)
        ]
        plan = _together([parts], max_lengths)
    plan = shuffle_packs(plan, seed) if shuffle else plan
    return plan if grouped is None else replace(grouped.expand(plan), buckets=plan.buckets)


def _cut(planning: _Planning, lengths: Integers, padded: Integers, max_lengths: Sequence[int]) -> PackPlan:
    """Each length's sequences cut wherever its packs end: those packs are full without any others."""
    bucket = np.minimum(np.searchsorted(max_lengths, padded), len(max_lengths) - 1)
    plans = []
    for number, length in enumerate(max_lengths):
        mine = np.flatnonzero(bucket == number)
        plans.append(_renumbered(planning(lengths[mine], length), mine, len(lengths)))
    return _together([plans], max_lengths)


def _fill(
    planning: _Planning,
    items: Integers,
    pool: NDArray[np.int64],
    max_lengths: Sequence[int],
    seed: int,
    multiple: int,
) -> list[PackPlan]:
    """A plan of each length over the items in `pool`, ascending numbers; longest planned first."""
    plans: list[PackPlan] = []
    for below, length in reversed([*zip((0, *max_lengths), max_lengths, strict=False)]):
        is_long = items[pool] > below
        long, others = pool[is_long], pool[~is_long]
        chosen = long
        if len(others) and len(long):
            alone = len(planning(items[long], length))
            packs = alone + -alone % multiple
            room = packs * length - int(items[long].sum(dtype=np.int64))
            drawn = others[random_order(len(others), seed)]
            fits = np.searchsorted(np.cumsum(items[drawn], dtype=np.int64), SAMPLE * room, side="right")
            chosen = np.sort(np.concatenate([long, drawn[:fits]]))
        plan = _renumbered(planning(items[chosen], length), chosen, len(items))
        plan, pool = _without_short(plan, items, below, multiple)
        pool = np.sort(np.concatenate([pool, np.setdiff1d(others, chosen, assume_unique=True)]))
        plans.append(plan)
    return plans[::-1]


def _without_short(
    plan: PackPlan, items: Integers, below: int, multiple: int
) -> tuple[PackPlan, NDArray[np.int64]]:
    """The plan without packs of nothing above `below` tokens, and the items that were in those, ascending.

    The fullest of them stay where the others' number is no multiple.
    """
    if not len(plan):
        return plan, np.zeros(0, np.int64)
    tokens = items[plan.order].astype(np.int64)
    is_long = np.maximum.reduceat(tokens, plan.offsets[:-1]) > below
    missing = -int(is_long.sum()) % multiple
    if missing:
        fill = np.where(is_long, 0, np.add.reduceat(tokens, plan.offsets[:-1]))
        fullest = np.argsort(-fill, kind="stable")[:missing]
        is_long[fullest[fill[fullest] > 0]] = True
    sizes = np.diff(plan.offsets)
    stays = np.repeat(is_long, sizes)
    offsets = np.concatenate(([0], np.cumsum(sizes[is_long])))
    return PackPlan(plan.order[stays], offsets), np.sort(plan.order[~stays]).astype(np.int64)


def _renumbered(plan: PackPlan, numbers: NDArray[np.int64], count: int) -> PackPlan:
    """A plan over some of `count` sequences, `numbers`, as one over all."""
    order = numbers[plan.order].astype(index_type(count))
    return PackPlan(order, plan.offsets, plan.starts, plan.lengths)


def _together(plans: Sequence[Sequence[PackPlan]], max_lengths: Sequence[int]) -> PackPlan:
    """Plans with a part for each length as one, length by length."""
    parts: list[PackPlan] = [in_a_row(of_length) for of_length in zip(*plans, strict=True)]
    buckets = tuple((length, len(part)) for length, part in zip(max_lengths, parts, strict=True))
    return replace(in_a_row(parts), buckets=buckets)
