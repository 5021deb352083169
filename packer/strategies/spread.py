"""Random order, each pack closed exactly with its last few sequences: full packs that look alike.

max_length 8, drawn 3 2 5 3 3:   [3 5] [2 3 3]   full

A pack takes sequences as they are drawn until a handful from the rest fills it to the last token.
So every pack is a fair sample of the data: alike in sequences, in work and in what it teaches, and
far from any cap. Decreasing orders end in packs of hundreds of short sequences instead, and lose up
to 13 % to a cap.

The trade-off is a loop over single sequences in Python, where `bfd` moves counts; so from two times
BASE sequences on, most packs are planned once and made several times, of different sequences of the
same lengths. And where random order needs more than one pack in a thousand more than best-fit
decreasing (few sequences to a pack, none of them short), the plan of `bfd` is taken.

It is not the default. On the files tried (both of alpaca, two templates, four lengths, with and without a
cap of 64) it reaches the bound in 64 of 64 plans, and on 216 made-up histograms of 20 to 2,000 sequences it
never needs more packs than `bfd`; but in 42 of those, nearly all of lengths between a quarter and half of a
pack, it is two packs or more over the linear bound, and it takes 0.5 s more for 2 million sequences (0.7
against 0.15 s for alpaca forty times), half of the time in which `repack` is to move them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.plan import PackPlan, as_lengths, length_counts, lower_bound
from padless.packer.strategies.bfd import bfd, packs_needed
from padless.packer.strategies.closing import BUDGET, END, LAST, Stock, close_longest_first
from padless.packer.strategies.counting import Pattern, plan_of_patterns, random_order

BASE = 1 << 17
"""Sequences that are drawn one by one."""
SHARE = 3 / 4
"""Of every length, what may go into packs made several times; the rest keeps all lengths in play."""
BACK = 3
"""Sequences put off to the next pack, at most, where the room behind them cannot be filled."""
NEARLY = 2
"""Packs over the bound, at most, that make another draw worth its while."""
TOLERANCE = 0.001
"""Share of packs more than `bfd`'s that packs which look alike are worth."""


def spread(
    seq_lengths: ArrayLike,
    max_length: int,
    *,
    max_sequences_per_pack: int | None = None,
    seed: int = 0,
    shuffle: bool = False,
) -> PackPlan:
    """Plan in random order, drawn from `seed`, with exact closings.

    `seq_lengths` [N] in tokens, `max_length` the tokens of a pack. Raises InputError for a
    sequence that fits no pack, an empty one, or a limit below 1.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack)
    bound = lower_bound(lengths, max_length, max_sequences_per_pack)
    histogram = length_counts(lengths)
    packs, patterns = len(lengths) + 1, list[Pattern]()
    for draw in range(draws(len(lengths))):
        drawn = spread_patterns(*histogram, max_length, max_sequences_per_pack, seed + draw)
        needed = sum(copies for copies, _ in drawn)
        if needed < packs:
            packs, patterns = needed, drawn
        if packs == bound or packs > bound + NEARLY or len(lengths) > BASE:
            break
    if packs > bound:
        decreasing = packs_needed(*histogram, max_length, max_sequences_per_pack)
        if packs > (1 + TOLERANCE) * decreasing:
            return bfd(
                lengths, max_length, max_sequences_per_pack=max_sequences_per_pack, seed=seed, shuffle=shuffle
            )
    return plan_of_patterns(lengths, patterns, seed, shuffle=shuffle)


def draws(count: int) -> int:
    """How often to draw `count` sequences, at most: each draw costs as much as the first."""
    return max(3, min(20, 20_000 // max(count, 1)))


def spread_patterns(
    occurring: NDArray[np.int64], counts: NDArray[np.int64], max_length: int, cap: int | None, seed: int
) -> list[Pattern]:
    """The lengths in each pack, for `counts` sequences of each `occurring` length, [kinds]."""
    total = int(counts.sum())
    slots = cap or max(total, 1)
    tokens = int((occurring * counts).sum())
    # Where the cap alone decides, packs are full by sequences and closings would only mix them less.
    exact = total * max_length < slots * tokens
    # Longest first would leave the last packs more sequences than a cap near the mean allows.
    end = END if 2 * total * max_length < slots * tokens else 0
    patterns: list[Pattern] = []
    left = counts.copy()
    while (copies := int(left.sum()) // BASE) > 1:
        stock = _stock(occurring, (left * SHARE).astype(np.int64) // copies)
        drawn = _draw(stock, max_length, slots, exact, end, seed)
        for pattern in drawn:
            patterns.append((copies, pattern))
            np.subtract.at(left, np.searchsorted(occurring, pattern), copies)
        if not drawn:  # nearly every length is another
            break
    stock = _stock(occurring, left)
    drawn = _draw(stock, max_length, slots, exact, end, seed)
    patterns += [(1, pattern) for pattern in drawn]
    return patterns + close_longest_first(stock, max_length, slots)


def _stock(occurring: NDArray[np.int64], counts: NDArray[np.int64]) -> Stock:
    return Stock(zip(occurring.tolist(), counts.tolist(), strict=True))


def _draw(stock: Stock, max_length: int, cap: int, exact: bool, end: int, seed: int) -> list[list[int]]:
    """Packs drawn from `stock` and taken out of it, until `end` sequences are left."""
    lengths = np.repeat(np.array(stock.kinds, np.int64), list(stock.left.values()))
    drawn: list[int] = lengths[random_order(len(lengths), seed)].tolist()
    # A closing is looked for once so little room is left, or so few places.
    near = 2 * stock.tokens // max(stock.sequences, 1) if exact else -1
    few = LAST if exact else 0
    packs: list[list[int]] = []
    ahead: dict[int, int] = {}  # sequences of each length taken by closings before their turn
    pack: list[int] = []
    room, slots, left = max_length, cap, stock.left
    ended = _nearly_used_up(stock, end, max_length)
    for length in drawn:
        while not ahead.get(length):
            if length <= room and room > near and slots > few:
                break
            full = length > room or not slots
            closing: list[int] = []
            put_off: list[int] = []
            if exact:
                closing = stock.close(room, min(slots, LAST), longest=length, budget=BUDGET)
                if full and not closing:
                    closing, put_off = _go_back(stock, pack, room, slots)
            if not full and not closing:
                break
            done = pack[: len(pack) - len(put_off)] + closing
            for other in closing:
                left[other] -= 1
                ahead[other] = ahead.get(other, 0) + 1
            stock.book(done)
            packs.append(done)
            pack, room, slots = put_off, max_length - sum(put_off), cap - len(put_off)
            ended = _nearly_used_up(stock, end, max_length)
        else:
            ahead[length] -= 1
            continue
        if ended:
            break
        left[length] -= 1
        pack.append(length)
        room -= length
        slots -= 1
    stock.book(pack)
    for other in pack:
        stock.put(other)
    return packs


def _nearly_used_up(stock: Stock, end: int, max_length: int) -> bool:
    """Whether what is left is for the longer search, longest first."""
    return stock.sequences <= end or bool(end) and stock.tokens <= 3 * max_length


def _go_back(stock: Stock, pack: list[int], room: int, slots: int) -> tuple[list[int], list[int]]:
    """A closing of `pack` without its last few, and those; none where there is no closing."""
    for back in range(min(BACK + 1, len(pack))):
        if back:
            room += pack[-back]
            slots += 1
        # Not the longest at once: it would leave the rest to the shortest, which would run out.
        for longest in (room * 2 // 3, room):
            if closing := stock.close(room, min(slots, LAST), longest=longest, budget=BUDGET):
                return closing, pack[len(pack) - back :]
    return [], []
