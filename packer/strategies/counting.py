"""From counts back to sequences: what strategies that plan over the length histogram share.

Sequences of one length are interchangeable until the last step, so a strategy says only how many
of which length go where, as events or as patterns; here numpy turns that into sequence numbers.
The price of both forms is a sort of all sequences by length, which a loop over single sequences
would not need; it is a counting sort, and far cheaper than that loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from padless.packer.plan import (
    BLOCK,
    Integers,
    PackPlan,
    blocks,
    drawn_order,
    index_type,
    length_counts,
    shuffle_packs,
)

_PLACED = 1 << 18
"""Sequences placed at a time: packs that follow each other lie apart in a drawn order, and more of them in
the caches at once cost less than smaller temporaries save."""
_SORTED = 1 << 20
"""Sequences of one length that are sorted at once, at most: numpy takes 16 bytes for each."""

# rank of the first sequence, sequences per pack, first pack, sequences already in each pack
Event = tuple[int, int, int, int]
# first pack, number of packs, sequences in each
Group = tuple[int, int, int]
# how many packs look like this, and the lengths in each
Pattern = tuple[int, list[int]]


def plan_of_events(
    lengths: Integers, events: list[Event], groups: list[Group], shuffle: int | None = None
) -> PackPlan:
    """The plan in which each sequence, longest first, goes where its event says.

    `lengths` [N] in tokens. Events follow the ranks without a gap; groups hold every pack once.
    `shuffle`: the seed of the order of packs, as `shuffle_packs` draws it; None: as they were opened.
    """
    # Neither needs the other, and numpy lets both run at once.
    with ThreadPoolExecutor(1) as beside:
        laid_out = beside.submit(_lay_out, groups, shuffle)
        by_length = longest_first(lengths, *length_counts(lengths))
        begins, offsets = laid_out.result()
    return PackPlan(_place(events, begins, by_length), offsets)


def _lay_out(groups: list[Group], shuffle: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each pack begins, [packs] as they were opened, and a plan's offsets, [packs + 1]."""
    _, packs, sizes = np.array(sorted(groups), np.int64).reshape(-1, 3).T
    # [packs] sequences, as small as can be: a drawn order reads them all over the place.
    each = np.repeat(sizes.astype(np.min_scalar_type(int(sizes.max(initial=0)))), packs)
    offsets = np.zeros(len(each) + 1, np.int64)
    if shuffle is None:
        np.cumsum(each, out=offsets[1:])
        return offsets[:-1], offsets
    moved = drawn_order(len(each), shuffle)
    np.cumsum(each.take(moved), out=offsets[1:])
    begins = np.empty(len(each), np.int64)
    begins[moved] = offsets[:-1]
    return begins, offsets


def plan_of_patterns(lengths: Integers, patterns: Sequence[Pattern], seed: int, *, shuffle: bool) -> PackPlan:
    """The plan whose packs hold the lengths that the patterns say, pattern after pattern.

    `lengths` [N] in tokens; the patterns use each exactly as often as it occurs. Which sequences
    of one length go where is drawn from `seed`, and with `shuffle` the order of the packs.
    """
    sizes = np.array([len(pattern) for _, pattern in patterns], np.int64)
    copies = np.array([copies for copies, _ in patterns], np.int64)
    offsets = np.concatenate(([0], np.cumsum(np.repeat(sizes, copies))))
    assert offsets[-1] == len(lengths), f"patterns hold {offsets[-1]} of {len(lengths)} sequences"
    plan = PackPlan(_deal(lengths, patterns, seed), offsets)
    return shuffle_packs(plan, seed) if shuffle else plan


def _deal(lengths: Integers, patterns: Sequence[Pattern], seed: int) -> Integers:
    """The order of a plan, [N]: a drawn sequence of the length that the patterns have at each place."""
    histogram = length_counts(lengths)
    # [N] the length that stands at each place of the order
    places = np.empty(len(lengths), np.min_scalar_type(int(histogram[0].max(initial=0))))
    at = 0
    for count, pattern in patterns:
        end = at + count * len(pattern)
        places[at:end].reshape(count, len(pattern))[:] = pattern
        at = end
    place = longest_first(places, *histogram)
    del places  # 4 bytes a sequence that the order then takes
    by_length = longest_first(lengths, *histogram)
    _draw_within(by_length, histogram[1][::-1], seed)
    order = np.empty_like(by_length)
    order[place] = by_length
    return order


def _draw_within(by_length: Integers, counts: NDArray[np.int64], seed: int) -> None:
    """Put the sequences of each length, `counts` of them one length after the other, in a drawn order.

    That of `random_order`, as if all had been drawn before they were sorted by length: but what is
    sorted at a time stays in the caches, and takes 20 bytes for each of these only.
    """
    bits = _random_bits(len(by_length), seed)
    for kinds, entries in blocks(np.concatenate(([0], np.cumsum(counts)))):
        here = by_length[entries]
        drawn = bits.take(here)
        if len(here) > _SORTED:  # all of one length
            by_length[entries] = here.take(longest_first(~drawn, *length_counts(~drawn)))
            continue
        order = np.argsort(drawn, kind="stable")
        kind = np.repeat(np.arange(len(counts[kinds]), dtype=np.uint16), counts[kinds])
        order = order.take(np.argsort(kind.take(order), kind="stable"))
        by_length[entries] = here.take(order)


def random_order(count: int, seed: int) -> Integers:
    """The numbers below `count` in an order drawn from `seed`, [count].

    Sorted by 16 random bits each, which is a counting sort: among more than 65,536 some get the
    same bits, and those keep their order. PCG64's raw bits stay the same in every numpy.
    """
    return np.argsort(_random_bits(count, seed), kind="stable").astype(index_type(count))


def _random_bits(count: int, seed: int) -> NDArray[np.uint16]:
    """16 bits each, [count], drawn from `seed`."""
    raw = np.random.PCG64(seed).random_raw(count // 4 + 1).astype("<u8", copy=False)
    return raw.view("<u2")[:count]


def longest_first(lengths: Integers, occurring: Integers, counts: NDArray[np.int64]) -> Integers:
    """Numbers of the sequences by falling length, equal ones as they came: [2 5 2] -> [1 0 2].

    `occurring` and `counts` are the lengths' histogram. A counting sort over blocks: one argsort
    of 20 million takes twice as long and 16 bytes a sequence.
    """
    order = np.empty(len(lengths), index_type(len(lengths)))
    places = len(lengths) - np.cumsum(counts)  # where the next sequence of each length goes
    for begin in range(0, len(lengths), BLOCK):
        block = lengths[begin : begin + BLOCK]
        ascending = _stable_argsort(block)
        block = block[ascending]
        run_begins = np.flatnonzero(np.diff(block, prepend=0))
        run_sizes = np.diff(run_begins, append=len(block))
        kinds = np.searchsorted(occurring, block[run_begins])
        shifts = np.repeat(places[kinds] - run_begins, run_sizes)
        order[np.arange(len(block)) + shifts] = ascending + begin
        places[kinds] += run_sizes
    return order


def _stable_argsort(values: Integers) -> NDArray[np.intp]:
    order = np.argsort(values.astype(np.uint16), kind="stable")
    # numpy sorts 16 bits by counting, ten times faster than it merges wider integers.
    for shift in range(16, int(values.max()).bit_length(), 16):
        digit = (values >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _place(events: list[Event], begins: NDArray[np.int64], by_length: Integers) -> Integers:
    """The order of a plan: each sequence of `by_length`, [N], put where its event says.

    `begins`, [packs]: the place of each pack's first sequence.
    The sequence `i` ranks into an event goes into pack `first + i // each`, place
    `size + i % each`.
    """
    order = np.empty_like(by_length)
    table = np.array(events, by_length.dtype).reshape(-1, 4)
    ranks = np.ascontiguousarray(table[:, 0])
    for begin in range(0, len(by_length), _PLACED):
        end = min(begin + _PLACED, len(by_length))
        here = slice(*np.searchsorted(ranks, (begin, end - 1), side="right") - (1, 0))
        shares = np.diff(np.clip(np.append(ranks[here], end), begin, None))
        rank, each, first, size = np.repeat(table[here], shares, axis=0).T
        within = np.arange(begin, end, dtype=table.dtype) - rank
        pack = within // each
        order[begins.take(first + pack) + (size + within - pack * each)] = by_length[begin:end]
    return order
