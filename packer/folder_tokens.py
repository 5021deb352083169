"""The tokens of packed folders as a source of sequences, where they lie.

A sequence has a place: in which of the segments that are mapped (record batches of all folders, and of a
file of our own for what is made anew) it begins, and where there. Nothing is copied before the shard that it
goes to is written: then places become one of Arrow's arrays of binary views, and a cast copies the bytes into
memory of just their size. Views count bytes in 32 bits, so what may have more (wide columns) is copied by
numpy, a sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.gather import BatchGather
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.reader import PackedReader

if TYPE_CHECKING:
    import pyarrow as pa

WEIGHT = "loss_weight"
PLACE = np.dtype([("size", "<i4"), ("prefix", "<i4"), ("segment", "<i4"), ("start", "<i4")])
"""A binary view, but that it counts tokens; the prefix is for comparing views, which nobody does."""
INLINE = 12
"""Bytes that a view has in itself, where the value is no longer."""
WIDEST = 8
"""Bytes a token of what is taken by views."""


class Segment(NamedTuple):
    """Sequences that lie one after the other in memory that is mapped."""

    columns: Mapping[str, NDArray[Any]]
    """Those at token level, [tokens] or [tokens, K] each: input_ids, labels unless left out, and more."""
    lengths: NDArray[np.int32]
    numbers: NDArray[np.int64]
    """[sequences]: which sequence each is; -1: none that is asked for."""


class Short(NamedTuple):
    """Sequences of which a column has so few bytes that views have them in themselves."""

    numbers: NDArray[np.intp]
    """Ascending."""
    values: NDArray[np.int32]
    """[numbers, 3]: the bytes, and zeros."""


@dataclass(frozen=True)
class Elements:
    """Sequences by their places in segments."""

    segments: list[Segment]
    places: NDArray[np.void]
    """[sequences] of type PLACE."""
    buffers: Mapping[str, list[pa.Buffer]]
    """Of each column that is taken by views, what it has in each segment."""
    short: Mapping[str, Short]
    """Of those columns that have any."""

    @property
    def columns(self) -> Iterable[str]:
        """The columns that the segments have."""
        return self.segments[0].columns if self.segments else ()

    @classmethod
    def lay(cls, segments: list[Segment], sequences: int) -> Elements:
        """Find the places of the segments' sequences; `sequences`: how many numbers there are."""
        places = np.zeros(sequences, dtype=PLACE)
        for number, segment in enumerate(segments):
            here = np.empty(len(segment.lengths), dtype=PLACE)
            here["size"], here["prefix"], here["segment"] = segment.lengths, 0, number
            np.cumsum(segment.lengths, out=here["start"])
            here["start"] -= segment.lengths
            numbers = segment.numbers
            if int(numbers.min(initial=0)) < 0:
                asked = numbers >= 0
                numbers, here = numbers[asked], here[asked]
            places[numbers] = here
        return cls.at(places, segments)

    @classmethod
    def at(cls, places: NDArray[np.void], segments: list[Segment]) -> Elements:
        """Sequences at these places, [sequences] of type PLACE."""
        import pyarrow as pa

        buffers: dict[str, list[pa.Buffer]] = {}
        short: dict[str, Short] = {}
        by_width: dict[int, NDArray[np.intp]] = {}
        for name in segments[0].columns if segments else ():
            columns = [segment.columns[name] for segment in segments]
            width = _width(columns[0])
            if width > WIDEST or max(len(column) for column in columns) >= 2**31 // width:
                continue
            buffers[name] = [pa.py_buffer(column) for column in columns]
            if width not in by_width:
                by_width[width] = np.flatnonzero(places["size"] <= INLINE // width)
            if len(by_width[width]):
                short[name] = _short(columns, places, by_width[width])
        return cls(segments, places, buffers, short)

    def fragments(
        self, places: NDArray[np.void], starts: NDArray[Any], lengths: NDArray[np.int32]
    ) -> Elements:
        """Parts of the sequences at these places from token `starts` on, [fragments] each."""
        parts = places.copy()
        parts["start"] += starts.astype(np.int32)
        parts["size"] = lengths
        return Elements.at(parts, self.segments)

    def take(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        """A column of sequences, of at least one, one after the other: [tokens] or [tokens, K]."""
        places = self.places.take(sequences)
        if name not in self.buffers:
            lie = zip(*(places[field].tolist() for field in ("segment", "start", "size")), strict=True)
            return np.concatenate([self.segments[n].columns[name][at : at + size] for n, at, size in lie])
        import pyarrow as pa

        token = self.segments[0].columns[name][:0]
        buffers = self.buffers[name]
        if len(buffers) > len(places):  # of large folders only what holds these, or each batch would cost all
            used, places["segment"] = np.unique(places["segment"], return_inverse=True)
            buffers = [buffers[number] for number in used]
        places["size"] *= _width(token)
        places["start"] *= _width(token)
        if name in self.short:
            rows = np.flatnonzero(places["size"] <= INLINE)
            known = self.short[name]
            values = known.values[np.searchsorted(known.numbers, sequences[rows])]
            places.view("<i4").reshape(-1, 4)[rows, 1:] = values
        views = pa.Array.from_buffers(pa.binary_view(), len(places), [None, pa.py_buffer(places), *buffers])
        taken = views.cast(pa.large_binary()).buffers()[2]
        found: NDArray[Any] = np.frombuffer(taken, dtype=token.dtype)
        return found.reshape(-1, *token.shape[1:])


def _width(column: NDArray[Any]) -> int:
    """Bytes that a column has for a token."""
    return column.itemsize * int(np.prod(column.shape[1:]))


def _short(columns: list[NDArray[Any]], places: NDArray[np.void], numbers: NDArray[np.intp]) -> Short:
    """What a column, which is given by segments, has of these sequences."""
    width = _width(columns[0])
    most = np.arange(INLINE // width)
    here = places[numbers]
    by_segment = np.argsort(here["segment"], kind="stable")
    edges = np.searchsorted(here["segment"][by_segment], np.arange(len(columns) + 1))
    found = np.zeros((len(numbers), INLINE), dtype=np.uint8)
    for column, start, stop in zip(columns, edges[:-1], edges[1:], strict=True):
        rows = by_segment[start:stop]
        if not len(rows) or not len(column):
            continue
        tokens = np.minimum(here["start"][rows, None] + most, len(column) - 1)
        values = column.view(np.uint8).reshape(len(column), width)[tokens]
        values[most >= here["size"][rows, None]] = 0
        found[rows, : len(most) * width] = values.reshape(len(rows), -1)
    return Short(numbers, found.view("<i4"))


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
        if not self.cut and "labels" in self.elements.columns:
            return self.elements.take("labels", sequences)
        found = self.elements.take("input_ids", sequences).astype(np.int32)
        found[self._starts(sequences)] = IGNORE_INDEX
        return found

    @property
    def is_weighted(self) -> bool:
        return WEIGHT in self.elements.columns

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
