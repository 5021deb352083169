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
LAST = 6
"""Sequences that close a pack, at most."""
BUDGET = 2000
"""Lengths tried for a closing: it is found within dozens, or hardly ever."""
END = 150
"""Sequences that are few enough for a longer search, the last ones of a plan."""
END_LAST = 12
END_BUDGET = 20_000


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

    def book(self, lengths: list[int]) -> None:
        """Do the rest of `take` for sequences whose counts in `left` the caller has lowered itself.

        For a loop over single sequences, in which a call for each would take a quarter of the time.
        """
        self.sequences -= len(lengths)
        self.tokens -= sum(lengths)
        for length in lengths:
            if not self.left.get(length, 1):
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


def close_longest_first(stock: Stock, max_length: int, cap: int) -> list[Pattern]:
    """Patterns that use all of `stock` up: longest first, each pack closed with its last few.

    Packs hold at most `max_length` tokens and `cap` sequences. All packs of a pattern are made at
    once, as many as the stock has.
    """
    patterns: list[Pattern] = []
    while stock.sequences:
        last, budget = (END_LAST, END_BUDGET) if stock.sequences <= END else (LAST, BUDGET)
        if stock.tokens <= max_length and stock.sequences <= cap:
            pattern = [length for length, count in stock.left.items() for _ in range(count)]
            patterns.append((1, pattern))
            return patterns
        pattern = []
        room, slots = max_length, cap
        while slots and (longest := stock.longest_within(room)):
            # As many of the longest as leave a room still too large to be closed, but one at least.
            beyond = min((room - 1) // longest - last, slots - last, stock.left[longest])
            if beyond > 0:
                added = [longest] * beyond
            else:
                closing = stock.close(room, min(slots, last), longest=longest, budget=budget)
                added = closing or [longest]
            for length, count in Counter(added).items():
                stock.take(length, count)
            pattern += added
            room -= sum(added)
            slots -= len(added)
        needed = Counter(pattern)
        more = min(stock.left.get(length, 0) // count for length, count in needed.items())
        for length, count in needed.items() if more else ():
            stock.take(length, more * count)
        patterns.append((1 + more, pattern))
    return patterns
