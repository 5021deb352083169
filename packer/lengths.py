"""Sequence lengths as counts of each length, and what batches of them cost when they are padded.

    lengths [3 1 2 3]  ->  values [1 2 3], counts [1 1 2]

Everything that naive batching wastes follows from the counts alone, exactly: a batch of B drawn at random
is padded to its longest, and how long that is on average is a sum over the lengths that occur (the chance
that all B are at most so long). No shuffle is drawn, so nothing is estimated and 25 million sequences cost
what 52,002 do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padless.packer.plan import length_counts
from padless.runtime.reader import Array

Floats = NDArray[np.float64]
Cost = Callable[[Floats], Floats]
"""What a sequence of so many tokens costs: [kinds] -> [kinds]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """How many sequences have each length; lengths ascending, in tokens, none of them 0."""

    values: Array
    """[kinds] int64."""
    counts: Array
    """[kinds] int64."""

    @classmethod
    def of(cls, lengths: Array) -> Lengths:
        """From a length for each sequence, [N]; zeros are left out."""
        values, counts = length_counts(lengths)
        kept = values > 0
        return cls(values=values[kept], counts=counts[kept])

    @classmethod
    def together(cls, parts: list[Lengths]) -> Lengths:
        """The counts of all parts added up."""
        nothing = np.zeros(0, np.int64)
        values = np.concatenate([nothing, *(part.values for part in parts)])
        counts = np.concatenate([nothing, *(part.counts for part in parts)])
        unique, place = np.unique(values, return_inverse=True)
        summed = np.zeros(len(unique), np.int64)
        np.add.at(summed, place, counts)
        return cls(values=unique, counts=summed)

    def __len__(self) -> int:
        """Number of sequences."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int((self.values * self.counts).sum())

    @property
    def longest(self) -> int:
        return int(self.values[-1]) if len(self.values) else 0

    def total(self, cost: Cost) -> float:
        """The cost of all sequences, each by itself."""
        return float((cost(self.values.astype(np.float64)) * self.counts).sum())

    def quantile(self, share: float) -> int:
        """The length that at least `share` of the sequences do not exceed; 0 where there are none."""
        if not len(self.values):
            return 0
        rank = max(1, int(np.ceil(share * len(self) - 1e-9)))
        return int(self.values[np.searchsorted(np.cumsum(self.counts), rank)])

    def padded(self, batch_size: int, cost: Cost | None = None) -> float:
        """The mean cost of an epoch in random batches padded to their longest, over all orders.

        Without `cost` in tokens. The last batch holds what is left.
        """
        batches, left = divmod(len(self), batch_size)
        found = 0.0
        if batches:
            found += batches * batch_size * self._longest_of(batch_size, cost)
        if left:
            found += left * self._longest_of(left, cost)
        return found

    def _longest_of(self, drawn: int, cost: Cost | None) -> float:
        """The mean cost of the longest of `drawn` sequences, drawn without one taken twice."""
        values = self.values.astype(np.float64)
        costs = values if cost is None else cost(values)
        among = np.cumsum(self.counts).astype(np.float64)  # [kinds] sequences that are at most so long
        all_of_them = among[-1]
        chance = np.ones(len(values))  # that all of them are
        for taken in range(drawn):
            chance *= np.maximum(among - taken, 0) / (all_of_them - taken)
        return float((costs * np.diff(chance, prepend=0.0)).sum())

    def padding(self, batch_size: int) -> float:
        """The share of padding in those batches: 0.5 where half of the tokens are none."""
        return max(0.0, 1 - self.tokens / self.padded(batch_size)) if len(self.values) else 0.0

    def grouped_padding(self, batch_size: int) -> float:
        """The share of padding where sequences are sorted by length before they are cut into batches."""
        if not len(self.values):
            return 0.0
        ends = np.cumsum(self.counts)
        begins = ends - self.counts
        full = ends // batch_size - begins // batch_size  # batches whose last place has this length
        padded = int((full * self.values).sum()) * batch_size + len(self) % batch_size * self.longest
        return 1 - self.tokens / padded


def padding_share(lengths: Array, batch_size: int) -> float:
    """Padding as a share of all tokens when neighbours are batched: [3, 1, 2], 2 -> 2 / 8."""
    if not len(lengths):
        return 0.0
    starts = np.arange(0, len(lengths), batch_size)
    sizes = np.diff(np.append(starts, len(lengths)))
    padded = int((np.maximum.reduceat(lengths, starts).astype(np.int64) * sizes).sum())
    return 1.0 - int(lengths.sum(dtype=np.int64)) / padded
