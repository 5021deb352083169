"""How much of each source is packed: shares by weight, a target size, caps, and repeats up to a limit.

A mix is drawn over whole records once their tokens are counted, so a share in tokens is exact to one record
a source. Which records are drawn follows from the seed and their numbers alone: not from chunks, workers or
the other sources. Records that are not drawn stay in the sequence table, dropped as `not-drawn`; the price is
that they are tokenized all the same, which is what makes their tokens known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.config import PackConfig
from padless.packer.errors import InputError
from padless.packer.plan import drawn_order
from padless.packer.sources import SourceFile


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What was asked for; a source is one argument, with all its files."""

    names: tuple[str, ...]
    weights: tuple[Fraction, ...] | None
    """Of each source; None: as much as each has."""
    max_records: tuple[int | None, ...]
    max_tokens: tuple[int | None, ...]
    by: str
    """What weights and target count: records, tokens or trained (tokens)."""
    target: int | None
    max_repeats: int
    seed: int

    @classmethod
    def of(cls, config: PackConfig) -> Mix | None:
        """The mix of a build; None where every record is packed once."""
        if not (config.weights or config.max_records or config.max_tokens or config.mix_target):
            return None
        names = tuple(str(source) for source in config.sources)
        weights = None
        if config.weights:
            # As it is written: 0.7 is seven tenths.
            weights = tuple(Fraction(repr(config.weights.get(name, 1))) for name in names)
        return cls(
            names=names,
            weights=weights,
            max_records=tuple(config.max_records.get(name) for name in names),
            max_tokens=tuple(config.max_tokens.get(name) for name in names),
            by=config.mix_by,
            target=config.mix_target,
            max_repeats=config.max_repeats,
            seed=config.seed,
        )

    def recorded(self) -> dict[str, Any]:
        """For the manifest, by source: names as they were typed may be paths of this machine."""
        return {
            "by": self.by,
            "weights": None if self.weights is None else [float(weight) for weight in self.weights],
            "max_records": [*self.max_records],
            "max_tokens": [*self.max_tokens],
            "target": self.target,
            "max_repeats": self.max_repeats,
        }


def arguments_of(files: Sequence[SourceFile]) -> NDArray[np.int32]:
    """[files]: the argument that names each."""
    return np.array([file.argument for file in files], dtype=np.int32)


def draw(
    mix: Mix, source: NDArray[np.int32], tokens: NDArray[np.int64], trained: NDArray[np.int64]
) -> NDArray[np.int32]:
    """[records]: how often each is packed; 0: not drawn.

    All [records]: the argument that each came from, its tokens (0: it was dropped, and is drawn by nobody),
    and the trained ones among them. Each source is shuffled by the seed, cut to its caps, and passed as often
    as its share holds it; the rest of the share takes the first records of one more pass, at most what fits.

    Raises InputError for a source with nothing to draw from, and where the shares need more repeats than are
    allowed.
    """
    times = np.zeros(len(tokens), dtype=np.int32)
    shuffled: list[NDArray[np.int64]] = []
    units: list[NDArray[np.int64]] = []
    for number in range(len(mix.names)):
        mine = np.flatnonzero((source == number) & (tokens > 0))
        # A seed of its own, so that sources of one size do not give the same places.
        mine = mine[drawn_order(len(mine), mix.seed * 2**16 + number + 1)]
        mine = mine[: mix.max_records[number]]
        if (most := mix.max_tokens[number]) is not None:
            mine = mine[: _fitting(tokens[mine], most)]
        shuffled.append(mine)
        units.append({"records": np.ones_like(mine), "tokens": tokens[mine]}.get(mix.by, trained[mine]))
    shares = _shares(mix, [int(amounts.sum()) for amounts in units])
    for mine, amounts, share in zip(shuffled, units, shares, strict=True):
        if not share:
            continue
        passes, rest = divmod(share, int(amounts.sum()))
        times[mine] = passes
        if rest:  # none: nor for records of no trained token, which would fit
            times[mine[: _fitting(amounts, rest)]] += 1
    return times


def _fitting(amounts: NDArray[np.int64], most: int) -> int:
    """How many of the first amounts sum to at most `most`."""
    return int(np.searchsorted(np.cumsum(amounts), most, side="right"))


def _shares(mix: Mix, has: list[int]) -> list[int]:
    """What each source gives, of what it has; both in the mix's unit."""
    if mix.weights is None and mix.target is None:
        return has
    weights = mix.weights or tuple(Fraction(amount) for amount in has)
    what = {"records": "records", "tokens": "tokens"}.get(mix.by, "trained tokens")
    for name, weight, amount in zip(mix.names, weights, has, strict=True):
        if weight and not amount:
            raise InputError(
                f"{name} has weight {float(weight):g} and no {what} to draw from; leave it out, or give it "
                "weight 0"
            )
    whole = sum(weights)
    if not whole:
        raise InputError(f"there are no {what} to draw from, so --mix-target cannot be reached")
    if mix.target is None:
        scale = min(a * mix.max_repeats / w for w, a in zip(weights, has, strict=True) if w)
        return [int(weight * scale) for weight in weights]
    exact = [mix.target * weight / whole for weight in weights]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda n: (shares[n] - exact[n], n))
    for number in by_rest[: mix.target - sum(shares)]:
        shares[number] += 1
    for name, share, amount in zip(mix.names, shares, has, strict=True):
        if share > amount * mix.max_repeats:
            needed = -(-share // amount)
            raise InputError(
                f"--mix-target {mix.target:,} takes {share:,} {what} of {name}, which has {amount:,}: "
                f"{share / amount:.3g} times, of at most {mix.max_repeats}; allow it with --max-repeats "
                f"{needed}, or lower the target or its weight"
            )
    return shares
