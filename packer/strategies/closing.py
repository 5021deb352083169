"""The sequences not packed yet, as counts by length, and the search that fills a room exactly.

A pack that ends exactly full wastes nothing, so as long as every pack does, no plan is better.
Among thousands of lengths a handful that add up to a given room is nearly always there; it is
looked for depth first, longest first, with a budget, since to prove that none exists can take
longer than the whole plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable

from padless.packer.strategies.counting import Pattern

EFFORT = 20
"""Lengths tried for each sequence, on average, before only single ones are looked up."""


class Stock:
    """Counts of sequences by length."""

    def __init__(self, counts: Iterable[tuple[int, int]]) -> None:
        """`counts`: pairs of a length in tokens and how many sequences have it."""
        self.left = {length: count for length, count in sorted(counts) if count}
        self.kinds = list(self.left)
        """The lengths that occur, ascending."""
        self.sequences = sum(self.left.values())
        self.tokens = sum(length * count for length, count in self.left.items())
        self.effort = EFFORT * (self.sequences + 10_000)
        """Lengths that may still be tried: data without exact closings must not cost a search a pack."""
        self._budget = 0

    def take(self, length: int, count: int = 1) -> None:
        """Remove `count` sequences of this length, which must be there."""
        self.left[length] -= count
        self.sequences -= count
        self.tokens -= length * count
        if not self.left[length]:
            del self.left[length], self.kinds[bisect_left(self.kinds, length)]

    def put(self, length: int) -> None:
        """Add a sequence of this length."""
        if length not in self.left:
            insort(self.kinds, length)
        self.left[length] = self.left.get(length, 0) + 1
        self.sequences += 1
        self.tokens += length

    def longest_within(self, room: int) -> int:
        """The longest length that fits into `room` tokens; 0 where none does."""
        found = bisect_right(self.kinds, room)
        return self.kinds[found - 1] if found else 0

    def close(self, room: int, slots: int, *, longest: int, budget: int) -> list[int]:
        """Lengths of at most `slots` sequences, none over `longest`, that fill `room` exactly.

        Empty where `budget` lengths tried did not find them. Removes nothing.
        """
        self._budget = start = min(budget, self.effort)
        top = bisect_right(self.kinds, longest) - 1
        found = self._search(room, slots, top) if top >= 0 and slots else []
        self.effort -= start - max(self._budget, 0)
        return found

    def _search(self, room: int, slots: int, top: int) -> list[int]:
        """`close` with lengths up to `kinds[top]`."""
        kinds, left = self.kinds, self.left
        if room <= kinds[top] and left.get(room):
            return [room]
        if slots < 2:
            return []
        for at in range(min(top, bisect_right(kinds, room - kinds[0]) - 1), -1, -1):
            length = kinds[at]
            if length * slots < room:
                break  # nor will shorter ones do
            if not left[length]:
                continue
            self._budget -= 1
            if self._budget < 0:
                break
            left[length] -= 1
            found = self._search(room - length, slots - 1, at)
            left[length] += 1
            if found:
                return [length, *found]
        return []


def close_longest_first(stock: Stock, max_length: int, cap: int, *, last: int, budget: int) -> list[Pattern]:
    """Patterns that use all of `stock` up: longest first, each pack closed with its `last` few.

    Packs hold at most `max_length` tokens and `cap` sequences. All packs of a pattern are made at
    once, as many as the stock has. `budget` lengths are tried for a closing.
    """
    patterns: list[Pattern] = []
    while stock.sequences:
        if stock.tokens <= max_length and stock.sequences <= cap:
            pattern = [length for length, count in stock.left.items() for _ in range(count)]
            patterns.append((1, pattern))
            return patterns
        pattern = []
        room, slots = max_length, cap
        while slots and (longest := stock.longest_within(room)):
            closing = stock.close(room, min(slots, last), longest=longest, budget=budget)
            for length in closing or [longest]:
                stock.take(length)
                pattern.append(length)
                room -= length
                slots -= 1
        needed = Counter(pattern)
        more = min(stock.left.get(length, 0) // count for length, count in needed.items())
        for length, count in needed.items() if more else ():
            stock.take(length, more * count)
        patterns.append((1 + more, pattern))
    return patterns
