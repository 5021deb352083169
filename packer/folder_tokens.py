"""The tokens of packed folders as a source of sequences, where they lie.

A sequence is an element of one binary array over everything that is mapped: the shards of all folders,
and a file of our own for what is made anew (joined, cut, or stored otherwise). Elements are addresses, so
nothing is copied before the shard that it goes to is written; the price is an array that spans gaps
between mappings, which no element ever reaches into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.lines import DROPPED, FRAGMENT, TRUNCATED
from padless.packer.recut import Records, Recut
from padless.packer.token_store import disk_full
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.reader import PackedReader

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_TOKENS = 2**22
"""Tokens that are made anew at a time."""


class Segment(NamedTuple):
    """Sequences that lie one after the other in memory that is mapped."""

    tokens: NDArray[Any]
    labels: NDArray[np.int32] | None
    lengths: NDArray[np.int32]
    numbers: NDArray[np.int64]
    """[sequences]: which sequence each is; -1: none that is asked for."""


@dataclass(frozen=True)
class Elements:
    """Segments as two binary arrays (of tokens and of labels) whose elements have the same numbers."""

    tokens: pa.Array
    labels: pa.Array | None
    elements: NDArray[np.int32]
    """[sequences]: the element that holds each."""
    segments: list[Segment]
    """Keeps the memory mapped."""

    @classmethod
    def lay(cls, segments: list[Segment], sequences: int) -> Elements:
        """Lay elements over the segments; `sequences`: how many numbers there are."""
        segments = sorted(segments, key=lambda segment: _address(segment.tokens))
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
        labels = None
        if segments and segments[0].labels is not None:
            labels = _binary([(s.labels, s.lengths) for s in segments if s.labels is not None])
        return cls(_binary([(s.tokens, s.lengths) for s in segments]), labels, elements, segments)

    def take(self, sequences: NDArray[Any], tokens: int) -> tuple[NDArray[Any], NDArray[np.int32] | None]:
        """The tokens and labels of sequences, one after the other; `tokens` is their number."""
        import pyarrow as pa

        elements = self.elements[sequences]
        indexes = pa.Array.from_buffers(pa.int32(), len(elements), [None, pa.py_buffer(elements)])
        dtype = self.segments[0].tokens.dtype
        ids = np.frombuffer(self.tokens.take(indexes).buffers()[2], dtype=dtype, count=tokens)
        if self.labels is None:
            return ids, None
        return ids, np.frombuffer(self.labels.take(indexes).buffers()[2], dtype="<i4", count=tokens)


@dataclass(frozen=True)
class FolderGather:
    """The sequences of a split for the writer of shards."""

    elements: Elements
    lengths: NDArray[np.int32]
    ids: NDArray[Any] | None
    targets: NDArray[np.int32]

    def fill(
        self, sequences: NDArray[Any], tokens: NDArray[Any], labels: NDArray[np.int32] | None
    ) -> NDArray[np.int64]:
        found, masked = self.elements.take(sequences, len(tokens))
        tokens[:] = found
        if labels is not None:
            labels[:] = found if masked is None else masked
            if masked is None:
                lengths = self.lengths[sequences]
                labels[np.cumsum(lengths, dtype=np.int64) - lengths] = IGNORE_INDEX
        targets: NDArray[np.int64] = self.targets[sequences].astype(np.int64)
        return targets

    @property
    def is_weighted(self) -> bool:
        return False

    def extra(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        raise KeyError(name)  # folders with further columns are refused before


def renumbered(segments: Iterable[Segment], numbers: NDArray[np.int64]) -> list[Segment]:
    """The segments with `numbers[n]` in place of each number n; -1 stays."""
    return [s._replace(numbers=np.where(s.numbers < 0, -1, numbers[s.numbers])) for s in segments]


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _binary(parts: list[tuple[NDArray[Any], NDArray[np.int32]]]) -> pa.Array:
    """Arrays in ascending memory as one binary array: their elements, and one for each gap between."""
    import pyarrow as pa

    if not parts:
        return pa.Array.from_buffers(pa.large_binary(), 0, [None, pa.py_buffer(np.zeros(1, "i8")), None])
    base = _address(parts[0][0])
    pieces: list[NDArray[np.int64]] = []
    for values, lengths in parts:
        ends = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=ends[1:])
        pieces.append(_address(values) - base + ends * values.itemsize)
    offsets = np.concatenate(pieces)
    data = pa.foreign_buffer(base, int(offsets[-1]), base=[values for values, _ in parts])
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data])


def stored_segments(reader: PackedReader) -> Iterator[Segment]:
    """A folder's record batches as they are mapped, the lines of its table for numbers."""
    for batch in reader.batches():
        labels = batch.flat("labels") if "labels" in batch.values else None
        yield Segment(batch.flat("input_ids"), labels, batch.flat("seq_lengths"), batch.flat("sequence_ids"))


def copied_segments(
    reader: PackedReader, made: MadeAnew, id_type: np.dtype[Any], *, labels: bool
) -> Iterator[Segment]:
    """The same as a copy in `made`: of batches that are compressed, or have other columns than is asked."""
    for batch in reader.batches():
        masked = batch.flat_labels() if labels else None
        made.add(
            batch.flat("input_ids").astype(id_type),
            masked,
            batch.flat("seq_lengths"),
            batch.flat("sequence_ids"),
        )
    return made.segments()


class MadeAnew:
    """A file of sequences that stand in no folder as they are asked for; mapped once it is complete."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "wb+")
        self._parts: list[tuple[int, NDArray[Any], bool, NDArray[np.int32], NDArray[np.int64]]] = []
        self._size = 0

    def add(
        self,
        tokens: NDArray[Any],
        labels: NDArray[np.int32] | None,
        lengths: NDArray[np.int32],
        numbers: NDArray[np.int64],
    ) -> None:
        """Append sequences; DiskFullError where there is no room."""
        self._parts.append((self._size, tokens[:0], labels is not None, lengths, numbers))
        for values in (tokens, labels):
            if values is not None:
                data = np.ascontiguousarray(values).view(np.uint8).data
                padding = b"\0" * (-len(data) % 8)
                try:
                    self._file.write(data)
                    self._file.write(padding)
                    self._file.flush()
                except OSError as error:
                    raise disk_full(error, self.path, len(data)) from error
                self._size += len(data) + len(padding)

    def segments(self) -> Iterator[Segment]:
        """What was added since the last call, mapped."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        whole = np.memmap(self.path, dtype=np.uint8, mode="r")
        for at, kind, has_labels, lengths, numbers in parts:
            tokens = int(lengths.sum(dtype=np.int64))
            size = tokens * kind.itemsize
            ids = whole[at : at + size].view(kind.dtype)
            at += size + -size % 8
            labels = whole[at : at + 4 * tokens].view("<i4") if has_labels else None
            yield Segment(ids, labels, lengths, numbers)

    def close(self) -> None:
        self._file.close()


def make_anew(
    made: MadeAnew,
    old: Elements,
    old_lines: NDArray[np.void],
    records: Records,
    cut: Recut,
) -> None:
    """Write the sequences of `cut.renewed` records, from `old`, whose sequences are the old lines.

    Their numbers are the new lines, whose `targets` are filled in; a line without any is dropped.
    """
    lines = cut.piece.lines
    new_first = np.append(np.flatnonzero(lines["part"] == 0), len(lines))
    ends = np.cumsum(records.have[cut.renewed])
    start = 0
    while start < len(cut.renewed):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK_TOKENS, "right")))
        block = cut.renewed[start:stop]
        start = stop
        sources = _ranges(records.first[block], records.first[block + 1])
        lengths = old_lines["length"][sources]
        tokens, labels = old.take(sources, int(lengths.sum(dtype=np.int64)))
        if labels is None:
            labels = tokens.astype(np.int32)
            labels[np.cumsum(lengths, dtype=np.int64) - lengths] = IGNORE_INDEX
        labels = labels.copy()
        # Only what is trained throughout was ever split: a later part's first token is, too.
        later = (old_lines["part"][sources] > 0) & (old_lines["status"][sources] == FRAGMENT)
        joints = (np.cumsum(lengths, dtype=np.int64) - lengths)[later]
        labels[joints] = tokens[joints]
        new = _ranges(new_first[block], new_first[block + 1])
        taken = lines["length"][new].astype(np.int64)
        per_record = new_first[block + 1] - new_first[block]
        begins = (
            np.repeat(np.cumsum(records.have[block]) - records.have[block], per_record) + lines["start"][new]
        )
        places = _ranges(begins, begins + taken)
        tokens, labels = tokens[places], labels[places]
        firsts = np.cumsum(taken) - taken
        labels[firsts] = IGNORE_INDEX
        lines["targets"][new] = np.add.reduceat(labels != IGNORE_INDEX, firsts, dtype=np.int64)
        made.add(tokens, labels if old.labels is not None else None, taken.astype(np.int32), new)
        idle = new[(lines["targets"][new] == 0) & (lines["status"][new] == TRUNCATED)]
        lines["status"][idle] = DROPPED
        lines["cut"][idle] += lines["length"][idle]
        lines["length"][idle] = 0


def _ranges(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2 5], [4 6] -> [2 3 5]."""
    sizes = stops - starts
    first = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    found: NDArray[np.int64] = np.arange(len(first)) + first
    return found
