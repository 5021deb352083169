"""The tokens of packed folders as a source of sequences, where they lie.

A sequence is an element of one binary array over everything that is mapped: the shards of all folders,
and a file of our own for what is made anew (joined, cut, or stored otherwise). Elements are addresses, so
nothing is copied before the shard that it goes to is written; the price is an array that spans gaps
between mappings, which no element ever reaches into. Each column at token level has such an array, and a
sequence is the same element of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.gather import BatchGather
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.reader import PackedReader

if TYPE_CHECKING:
    import pyarrow as pa

WEIGHT = "loss_weight"


class Segment(NamedTuple):
    """Sequences that lie one after the other in memory that is mapped."""

    columns: Mapping[str, NDArray[Any]]
    """Those at token level, [tokens] or [tokens, K] each: input_ids, labels unless left out, and more."""
    lengths: NDArray[np.int32]
    numbers: NDArray[np.int64]
    """[sequences]: which sequence each is; -1: none that is asked for."""


@dataclass(frozen=True)
class Elements:
    """Segments as binary arrays, one for each column, whose elements have the same numbers."""

    arrays: Mapping[str, pa.Array]
    elements: NDArray[np.int32]
    """[sequences]: the element that holds each."""
    segments: list[Segment]
    """Keeps the memory mapped."""

    @classmethod
    def lay(cls, segments: list[Segment], sequences: int) -> Elements:
        """Lay elements over the segments; `sequences`: how many numbers there are."""
        segments = sorted(segments, key=lambda segment: _address(segment.columns["input_ids"]))
        elements = np.full(sequences, -1, dtype=np.int32)
        element = 0
        for segment in segments:
            numbers = segment.numbers
            places = np.arange(element, element + len(numbers), dtype=np.int32)
            if int(numbers.min(initial=0)) < 0:
                asked = numbers >= 0
                numbers, places = numbers[asked], places[asked]
            elements[numbers] = places
            element += len(segment.lengths) + 1  # and what lies between this segment and the next
        arrays = {
            name: _binary([(segment.columns[name], segment.lengths) for segment in segments])
            for name in (segments[0].columns if segments else ())
        }
        return cls(arrays, elements, segments)

    def fragments(
        self, elements: NDArray[np.int32], starts: NDArray[Any], lengths: NDArray[np.int32]
    ) -> Elements:
        """Parts of these elements from token `starts` on, [fragments] each."""
        import pyarrow as pa

        arrays: dict[str, pa.Array] = {}
        found = elements
        for name, array in self.arrays.items():
            size = self._token(name).nbytes
            _, offsets, data = array.buffers()
            begins = np.frombuffer(offsets, dtype=np.int64)[elements]
            begins = begins + size * starts.astype(np.int64)
            edges = np.union1d(begins, begins + size * lengths.astype(np.int64))
            found = np.searchsorted(edges, begins).astype(np.int32)
            buffers = [None, pa.py_buffer(edges), data]
            arrays[name] = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
        return replace(self, arrays=arrays, elements=found)

    def take(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        """A column of sequences, of at least one, one after the other: [tokens] or [tokens, K]."""
        import pyarrow as pa

        elements = self.elements.take(sequences)  # half the time of an index
        indexes = pa.Array.from_buffers(pa.int32(), len(elements), [None, pa.py_buffer(elements)])
        token = self._token(name)
        _, ends, taken = self.arrays[name].take(indexes).buffers()
        size = int(np.frombuffer(ends, dtype=np.int64)[len(elements)])  # the buffer may be longer
        found: NDArray[Any] = np.frombuffer(taken, dtype=token.dtype, count=size // token.dtype.itemsize)
        return found.reshape(-1, *token.shape)

    def _token(self, name: str) -> NDArray[Any]:
        """What a column has for a token, for its type and shape."""
        column = self.segments[0].columns[name]
        return np.empty(column.shape[1:], column.dtype)


@dataclass(frozen=True)
class FolderGather:
    """The sequences of a split for the writer of shards."""

    elements: Elements
    lengths: NDArray[np.int32]
    ids: NDArray[Any] | None
    targets: NDArray[np.int32]
    extras: Mapping[str, NDArray[Any]]
    """Sequence-level columns, [sequences] each."""
    cut: bool = False
    """Fragments, of which all but the first token is trained, whatever the folder says."""

    def of_batch(self, first: int, sequences: NDArray[Any]) -> BatchGather:
        return self

    def tokens(self, sequences: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        targets: NDArray[np.int64] = self.targets.take(sequences).astype(np.int64)
        return self.elements.take("input_ids", sequences), targets

    def labels(self, sequences: NDArray[Any]) -> NDArray[np.int32]:
        if not self.cut and "labels" in self.elements.arrays:
            return self.elements.take("labels", sequences)
        found = self.elements.take("input_ids", sequences).astype(np.int32)
        found[self._starts(sequences)] = IGNORE_INDEX
        return found

    @property
    def is_weighted(self) -> bool:
        return WEIGHT in self.elements.arrays

    def extra(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        if name in self.extras:
            column: NDArray[Any] = self.extras[name][sequences]
            return column
        found = self.elements.take(name, sequences)
        if self.cut and name == WEIGHT:
            found = found.copy()
            found[self._starts(sequences)] = 0
        return found

    def _starts(self, sequences: NDArray[Any]) -> NDArray[np.int64]:
        lengths = self.lengths[sequences]
        starts: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64) - lengths
        return starts


def renumbered(segments: Iterable[Segment], numbers: NDArray[np.int64]) -> list[Segment]:
    """The segments with `numbers[n]` in place of each number n; -1 stays."""
    return [s._replace(numbers=np.where(s.numbers < 0, -1, numbers[s.numbers])) for s in segments]


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _binary(parts: list[tuple[NDArray[Any], NDArray[np.int32]]]) -> pa.Array:
    """Arrays in ascending memory as one binary array: their elements, and one for each gap between."""
    import pyarrow as pa

    base = _address(parts[0][0])
    # In place: with its parts beside it, it would be the most memory that a repack takes.
    offsets = np.empty(sum(len(lengths) + 1 for _, lengths in parts), dtype=np.int64)
    filled = 0
    for values, lengths in parts:
        ends = offsets[filled : filled + len(lengths) + 1]
        ends[0] = 0
        np.cumsum(lengths, out=ends[1:])
        ends *= values[:0].itemsize * int(np.prod(values.shape[1:]))
        ends += _address(values) - base
        filled += len(ends)
    data = pa.foreign_buffer(base, int(offsets[-1]), base=[values for values, _ in parts])
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data])


def stored_segments(reader: PackedReader, names: Iterable[str]) -> Iterator[Segment]:
    """A folder's record batches as they are mapped, the lines of its table for numbers.

    Their tokens are for others to check.
    """
    for batch in reader.batches(checked=False):
        columns = {name: batch.flat(name) for name in names}
        yield Segment(columns, batch.flat("seq_lengths"), batch.flat("sequence_ids"))


def full_segments(reader: PackedReader, names: Iterable[str], id_type: np.dtype[Any]) -> Iterator[Segment]:
    """The same in memory of their own: of batches that are compressed, or lack columns that are asked for."""
    for batch in reader.batches():
        columns: dict[str, NDArray[Any]] = {}
        for name in names:
            if name == "input_ids":
                columns[name] = batch.flat(name).astype(id_type)
            elif name == "labels":
                columns[name] = batch.flat_labels()
            elif name == WEIGHT and name not in batch.values:  # what a build says of records without
                columns[name] = (batch.flat_labels() != IGNORE_INDEX).astype(np.float32)
            else:
                columns[name] = batch.flat(name)
        yield Segment(columns, batch.flat("seq_lengths"), batch.flat("sequence_ids"))
