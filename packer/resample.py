"""What a sample says of all that it stands for, and how sure that is: weights, and resampling (bootstrap).

A sample that was drawn in blocks is resampled in blocks, since the records of one may be alike; otherwise
records are. One unit fewer is drawn than there are, which makes the spread right for few of them (Rao and Wu
1988). The tail suffers: what hangs on the longest records, as padding of large batches does, is covered
somewhat less often than the 95 % that the error is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padless.packer.sample import Sample
from padless.runtime.reader import Array

RESAMPLES, RESAMPLES_OF_PLANS = 24, 12
_STUDENT = {24: 2.07, 12: 2.2}
"""Half of a 95 % interval in standard deviations that were estimated from so many values."""
_LEAST = 10_000
"""Sequences that stand for sources of unlike weights, at least."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A source's sample as it was tokenized."""

    sample: Sample
    lengths: Array
    """[sequences] in the order of the records."""
    targets: Array
    """[sequences] trained tokens of each."""
    unit: Array
    """[sequences] what is resampled together: 0, 1, ... of `units`."""
    units: int
    dropped: int

    @property
    def weight(self) -> float:
        """How many records of the source each stands for."""
        return self.sample.records / max(1, len(self.sample.rows))

    def again(self, generator: np.random.Generator) -> tuple[Array, Array, float]:
        """Lengths, targets and weight in a sample that might as well have been drawn."""
        if self.sample.how == "all":
            return self.lengths, self.targets, self.weight
        drawn = max(1, self.units - 1)
        times = np.bincount(generator.integers(self.units, size=drawn), minlength=self.units)[self.unit]
        return (
            np.repeat(self.lengths, times),
            np.repeat(self.targets, times),
            self.weight * self.units / drawn,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Population:
    """Sequences of all sources, each source with the share that it has."""

    lengths: Array
    """[N]; each stands for `tokens` / their sum."""
    tokens: float
    """In all sources."""
    trained: float

    @classmethod
    def of(cls, parts: Sequence[tuple[Array, Array, float]], generator: np.random.Generator) -> Population:
        weights = [weight for *_, weight in parts]
        lengths = np.concatenate([lengths for lengths, *_ in parts])
        if max(weights) > min(weights) and len(lengths):
            # As many from each as it has, evenly over its sorted lengths: one number less of chance.
            each = np.repeat(weights, [len(part[0]) for part in parts])
            order = np.argsort(lengths, kind="stable")
            places = np.cumsum(each[order])
            count = max(_LEAST, len(lengths))
            at = np.searchsorted(places, (np.arange(count) + 0.5) / count * places[-1])
            lengths = generator.permutation(lengths[order][at])
        return cls(
            lengths=lengths,
            tokens=float(sum(weight * lengths.sum() for lengths, _, weight in parts)),
            trained=float(sum(weight * targets.sum() for _, targets, weight in parts)),
        )


def error_of(values: list[float]) -> float:
    """Half of a 95 % interval around values that are normally distributed."""
    if not values:
        return 0.0
    error = _STUDENT[len(values)] * float(np.std(values, ddof=1))
    return error if error > 1e-9 * max(1.0, abs(values[0])) else 0.0  # what rounding leaves is none
