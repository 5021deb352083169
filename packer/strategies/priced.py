"""Packs that are worth their whole price, made again in parts until the linear bound is near.

A plan in which every pack is worth a whole one at the best prices (see `pricing`) has as many packs as
the bound says. So each pack is filled with what adds up to that worth, looked for depth first; the tables
of the best worths tell at every step what can still add up. What is left over at the end is unlike the
whole, so it is put together with a sample of full packs and all of it is packed anew, at its own prices.

The trade-off is time: seconds, for data on which other orders leave up to a tenth of the room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from padless.packer.strategies.closing import Stock, close_longest_first
from padless.packer.strategies.counting import Pattern, random_order
from padless.packer.strategies.pricing import PACK, Prices, find_prices

TOLERANCE = 10_000
"""Packs of the bound for which one more is near enough."""
ROUNDS = 40
"""Parts that are packed anew, at most."""
PATIENCE = 20
"""Parts in a row that saved no pack before it is given up."""
SAMPLE = 120
"""Packs in such a part: a few come out short of their worth however many there are, so few are better."""
FEW = 2800
"""Sequences left that are no longer packed in halves."""
NEARLY = PACK >> 22
"""What a pack may lack of its worth: rounding, over all its sequences."""
SHORT = (NEARLY, PACK >> 12, PACK >> 10, PACK >> 8)
"""What packs may lack, one after the other, where nothing fuller is left to be found."""
TRIES = 50
"""Sequences tried for a pack before it is given up."""


def near_enough(packs: int, bound: int) -> bool:
    """Whether a plan is within one pack in TOLERANCE of the bound."""
    return packs <= bound + bound // TOLERANCE


def priced_patterns(
    prices: Prices, counts: NDArray[np.int64], max_length: int, cap: int, seed: int
) -> list[Pattern]:
    """Patterns for `counts` sequences of each of the prices' kinds, near the bound where that works out."""
    best: list[Pattern] = []
    for by_count in (True, False):
        found = _fill_in_halves(prices, counts, max_length, cap, by_count=by_count)
        if not best or _packs(found) < _packs(best):
            best = found
        if near_enough(_packs(best), prices.bound):
            return best
        if _packs(best) <= 1.001 * prices.bound:
            break
    worth = dict(zip(prices.kinds.tolist(), prices.each.tolist(), strict=True))
    full = _full(prices)
    packs = [pattern for copies, pattern in best for _ in range(copies)]
    last = 0  # the round that saved a pack
    for number in range(ROUNDS):
        if near_enough(len(packs), prices.bound) or number - last > PATIENCE:
            break
        drawn = random_order(len(packs), seed + number).tolist()
        lacking = [pack for pack in drawn if sum(worth[length] for length in packs[pack]) < full]
        whole = [pack for pack in drawn if sum(worth[length] for length in packs[pack]) >= full]
        part = lacking[: SAMPLE // 2] + whole[: max(SAMPLE // 2, SAMPLE - len(lacking))]
        anew = _pack_anew([packs[pack] for pack in part], max_length, cap)
        if len(anew) < len(part):
            last = number
        if len(anew) <= len(part):
            chosen = set(part)
            packs = [pack for place, pack in enumerate(packs) if place not in chosen] + anew
    return [(1, pattern) for pattern in packs]


def _pack_anew(packs: list[list[int]], max_length: int, cap: int) -> list[list[int]]:
    """The same sequences in as few packs as are found, at their own prices."""
    kinds, counts = np.unique([length for pack in packs for length in pack], return_counts=True)
    prices = find_prices(kinds, counts, max_length, cap)
    assert prices is not None, "a part takes no longer than the whole"
    best: list[Pattern] = []
    for by_count in (True, False):
        left, found = counts.copy(), list[Pattern]()
        for short in SHORT:
            found += _fill(prices, left, 0, max_length, cap, by_count=by_count, share=0, short=short)
        rest = Stock(zip(kinds.tolist(), left.tolist(), strict=True))
        found += close_longest_first(rest, max_length, cap)
        if not best or _packs(found) < _packs(best):
            best = found
        if _packs(best) <= prices.bound:
            break
    return [pattern for copies, pattern in best for _ in range(copies)]


def _packs(patterns: list[Pattern]) -> int:
    return sum(copies for copies, _ in patterns)


def _full(prices: Prices) -> int:
    """What a pack must be worth to lose nothing."""
    return int(prices.best[-1][-1]) - NEARLY


def _fill_in_halves(
    prices: Prices, counts: NDArray[np.int64], max_length: int, cap: int, *, by_count: bool
) -> list[Pattern]:
    """Packs for all sequences, with prices found anew whenever half of them are packed.

    What is left drifts away from the whole, and so do its best prices.
    """
    patterns: list[Pattern] = []
    while True:
        left = counts.copy()
        patterns += _fill(prices, left, int(left.sum()) // 2, max_length, cap, by_count=by_count, share=0.25)
        kept = left > 0
        if 2 * left.sum() > counts.sum() or left.sum() < FEW:
            break
        again = find_prices(prices.kinds[kept], left[kept], max_length, cap)
        assert again is not None, "a part takes no longer than the whole"
        prices, counts = again, left[kept]
    patterns += _fill(prices, left, 0, max_length, cap, by_count=by_count, share=0)
    rest = Stock(zip(prices.kinds.tolist(), left.tolist(), strict=True))
    return patterns + close_longest_first(rest, max_length, cap)


def _fill(
    prices: Prices,
    left: NDArray[np.int64],
    until: int,
    max_length: int,
    cap: int,
    *,
    by_count: bool,
    share: float,
    short: int = NEARLY,
) -> list[Pattern]:
    """Packs of full worth, taken out of `left`, until so many sequences are left or none are found.

    `by_count`: lengths of which most are left go first, which keeps the rest like the whole; otherwise
    the longest. `share` of all the packs that a pattern could make are made of it, one at least.
    """
    kinds = prices.kinds
    search = _Search(prices, left, by_count=by_count, short=short)
    patterns: list[Pattern] = []
    given_up = np.zeros(len(kinds), bool)
    remaining = int(left.sum())
    while remaining > until and (live := np.flatnonzero((left > 0) & ~given_up)).size:
        first = int(live[left[live].argmax()] if by_count else live[-1])
        found = search.fill(first, max_length, cap)
        if not found:
            given_up[first] = True
            continue
        used, each = np.unique(found, return_counts=True)
        copies = max(1, int(int((left[used] // each).min()) * share))
        left[used] -= copies * each
        remaining -= copies * len(found)
        patterns.append((copies, kinds[found].tolist()))
    return patterns


class _Search:
    """Depth first, for sequences that make a pack worth its whole price."""

    def __init__(self, prices: Prices, left: NDArray[np.int64], *, by_count: bool, short: int) -> None:
        self.kinds, self.each, self.best = prices.kinds, prices.each, prices.best
        self.full = int(prices.best[-1][-1]) - short
        self.left, self.by_count = left, by_count

    def fill(self, first: int, max_length: int, cap: int) -> list[int]:
        """Kinds that make a pack with kind `first`; empty where none were found."""
        self.tries = TRIES
        self.left[first] -= 1
        top = len(self.kinds) - 1 if self.by_count else first
        rest = self._add(max_length - int(self.kinds[first]), cap - 1, self.full - int(self.each[first]), top)
        self.left[first] += 1
        return [] if rest is None else [first, *rest]

    def _add(self, room: int, slots: int, lacking: int, top: int) -> list[int] | None:
        """Kinds up to `top` that are worth what is lacking and fit; None where none were found."""
        if lacking <= 0:
            return []
        within = min(top + 1, int(self.kinds.searchsorted(room, side="right")))
        if not within or slots < 1:
            return None
        most = self.best[min(slots - 1, len(self.best) - 1)]
        worth = self.each[:within] + most[room - self.kinds[:within]]
        fitting = np.flatnonzero((worth >= lacking) & (self.left[:within] > 0))
        if self.by_count:
            fitting = fitting[np.argsort(-self.left[fitting], kind="stable")]
        else:
            fitting = fitting[::-1]
        for kind in fitting.tolist():
            self.tries -= 1
            if self.tries < 0:
                return None
            self.left[kind] -= 1
            lower = top if self.by_count else kind
            rest = self._add(room - int(self.kinds[kind]), slots - 1, lacking - int(self.each[kind]), lower)
            self.left[kind] += 1
            if rest is not None:
                return [kind, *rest]
        return None
