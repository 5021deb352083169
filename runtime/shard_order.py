"""Shuffling that stays near: shards in random order, packs among those of a few shards at a time.

    shards   a b c d e f       in windows of 2:  d a | f b | c e
    packs                      those of d and a mixed, then those of f and b, ...

Packs in an order over the whole data would ask for all shards at once; these come one window after the
other, so that what lies far away is read once, ahead of its use. The price is that packs of one shard
stay within one window of each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from padless.runtime.order import Numbers

WINDOW_SHARDS = 4


@dataclass(frozen=True, kw_only=True)
class ShardShuffle:
    """The order of packs for a seed; `shard_packs` are the packs in each shard."""

    shard_packs: tuple[int, ...]
    seed: int

    def packs(self, places: Numbers, epoch: int) -> Numbers:
        """The packs at some places of an epoch's order, [n] int64 each."""
        from padless.runtime.order import shuffled

        shards, ends = self._shards(epoch)
        firsts = np.cumsum((0, *self.shard_packs))
        starts = ends - np.array(self.shard_packs)[shards]
        windows = np.searchsorted(ends[WINDOW_SHARDS - 1 :: WINDOW_SHARDS], places, side="right")
        found = np.empty(len(places), dtype=np.int64)
        for window in np.unique(windows).tolist():
            first = window * WINDOW_SHARDS
            begin = starts[first]
            size = int(ends[min(first + WINDOW_SHARDS, len(shards)) - 1] - begin)
            here = windows == window
            mixed = begin + shuffled(places[here] - begin, size, self.seed + 1 + window, epoch)
            which = np.searchsorted(ends, mixed, side="right")
            found[here] = firsts[shards[which]] + mixed - starts[which]
        return found

    def needed(self, place: int, epoch: int) -> list[int]:
        """The shards of the window that holds a place, and of the next one, in their order."""
        shards, ends = self._shards(epoch)
        window = int(np.searchsorted(ends, place, side="right")) // WINDOW_SHARDS
        some: list[int] = shards[window * WINDOW_SHARDS : (window + 2) * WINDOW_SHARDS].tolist()
        return some

    def _shards(self, epoch: int) -> tuple[Numbers, Numbers]:
        return _shards_in_order(self.shard_packs, self.seed, epoch)


@lru_cache(maxsize=4)
def _shards_in_order(packs: Sequence[int], seed: int, epoch: int) -> tuple[Numbers, Numbers]:
    """The shards as an epoch has them, and how many packs there are up to the end of each."""
    from padless.runtime.order import shuffled

    shards = shuffled(np.arange(len(packs)), len(packs), seed, epoch)
    return shards, np.cumsum(np.array(packs, dtype=np.int64)[shards])
