"""Packs on their way out: flat arrays of one record batch, and what other conventions make of them.

Everything is done on the flat arrays of whole batches. Labels are unshifted here, with -100 at every
sequence start; so shifting them left by one over the whole batch masks the last token of each sequence,
and no target of one sequence is ever asked of another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.runtime.format import IGNORE_INDEX
from padless.runtime.reader import PackBatch, PackedReader

Array = NDArray[Any]
PLANNED_TOKENS = 2**20
"""Tokens of packs that a plan gathers, before they go on as one batch."""
FILLED_TOKENS = 2**21
"""Tokens of packs that are filled up together, the filling with them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Some packs: T tokens, N sequences, P packs."""

    input_ids: Array
    """[T] as stored."""
    labels: Array
    """[T] int32, unshifted."""
    seq_lengths: Array
    """[N] int64."""
    sequence_ids: Array
    """[N] int64: each one's line in the sequence table."""
    sequences: Array
    """[P] int64: how many sequences each pack has."""
    extras: dict[str, Array]
    """Further columns, flat."""
    levels: dict[str, str]
    """token, sequence or pack, for each of them."""

    @cached_property
    def ends(self) -> Array:
        """[N + 1] int64: where sequences begin, and the last one ends."""
        return offsets_of(self.seq_lengths)

    @cached_property
    def pack_ends(self) -> Array:
        """[P + 1] int64: where packs begin, and the last one ends, in tokens."""
        ends: Array = self.ends[offsets_of(self.sequences)]
        return ends

    @cached_property
    def positions(self) -> Array:
        """[T] int32: each token's place in its sequence."""
        places = np.arange(len(self.input_ids), dtype=np.int32)
        places -= np.repeat(self.ends[:-1].astype(np.int32), self.seq_lengths)
        return places

    @cached_property
    def next_labels(self) -> Array:
        """[T] int32: the label of the token after each one; -100 at the end of every sequence."""
        shifted = np.empty_like(self.labels)
        shifted[:-1] = self.labels[1:]
        shifted[-1:] = IGNORE_INDEX
        return shifted

    @cached_property
    def segments(self) -> Array:
        """[T] int32: the number of each token's sequence in its pack, from 1."""
        numbers = np.arange(1, len(self.seq_lengths) + 1) - np.repeat(
            offsets_of(self.sequences)[:-1], self.sequences
        )
        return np.repeat(numbers.astype(np.int32), self.seq_lengths)

    def padded(self, values: Array, width: int, fill: int) -> Array:
        """[T] values as [P, width]: packs from the left, then `fill`."""
        out = np.full((len(self.sequences), width), fill, dtype=values.dtype)
        inside = np.arange(width) < np.diff(self.pack_ends)[:, None]
        out[inside] = values
        return out


def offsets_of(lengths: Array) -> Array:
    """[n] lengths -> [n + 1] int64: where each begins, and the last one ends."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def rows_of(reader: PackedReader, *, flat: bool = False, width: int | None = None) -> Iterator[Rows]:
    """The reader's packs in their order, by its plan where it has one, a record batch at a time.

    `flat`: no more at a time than a core's own cache holds. Tokens that are only looked at and written come
    from memory once then, not once for each look. `width`: no more packs than fill FILLED_TOKENS when each is
    filled up to it; a batch of short packs may be a hundred times as large then.
    """
    most = sys.maxsize if width is None else max(1, FILLED_TOKENS // width)
    if reader.plan is None:
        blocks = reader.blocks() if flat else _pieces(reader, most)
        for batch, rows in blocks:
            yield _from_batch(batch, rows)
        return
    waiting: list[Any] = []
    tokens = 0
    for pack in reader:
        waiting.append(pack)
        tokens += pack.num_tokens
        if tokens >= PLANNED_TOKENS or len(waiting) == most:
            yield _from_packs(waiting)
            waiting, tokens = [], 0
    if waiting:
        yield _from_packs(waiting)


def _pieces(reader: PackedReader, most: int) -> Iterator[tuple[PackBatch, slice]]:
    """The record batches, and which of their packs: so many at a time."""
    for batch in reader.batches():
        for start in range(0, batch.num_packs, most):
            yield batch, slice(start, start + most)


def _from_batch(batch: PackBatch, rows: slice) -> Rows:
    return Rows(
        input_ids=batch.flat("input_ids", rows),
        labels=batch.flat_labels(rows),
        seq_lengths=batch.flat("seq_lengths", rows).astype(np.int64),
        sequence_ids=batch.flat("sequence_ids", rows),
        sequences=batch.lengths("seq_lengths", rows),
        extras={name: batch.flat(name, rows) for name in batch.extra_levels},
        levels=batch.extra_levels,
    )


def _from_packs(packs: list[Any]) -> Rows:
    levels = dict(packs[0].extra_levels)
    return Rows(
        input_ids=np.concatenate([pack.input_ids for pack in packs]),
        labels=np.concatenate([pack.labels for pack in packs]),
        seq_lengths=np.concatenate([pack.seq_lengths for pack in packs]).astype(np.int64),
        sequence_ids=np.concatenate([pack.sequence_ids for pack in packs]),
        sequences=np.array([len(pack.seq_lengths) for pack in packs], dtype=np.int64),
        extras={
            name: np.array([pack.extras[name] for pack in packs])
            if level == "pack"
            else np.concatenate([pack.extras[name] for pack in packs])
            for name, level in levels.items()
        },
        levels=levels,
    )
