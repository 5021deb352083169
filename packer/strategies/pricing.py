"""What a sequence of each length costs in packs at best: the linear bound on packs, and its prices.

Give every length a price so that no pack holds more than 1; then all prices together are packs that no
plan can save. The best prices are the dual of Gilmore and Gomory's linear program (1961), whose columns
are patterns (what one pack holds), found by a search over all patterns for one worth more than 1.
Farley's bound (1990) makes any prices valid: all of them over the worth of the best pattern.

    lengths 1,025 to 2,046, packs of 4,096: a sequence up to 1,706 goes by three, price 0.17 to 0.5;
    a longer one by two, price 0.5. All tokens over 4,096 would be 3.6 % less packs.

Prices are held to straight lines between a few knots, so the program has a row a knot instead of one a
length: on uniform and few lengths the bound was that of the whole program (by HiGHS) within 1 in 100,000,
and came dozens of times sooner.
The trade-off is that search, of as many steps as lengths times `max_length` times sequences in a pack: it
is made where those are at most WORK, that is for long sequences, whose bound it is that needs it. Sums go
in a fixed order and patterns are valued in whole numbers, so every machine finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.plan import as_lengths, length_counts, lower_bound

PACK = 1 << 32
"""The price of a whole pack."""
WORK = 100_000_000
"""Steps of one search for patterns, at most: about a tenth of a second."""
KNOTS = 64
"""Knots, at most."""
MORE = 8
"""Knots added at once."""
SEARCHES = 200
"""Searches for patterns, at most; two dozen are usual."""
PATTERNS = 64
"""Patterns taken from one search, at most."""
_EXACT = 1e-9

Pattern = tuple[int, ...]  # kinds, ascending


@dataclass(frozen=True, kw_only=True, eq=False)
class Prices:
    """Prices of the lengths of a histogram, [kinds], and what they prove."""

    kinds: NDArray[np.int64]
    """The lengths that occur, ascending, [kinds]."""
    each: NDArray[np.int64]
    """What a sequence of each is worth, [kinds]; a pack holds at most `best[-1][max_length]`."""
    best: list[NDArray[np.int64]]
    """best[k][room]: the most that k sequences within `room` tokens are worth, [max_length + 1]."""
    bound: int
    """Packs that no plan of these counts can go below."""


def linear_bound(seq_lengths: ArrayLike, max_length: int, max_sequences_per_pack: int | None = None) -> int:
    """`lower_bound`, or the linear program's where that is higher.

    Slower than planning, and the same as `lower_bound` where the search is too long (see the module).
    Raises InputError as `as_lengths` does.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack)
    bound = lower_bound(lengths, max_length, max_sequences_per_pack)
    found = find_prices(*length_counts(lengths), max_length, max_sequences_per_pack)
    return bound if found is None else max(bound, found.bound)


def find_prices(
    kinds: NDArray[np.int64], counts: NDArray[np.int64], max_length: int, cap: int | None
) -> Prices | None:
    """The best prices for `counts` sequences of each of `kinds`, [kinds]; None where it takes too long."""
    if not len(kinds):
        return None
    slots = min(max_length // int(kinds[0]), cap or max_length)
    if slots * len(kinds) * max_length > WORK:
        return None
    knots = _first_knots(kinds, counts, max_length, slots)
    patterns: dict[Pattern, None] = {}
    found: Prices | None = None
    searches = 0
    while True:
        program = _Program(kinds, counts, knots, max_length, slots)
        added = True
        while added and searches < SEARCHES:
            prices = program.solve(patterns)
            best = best_worth(kinds, prices, max_length, slots)
            searches += 1
            worth = int(best[-1][-1])
            bound = -(-sum(map(int, counts * prices)) // worth)
            if found is None or bound >= found.bound:  # later ones are nearer to the end
                found = Prices(kinds=kinds, each=prices, best=best, bound=bound)
            added = worth > PACK * (1 + _EXACT) and _add_patterns(patterns, kinds, prices, best)
        assert found is not None
        more = program.more_knots(found.each)
        if len(knots) in (len(more), len(kinds)) or len(knots) >= KNOTS or searches >= SEARCHES:
            return found
        knots = more


def best_worth(
    kinds: NDArray[np.int64], prices: NDArray[np.int64], max_length: int, slots: int
) -> list[NDArray[np.int64]]:
    """For each number of sequences up to `slots`: the most they are worth in each room, [max_length + 1].

    A dynamic program; fewer tables where more sequences are worth no more.
    """
    best = [np.zeros(max_length + 1, np.int64)]
    with_one = np.empty(max_length + 1, np.int64)
    for _ in range(slots):
        fewer, more = best[-1], best[-1].copy()
        for length, price in zip(kinds.tolist(), prices.tolist(), strict=True):
            if price:
                tried = np.add(
                    fewer[: max_length + 1 - length], price, out=with_one[: max_length + 1 - length]
                )
                np.maximum(more[length:], tried, out=more[length:])
        if np.array_equal(more, fewer):
            break
        best.append(more)
    return best


def _first_knots(
    kinds: NDArray[np.int64], counts: NDArray[np.int64], max_length: int, slots: int
) -> NDArray[np.int64]:
    """Where prices may bend at first: at parts of a pack and at shares of the sequences; ends included."""
    if len(kinds) <= KNOTS // 2:
        return kinds
    parts = max_length // np.arange(1, min(slots, KNOTS // 4) + 2)
    beside = np.searchsorted(kinds, np.concatenate((parts, parts + 1)))
    shares = np.searchsorted(np.cumsum(counts), np.arange(16) * int(counts.sum()) // 16)
    places = np.concatenate((beside - 1, beside, shares, [0, len(kinds) - 1]))
    first: NDArray[np.int64] = kinds[np.unique(np.clip(places, 0, len(kinds) - 1))]
    return first


def _add_patterns(
    patterns: dict[Pattern, None],
    kinds: NDArray[np.int64],
    prices: NDArray[np.int64],
    best: list[NDArray[np.int64]],
) -> bool:
    """Add the patterns worth most, each with another length in it; whether there was a new one."""
    room, before = len(best[0]) - 1, len(patterns)
    worth = prices + best[-2][room - kinds]
    for first in np.argsort(-worth, kind="stable")[:PATTERNS].tolist():
        if worth[first] <= PACK * (1 + _EXACT):
            break
        patterns[_trace(first, kinds, prices, best)] = None
    return len(patterns) > before


def _trace(
    first: int, kinds: NDArray[np.int64], prices: NDArray[np.int64], best: list[NDArray[np.int64]]
) -> Pattern:
    """A best pattern that holds kind `first`."""
    pattern, room = [first], len(best[0]) - 1 - int(kinds[first])
    for fewer in best[-3::-1]:
        within = int(np.searchsorted(kinds, room, side="right"))
        if not within:
            break
        kind = int(np.argmax(prices[:within] + fewer[room - kinds[:within]]))
        if not prices[kind]:
            break
        pattern.append(kind)
        room -= int(kinds[kind])
    return tuple(sorted(pattern))


class _Program:
    """The linear program with a row for each knot, solved by the simplex method over the patterns so far."""

    def __init__(
        self,
        kinds: NDArray[np.int64],
        counts: NDArray[np.int64],
        knots: NDArray[np.int64],
        max_length: int,
        slots: int,
    ) -> None:
        self.kinds, self.counts, self.knots = kinds, counts, knots
        # A length between two knots counts for both, by its distances.
        self.below = np.clip(np.searchsorted(knots, kinds, side="right") - 1, 0, max(len(knots) - 2, 0))
        self.above = np.minimum(self.below + 1, len(knots) - 1)
        width = np.maximum(knots[self.above] - knots[self.below], 1)
        self.share = (kinds - knots[self.below]) / width
        self.needed = self._of_knots(np.arange(len(kinds)), counts.astype(np.float64))
        self.alone = np.minimum(max_length // knots, slots).astype(np.float64)
        """[knots] sequences of a knot's own length that fill a pack: the patterns to begin with."""

    def solve(self, patterns: dict[Pattern, None]) -> NDArray[np.int64]:
        """The best prices, [kinds], that make no pattern worth more than a pack."""
        knots = len(self.knots)
        columns = np.zeros((knots, len(patterns)))
        for number, pattern in enumerate(patterns):
            columns[:, number] = self._of_knots(np.array(pattern), np.ones(len(pattern)))
        inverse = np.diag(1 / self.alone)
        # Small whole numbers make ties, among which the method could turn in circles: none are left.
        needed = self.needed * (1 + 1e-6 * ((1 + np.arange(knots)) * 0.618034 % 1))
        used = needed / self.alone  # [knots] packs of each pattern of the basis
        costs = np.ones(knots)
        for _ in range(50 * knots):
            prices = (costs[:, None] * inverse).sum(axis=0)
            reduced = 1 - (prices[:, None] * columns).sum(axis=0)
            # A pattern worth more than a pack, or a price below nothing, which a surplus takes up.
            entering = int(reduced.argmin()) if len(patterns) else 0
            least = float(reduced[entering]) if len(patterns) else 0.0
            knot = int(prices.argmin())
            if min(least, float(prices[knot])) > -_EXACT:
                break
            if least <= prices[knot]:
                column, cost = columns[:, entering], 1.0
            else:
                column, cost = -np.eye(knots)[knot], 0.0
            change = np.zeros(knots)
            for row in np.flatnonzero(column):
                change += inverse[:, row] * column[row]
            rows = np.flatnonzero(change > _EXACT)
            if not len(rows):
                break
            leaving = rows[int((used[rows] / change[rows]).argmin())]
            packs = used[leaving] / change[leaving]
            used = np.maximum(used - packs * change, 0)
            used[leaving] = packs
            pivot = inverse[leaving] / change[leaving]
            inverse -= change[:, None] * pivot
            inverse[leaving] = pivot
            costs[leaving] = cost
        each = prices[self.below] * (1 - self.share) + prices[self.above] * self.share
        found: NDArray[np.int64] = (np.maximum(each, 0) * PACK).astype(np.int64)
        return found

    def more_knots(self, prices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The knots and up to MORE others, halfway to the next where prices bend most."""
        at_knots = prices[np.searchsorted(self.kinds, self.knots)].astype(np.float64)
        widths = np.diff(self.knots)
        bends = np.abs(np.diff(np.diff(at_knots) / widths, prepend=0, append=0))
        bends[[0, -1]] = 0
        off = (bends[:-1] + bends[1:]) * widths
        halves = np.searchsorted(self.kinds, self.knots[:-1] + widths // 2)
        order = np.argsort(-off, kind="stable")
        new = [int(self.kinds[half]) for half in halves[order] if self.kinds[half] not in self.knots]
        return np.union1d(self.knots, new[:MORE]).astype(np.int64)

    def _of_knots(self, kinds: NDArray[np.int64], amounts: NDArray[np.float64]) -> NDArray[np.float64]:
        """[knots] what `amounts` of these kinds count for at each knot."""
        share, knots = self.share[kinds], len(self.knots)
        counted: NDArray[Any] = np.bincount(self.below[kinds], amounts * (1 - share), knots)
        counted += np.bincount(self.above[kinds], amounts * share, knots)
        return counted
