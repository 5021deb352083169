"""Which packs form which step: a permutation by (seed, epoch), cut into steps, resumable anywhere.

    order of epoch 0   5 2 7 0 | 3 6 1 4          windows of 4
    steps of 2         5 2, 7 0, 3 6, 1 4         as they come
    balanced           2 5, 0 7, ...              like cost beside like cost, inside a window

Everything here is the same on every rank, and a position in it is a few numbers: how far the order
was taken, and which packs of the current window are left. The permutation is computed where it is
asked (a keyed bijection of the numbers), so that a start in the middle of 10 million packs costs no
more than one at the beginning; a sorted list of random keys would cost a second and 80 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from padless.runtime.shard_order import ShardShuffle

Numbers = npt.NDArray[np.int64]
WINDOW = 256
"""Packs that are balanced among themselves: wide enough for like costs, narrow enough to stay shuffled."""
LAST_EPOCH = 2**62
"""No epoch is as high: they are mixed in 64 bits."""
_NONE: Numbers = np.empty(0, dtype=np.int64)
_ROUNDS = 4
_LINEAR_COST = 24_576
_PACKS_FOR_IDLE = 2**15


@dataclass(frozen=True, kw_only=True, eq=False)
class Position:
    """How far an epoch has gone: everything before `taken` in its order but `left` was yielded.

    Where steps follow the order itself, `left` is empty and `taken` says all.
    """

    epoch: int
    taken: int = 0
    left: Numbers = field(default_factory=lambda: _NONE)
    """Packs of the current window that are still to come, in the order in which they will."""
    group: int = 0
    """Packs a step for which `left` was put in order; with another number it is ordered anew."""
    buckets: tuple[Position, ...] = ()
    """Where steps are of one length each: how far each length has gone, which then says all."""


def shuffled(places: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """The packs at some places of the epoch's order of `size` packs, without making the order.

    Halves of the number's bits are mixed into one another, which can always be undone; what falls
    beyond the size goes through once more until it falls inside.
    """
    bits = max(size - 1, 1).bit_length()
    low = bits // 2
    low_mask = (1 << low) - 1
    rounds = _rounds(bits, seed, epoch)
    numbers = places.astype(np.int64)
    outside = np.arange(len(numbers))
    while len(outside):
        some = numbers[outside]
        left, right = some >> low, some & low_mask
        for of_right, of_left in rounds:
            left ^= of_right[right]
            right ^= of_left[left]
        numbers[outside] = some = (left << low) | right
        outside = outside[some >= size]
    return numbers


@lru_cache(maxsize=8)
def _rounds(bits: int, seed: int, epoch: int) -> list[tuple[Numbers, Numbers]]:
    """For each round what is mixed into the left half for each right one, and into the right for each left.

    Half the bits have few values, so each is mixed once and looked up from then on.
    """
    low = bits // 2
    base = _mix(np.array([seed], dtype=np.uint64))
    base = _mix(np.add(base, epoch, dtype=np.uint64))
    keys = _mix(np.add(base, np.arange(2 * _ROUNDS), dtype=np.uint64, casting="unsafe"))
    mixed = _mix(np.arange(1 << (bits - low), dtype=np.uint64) ^ keys[:, None])
    high_mask, low_mask = np.uint64((1 << (bits - low)) - 1), np.uint64((1 << low) - 1)
    of_right = (mixed[::2, : 1 << low] & high_mask).astype(np.int64)
    of_left = (mixed[1::2] & low_mask).astype(np.int64)
    return list(zip(of_right, of_left, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Packs whose order is computed at once, the window ending at `taken` in the epoch's order."""

    epoch: int
    taken: int
    packs: Numbers
    group: int
    """Packs a step for which they were arranged; 0 where they stand as in the epoch's order."""
    step: int
    """Packs that make a whole step."""

    def after(self, packs: int) -> Position:
        """The position after the first so many packs of the window."""
        left = self.packs[packs:]
        if self.group:
            return Position(epoch=self.epoch, taken=self.taken, left=left, group=self.group)
        return Position(epoch=self.epoch, taken=self.taken - len(left))


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """The steps of every epoch over `num_packs` packs, `group` packs a step over all ranks."""

    num_packs: int
    group: int
    seed: int
    shuffle: bool
    costs: Numbers | None = None
    """Cost of each pack; steps are made of packs of like cost where given."""
    near: ShardShuffle | None = None
    """Shuffles shard by shard, instead of over all packs, where given."""

    def windows(self, position: Position) -> Iterator[Window]:
        """The windows from a position to the epoch's end; steps are cut from each, `group` packs a step.

        Only an epoch's last step may be smaller, where `group` packs are not left.
        """
        epoch, taken, left = position.epoch, position.taken, position.left
        if len(left):
            if position.group != self.group:
                taken, left = self._regroup(epoch, taken, left)
            yield Window(epoch=epoch, taken=taken, packs=left, group=self.group, step=self.group)
        size = max(1, self._window // self.group) * self.group
        while taken < self.num_packs:
            start, taken = taken, min(taken + size, self.num_packs)
            packs = self._arrange(self._packs(epoch, start, taken), epoch, start)
            group = self.group if self._arranges else 0
            yield Window(epoch=epoch, taken=taken, packs=packs, group=group, step=self.group)

    def whole_steps(self, position: Position) -> Iterator[Numbers]:
        """The steps from a position to the epoch's end but one that is smaller than `group`."""
        for window in self.windows(position):
            for start in range(0, len(window.packs) - self.group + 1, self.group):
                yield window.packs[start : start + self.group]

    def num_steps(self, position: Position, pads: bool) -> int:
        """Steps from a position to the end of its epoch; with `pads` a smaller one counts."""
        left = self.remaining(position)
        return -(-left // self.group) if pads else left // self.group

    def remaining(self, position: Position) -> int:
        """Packs from a position to the end of its epoch."""
        return len(position.left) + self.num_packs - position.taken

    @property
    def _window(self) -> int:
        """Packs that are put in order together; without costs only to compute many at once."""
        return WINDOW if self._arranges else 4 * WINDOW

    @property
    def _arranges(self) -> bool:
        return self.costs is not None

    def _packs(self, epoch: int, start: int, end: int) -> Numbers:
        places = np.arange(start, end, dtype=np.int64)
        if self.near is not None:
            return self.near.packs(places, epoch)
        return shuffled(places, self.num_packs, self.seed, epoch) if self.shuffle else places

    def _regroup(self, epoch: int, taken: int, left: Numbers) -> tuple[int, Numbers]:
        """Packs left by steps of another size, filled up to whole steps and put in order again."""
        end = min(taken + -len(left) % self.group, self.num_packs)
        return end, self._arrange(np.concatenate([left, self._packs(epoch, taken, end)]), epoch, taken)

    def _arrange(self, packs: Numbers, epoch: int, taken: int) -> Numbers:
        """A window's packs in the order of their steps."""
        if self.costs is None:
            return packs
        # The costly ones first where the window is no multiple: the odd step is then a cheap one,
        # and comes last, where it may be left out.
        ordered = packs[np.argsort(-self.costs[packs], kind="stable")]
        whole = len(ordered) // self.group
        steps = ordered[: whole * self.group].reshape(whole, self.group)
        # Costly and cheap steps in random order, or each window would be a small curriculum.
        mixed = steps[shuffled(np.arange(whole), whole, self.seed + taken, epoch)] if self.shuffle else steps
        return np.concatenate([mixed.reshape(-1), ordered[whole * self.group :]])


def attention_costs(tokens: Numbers, squares: Numbers) -> Numbers:
    """What a pack costs to train on, in tokens of width 1: 24,576 L + L^2 over its sequences.

    `tokens` [packs] and `squares` [packs], the sums of lengths and of squared lengths. The weights
    are those of a model with 7 billion parameters; like packs are alike under any others.
    """
    return _LINEAR_COST * tokens + squares


def idle_share(costs: Numbers, world_size: int, steps: Iterable[Numbers]) -> float:
    """The share of their time for which ranks wait for the slowest of their step; whole steps only."""
    busy = whole = 0
    for step in steps:
        if len(step) % world_size == 0:
            of_ranks = costs[step].reshape(-1, world_size).sum(axis=0)
            busy += int(of_ranks.sum())
            whole += world_size * int(of_ranks.max())
    return 1 - busy / whole if whole else 0.0


def predicted_idle(costs: Numbers, world_size: int, *, balanced: bool) -> float:
    """The idle share of `world_size` ranks, a pack a rank and step, in epoch 0 by seed 0.

    `costs` [packs]; `balanced` as PackedStream's balance by these very costs. Of large data the first
    32,768 packs or so are taken, which says it to a tenth of a per cent.
    """
    order = StepOrder(
        num_packs=len(costs),
        group=world_size,
        seed=0,
        shuffle=True,
        costs=costs if balanced else None,
    )
    windows: list[Numbers] = []
    for window in order.windows(Position(epoch=0)):
        windows.append(window.packs)
        if sum(map(len, windows)) >= _PACKS_FOR_IDLE:
            break
    packs = np.concatenate(windows) if windows else _NONE
    whole = packs[: len(packs) // world_size * world_size]
    steps = costs[whole].reshape(-1, world_size).astype(np.float64)
    busy, slowest = float(steps.sum()), float(steps.max(axis=1).sum())
    return max(0.0, 1 - busy / (world_size * slowest)) if slowest else 0.0


def mixed(seed: int, epoch: int, number: int) -> int:
    """64 bits that hang on all three numbers, the same on every machine."""
    found = np.zeros(1, dtype=np.uint64)
    for one in (seed, epoch, number):
        found = _mix(np.add(found, one, dtype=np.uint64))
    return int(found[0])


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number to another, every bit hanging on all (the finalizer of SplitMix64)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
