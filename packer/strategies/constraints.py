"""What every strategy can be asked for beside a length and a cap, done once around all of them.

    align 8              lengths count as if padded to a multiple of 8, for context parallelism
    packs_multiple 16    as many packs as 16 ranks share out evenly
    plan_window 10000    a pack's sequences are among 10,000 neighbours, so reading stays local
    groups [0 0 1 1]     sequences of one number share a pack; a window and a multiple count groups

Alignment is a view: tokens are stored without the padding. A multiple is reached by splitting the
packs of most sequences, never by dropping one. Windows are planned one by one, which costs every
strategy but `ordered` an unfilled pack or so a window.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.errors import InputError, OptionError
from padless.packer.plan import Integers, PackPlan, as_lengths, index_type, shuffle_packs
from padless.packer.strategies.groups import group


class Planner(Protocol):
    """A strategy's own function: lengths [N] in tokens, planned as if there were nothing else."""

    def __call__(
        self,
        seq_lengths: ArrayLike,
        max_length: int,
        *,
        max_sequences_per_pack: int | None,
        seed: int,
        shuffle: bool,
    ) -> PackPlan: ...


class WindowPlanner(Protocol):
    """The same, with packs of sequences among `plan_window` neighbours; None: from anywhere."""

    def __call__(
        self,
        seq_lengths: ArrayLike,
        max_length: int,
        *,
        max_sequences_per_pack: int | None,
        seed: int,
        plan_window: int | None,
        shuffle: bool,
    ) -> PackPlan: ...


class Strategy(Protocol):
    """Plans `seq_lengths`, [N] in tokens, into packs of at most `max_length` tokens.

    The same arguments give the same plan; `shuffle` puts its packs in the order of `shuffle_packs`.
    Raises InputError for what no plan can hold.
    """

    def __call__(
        self,
        seq_lengths: ArrayLike,
        max_length: int,
        *,
        max_sequences_per_pack: int | None = None,
        seed: int = 0,
        align: int = 1,
        packs_multiple: int = 1,
        plan_window: int | None = None,
        groups: ArrayLike | None = None,
        shuffle: bool = False,
    ) -> PackPlan: ...


def constrained(planner: WindowPlanner, *, cuts: bool = False) -> Strategy:
    """The strategy that holds all constraints with the packs of `planner`; `cuts`: it cuts sequences."""

    def strategy(
        seq_lengths: ArrayLike,
        max_length: int,
        *,
        max_sequences_per_pack: int | None = None,
        seed: int = 0,
        align: int = 1,
        packs_multiple: int = 1,
        plan_window: int | None = None,
        groups: ArrayLike | None = None,
        shuffle: bool = False,
    ) -> PackPlan:
        lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack, cuts=cuts)
        check_constraints(max_length, align, packs_multiple, plan_window)
        padded, cap, grouped = padded_lengths(lengths, align), max_sequences_per_pack, None
        if groups is not None:
            if cuts:
                raise InputError("groups cannot be kept together by a strategy that cuts; choose another")
            grouped = group(padded, groups, max_length, cap)
            lengths = padded = grouped.tokens
            cap = cap and cap // int(grouped.sizes.max(initial=1))
        plan = planner(
            padded,
            max_length,
            max_sequences_per_pack=cap,
            seed=seed,
            plan_window=plan_window,
            shuffle=shuffle and packs_multiple == 1,
        )
        if plan.starts is not None and plan.lengths is not None and align > 1:  # last parts were padded
            taken = np.minimum(plan.lengths, lengths[plan.order] - plan.starts)
            plan = PackPlan(plan.order, plan.offsets, plan.starts, taken.astype(plan.lengths.dtype))
        if packs_multiple > 1:
            plan = split_packs(plan, lengths, packs_multiple)
            plan = shuffle_packs(plan, seed) if shuffle else plan
        return plan if grouped is None else grouped.expand(plan)

    return strategy


def in_windows(planner: Planner) -> WindowPlanner:
    """`planner` for one window after the other, each with a seed of its own."""

    def windowed(
        seq_lengths: ArrayLike,
        max_length: int,
        *,
        max_sequences_per_pack: int | None,
        seed: int,
        plan_window: int | None,
        shuffle: bool,
    ) -> PackPlan:
        lengths = np.asarray(seq_lengths)
        step = plan_window or max(len(lengths), 1)
        if step >= len(lengths):
            return planner(
                lengths, max_length, max_sequences_per_pack=max_sequences_per_pack, seed=seed, shuffle=shuffle
            )
        order = np.empty(len(lengths), index_type(len(lengths)))
        offsets: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        for number, begin in enumerate(range(0, len(lengths), step)):
            part = lengths[begin : begin + step]
            plan = planner(
                part,
                max_length,
                max_sequences_per_pack=max_sequences_per_pack,
                seed=seed + number,
                shuffle=False,
            )
            order[begin : begin + step] = plan.order
            order[begin : begin + step] += begin
            offsets.append(plan.offsets[1:] + begin)
        plan = PackPlan(order, np.concatenate(offsets))
        return shuffle_packs(plan, seed) if shuffle else plan

    return windowed


def check_constraints(max_length: int, align: int, packs_multiple: int, plan_window: int | None) -> None:
    """Raise OptionError for constraints that no plan of packs of `max_length` tokens can hold."""
    given = {"align": align, "packs_multiple": packs_multiple, "plan_window": plan_window}
    for name, value in given.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")
    if align > max_length:
        raise OptionError(
            f"align {align:,} is larger than max_length {max_length:,}: no padded sequence would fit a pack; "
            "lower it, or raise max_length"
        )
    if unused := max_length % align:
        raise OptionError(
            f"max_length {max_length:,} is no multiple of align {align:,}, so its last {unused:,} tokens "
            f"could not be used; give max_length {max_length - unused:,}, or another multiple"
        )


def padded_lengths(lengths: Integers, align: int) -> Integers:
    """Each length, [N] in tokens, rounded up to a multiple of `align`."""
    if align == 1:
        return lengths
    padded: Integers = -(-lengths.astype(np.int64) // align) * align
    return padded


def split_packs(plan: PackPlan, lengths: Integers, multiple: int, of: str = "packs") -> PackPlan:
    """The plan with as many more packs as make their number a multiple.

    The packs of most sequences are split, where their tokens are about halved; the halves stay side
    by side. `lengths` [N] in tokens; `of` says which packs these are. Raises InputError where
    there are fewer entries than packs.
    """
    missing = -len(plan) % multiple
    if len(plan) + missing > len(plan.order):
        raise OptionError(
            f"packs_multiple {multiple:,} is too large: {len(plan.order):,} sequences cannot make "
            f"{len(plan) + missing:,} {of}, the next multiple; lower it, or give more data or a strategy "
            "with more in a pack"
        )
    offsets = plan.offsets
    while missing:
        sizes = np.diff(offsets)
        largest = np.argsort(-sizes, kind="stable")[:missing]
        cuts = []
        for pack in largest[sizes[largest] > 1].tolist():
            begin, end = int(offsets[pack]), int(offsets[pack + 1])
            taken = lengths[plan.order[begin:end]] if plan.lengths is None else plan.lengths[begin:end]
            tokens = np.cumsum(taken, dtype=np.int64)
            half = int(np.searchsorted(tokens, tokens[-1] / 2)) + 1
            cuts.append(begin + min(half, end - begin - 1))
        offsets = np.sort(np.concatenate((offsets, np.array(cuts, np.int64))))
        missing -= len(cuts)
    return PackPlan(plan.order, offsets, plan.starts, plan.lengths)
