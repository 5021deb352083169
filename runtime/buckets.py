"""Packs of several lengths side by side: short sequences in short packs, long ones in long packs.

    packs      0 1 2 3 4 | 5 6 | 7        of 2,048, 8,192 and 32,768 tokens

Packs of one length, a bucket, stand together, the shortest first; a manifest or a plan says how many there
are, and nothing is told by how full a pack is. The price is an order by length for whoever reads packs
from the first to the last without shuffling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.runtime.arrays import Array


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The packs of one length."""

    max_length: int
    """Tokens that each of them may hold."""
    packs: int


def buckets_of(facts: dict[str, Any], packs: int) -> tuple[Bucket, ...]:
    """The buckets that a manifest's statistics or a plan's facts list: one where they list none.

    Raises ValueError, saying what is wrong, where they are not those of so many `packs`.
    """
    listed = facts.get("buckets")
    if listed is None:
        return (Bucket(max_length=int(facts["max_length"]), packs=packs),)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ValueError("must be a list of objects")
    for one in listed:
        numbers = [one.get(key) for key in ("max_length", "packs")]
        if not all(type(number) is int and 0 <= number <= 2**60 for number in numbers):
            raise ValueError(f"must hold whole numbers, has {str(one)[:120]}")
    found = tuple(Bucket(max_length=one["max_length"], packs=one["packs"]) for one in listed)
    lengths = [bucket.max_length for bucket in found]
    if lengths != sorted({*lengths}) or lengths[-1:] != [facts["max_length"]] or lengths[0] < 1:
        raise ValueError(f"must be of rising lengths up to max_length, are of {str(lengths)[:120]}")
    if sum(bucket.packs for bucket in found) != packs:
        raise ValueError(f"must hold the {packs} packs that there are")
    return found


def max_lengths(buckets: Sequence[Bucket]) -> Array:
    """Tokens that each pack may hold, [packs] int64."""
    import numpy as np

    lengths = np.array([bucket.max_length for bucket in buckets], dtype=np.int64)
    return np.repeat(lengths, [bucket.packs for bucket in buckets])


def length_of_pack(buckets: Sequence[Bucket], number: int) -> int:
    """Tokens that pack `number`, from 0, may hold."""
    for bucket in buckets:
        if number < bucket.packs:
            break
        number -= bucket.packs
    return bucket.max_length
