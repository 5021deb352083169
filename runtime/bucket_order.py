"""Steps over packs of several lengths: every step has packs of one length, as many as make its tokens.

    tokens a batch 8, one rank      packs of 2: 0 1 2 3 4 5 6 7 | of 8: 8 9
    steps                           1 7 0 4, 9, 3 6 2 5, 8

Each length is an order of its own, and which comes next is drawn in proportion to the steps that are left of
each, so that lengths are mixed evenly to the end. What is drawn hangs on the seed, the epoch and the packs
that went by alone, so a position is that of each length and nothing else. The price is a remainder for each
length, not one for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from padless.runtime.order import Numbers, Position, StepOrder, Window, mixed


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketWindow:
    """One step, and how far each length has gone with it."""

    epoch: int
    packs: Numbers
    """The step's packs, numbered over all lengths."""
    step: int
    """Packs that make a whole step of this length."""
    reached: tuple[Position | tuple[Window, int], ...]
    """Of each length its position, or a window and how much of it is taken."""

    def after(self, packs: int) -> Position:
        """The position after the step, whose number of packs this is."""
        assert packs == len(self.packs)
        return Position(
            epoch=self.epoch,
            buckets=tuple(one if isinstance(one, Position) else one[0].after(one[1]) for one in self.reached),
        )


@dataclass(frozen=True, kw_only=True)
class BucketOrder:
    """The steps of every epoch, with the same interface as StepOrder."""

    orders: tuple[StepOrder, ...]
    """Of each length, its packs numbered from 0."""
    seed: int
    pads: bool
    """Whether a length's last step may be smaller; otherwise what does not fill one is left out."""
    near: None = None

    @property
    def num_packs(self) -> int:
        return sum(order.num_packs for order in self.orders)

    def begin(self, epoch: int) -> Position:
        """Before the first step of an epoch."""
        return Position(epoch=epoch, buckets=(Position(epoch=epoch),) * len(self.orders))

    def windows(self, position: Position) -> Iterator[BucketWindow]:
        """The steps from a position to the epoch's end, one a window."""
        epoch = position.epoch
        buckets = position.buckets or self.begin(epoch).buckets
        reached: list[Position | tuple[Window, int]] = [*buckets]
        coming = [_ends(order, bucket) for order, bucket in zip(self.orders, buckets, strict=True)]
        left = [
            order.num_steps(bucket, self.pads) for order, bucket in zip(self.orders, buckets, strict=True)
        ]
        firsts = np.cumsum([0, *(order.num_packs for order in self.orders)]).tolist()
        gone = self.num_packs - self.remaining(position)
        while total := sum(left):
            draw = mixed(self.seed, epoch, gone) % total
            which = 0
            while draw >= left[which]:
                draw -= left[which]
                which += 1
            window, start, end = next(coming[which])
            reached[which] = window, end
            left[which] -= 1
            gone += end - start
            packs = window.packs[start:end] + firsts[which]
            step = self.orders[which].group
            yield BucketWindow(epoch=epoch, packs=packs, step=step, reached=tuple(reached))

    def whole_steps(self, position: Position) -> Iterator[Numbers]:
        """The steps from a position to the epoch's end that are not smaller than the others."""
        return (w.packs for w in self.windows(position) if len(w.packs) == w.step)

    def remaining(self, position: Position) -> int:
        """Packs from a position to the end of its epoch."""
        buckets = position.buckets or self.begin(position.epoch).buckets
        return sum(order.remaining(bucket) for order, bucket in zip(self.orders, buckets, strict=True))

    def num_steps(self, position: Position, pads: bool) -> int:
        """Steps from a position to the end of its epoch; `pads` as it is here."""
        buckets = position.buckets or self.begin(position.epoch).buckets
        pairs = zip(self.orders, buckets, strict=True)
        return sum(order.num_steps(bucket, pads) for order, bucket in pairs)


def _ends(order: StepOrder, position: Position) -> Iterator[tuple[Window, int, int]]:
    """Each step as a window and where the step begins and ends in it."""
    for window in order.windows(position):
        for start in range(0, len(window.packs), order.group):
            yield window, start, min(start + order.group, len(window.packs))
