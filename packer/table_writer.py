"""The sequence table: lines as they are packed, each with its place in the plan, into Parquet.

Lines pass by in pieces, so that none but the places stay in memory: six or eight bytes a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.durable import DurableFile
from padless.packer.fragments import lines_of_split
from padless.packer.lines import REASONS, STATUSES, WHOLE
from padless.packer.plan import PackPlan, blocks, pack_tokens
from padless.packer.tables import SplitLines
from padless.packer.token_store import ChunkStore
from padless.runtime.format import TableInfo, sequence_table_schema

if TYPE_CHECKING:
    import pyarrow as pa

LINES_PER_FILE = 50_000_000
LINES_PER_GROUP = 2**16
WRITTEN_BYTES = 2**20
_ENCODING: dict[str, Any] = {
    "use_dictionary": ["source", "part", "status", "reason", "start", "cut"],
    "column_encoding": {
        name: "DELTA_BINARY_PACKED" for name in ("record", "row", "length", "num_targets", "pack", "offset")
    },
}
"""Numbers that hardly repeat go as differences: a third of the size, written in half of the time."""


class Piece(NamedTuple):
    """Some lines of a sequence table, in its order; all arrays are as long."""

    record: NDArray[np.int64]
    row: NDArray[np.int64]
    source: NDArray[np.int32]
    lines: NDArray[np.void]
    """Of type LINE; its own `record` is not looked at."""


class ColumnPiece(NamedTuple):
    """The same with an array for each column of `lines`, by their names in LINE."""

    record: NDArray[np.int64]
    row: NDArray[np.int64]
    source: NDArray[np.int32]
    lines: Mapping[str, NDArray[Any]]


class Places:
    """Where each sequence stands: its pack, and its first token within the pack."""

    def __init__(self, plan: PackPlan, lengths: NDArray[np.int32]) -> None:
        self.pack = np.empty(len(lengths), dtype=np.int32)
        # Below the longest pack: two bytes do for most lengths of packs.
        is_short = int(pack_tokens(plan, lengths).max(initial=0)) <= 2**16
        self.offset = np.empty(len(lengths), dtype=np.uint16 if is_short else np.int32)
        for here, entries in blocks(plan.offsets):
            offsets = plan.offsets[here.start : here.stop + 1]
            sequences = plan.order[entries]
            per_pack = np.diff(offsets)
            packs = np.arange(here.start, here.stop, dtype=np.int32)
            self.pack[sequences] = np.repeat(packs, per_pack)
            taken = lengths.take(sequences)
            starts = np.cumsum(taken, dtype=np.int64) - taken
            self.offset[sequences] = starts - np.repeat(starts[offsets[:-1] - offsets[0]], per_pack)


def write_table(
    folder: str, pieces: Iterator[Piece | ColumnPiece], total: int, places: Places
) -> tuple[TableInfo, ...]:
    """Write the sequence table of a split, `total` lines in pieces of any size.

    One file, or several above 50 M lines.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = sequence_table_schema()
    columns = _columns(pieces, places)
    infos: list[TableInfo] = []
    files = -(-total // LINES_PER_FILE)
    for number in range(max(files, 1)):
        name = "sequences.parquet" if files <= 1 else f"sequences-{number:05d}.parquet"
        left = min(LINES_PER_FILE, total - number * LINES_PER_FILE)
        lines = left
        with DurableFile(folder, name) as file:
            # In few writes: Parquet makes thousands, and each waits for its turn among the writers of shards.
            with (
                pa.BufferedOutputStream(pa.PythonFile(file, mode="w"), WRITTEN_BYTES) as buffered,
                pq.ParquetWriter(buffered, schema, **_ENCODING) as writer,
            ):
                while left > 0:
                    piece = next(columns)
                    writer.write_batch(pa.RecordBatch.from_arrays(piece, schema=schema))
                    left -= len(piece[0])
            info = file.commit(lambda checksum, name=name: name)  # type: ignore[misc]
        infos.append(TableInfo(file=info.file, lines=lines, bytes=info.bytes, checksum=info.checksum))
    return tuple(infos)


def _columns(pieces: Iterator[Piece | ColumnPiece], places: Places) -> Iterator[list[pa.Array]]:
    """The table's columns, a group of lines at a time; groups never cross LINES_PER_FILE."""
    statuses, reasons = Spelled(STATUSES), Spelled(REASONS)
    names = ("part", "status", "reason", "start", "length", "targets", "cut")
    held: list[list[NDArray[Any]]] = []
    sequence = written = 0

    def emit() -> list[pa.Array]:
        nonlocal sequence, written
        together = held[0] if len(held) == 1 else [np.concatenate(one) for one in zip(*held, strict=True)]
        held.clear()
        record, row, source, part, status, reason, start, length, targets, cut = together
        kept = length > 0
        here = slice(sequence, sequence + int(kept.sum()))
        sequence = here.stop
        if here.stop - here.start == len(kept):
            valid = None
            pack, offset = places.pack[here].astype(np.int64), places.offset[here].astype(np.int32)
        else:
            valid = kept
            pack, offset = np.zeros(len(kept), dtype=np.int64), np.zeros(len(kept), dtype=np.int32)
            pack[kept], offset[kept] = places.pack[here], places.offset[here]
        written += len(kept)
        return [
            _array(record),
            _array(source),
            _array(row),
            _array(part),
            statuses.of(status),
            reasons.of(reason, status != WHOLE),
            _array(start),
            _array(length),
            _array(targets),
            _array(cut),
            _array(pack, valid),
            _array(offset, valid),
        ]

    waiting = 0
    for whole in pieces:
        start = 0
        while start < len(whole.record):
            room = min(LINES_PER_GROUP, LINES_PER_FILE - written % LINES_PER_FILE) - waiting
            part = slice(start, start + room)
            columns: list[NDArray[Any]]
            columns = [whole.record, whole.row, whole.source, *(whole.lines[name] for name in names)]
            held.append([column[part] for column in columns])
            start += len(held[-1][0])
            waiting += len(held[-1][0])
            if waiting == min(LINES_PER_GROUP, LINES_PER_FILE - written % LINES_PER_FILE):
                yield emit()
                waiting = 0
    if held:
        yield emit()


def pieces_of(store: ChunkStore, split: int, splits: int, about: SplitLines) -> Iterator[Piece]:
    """The lines of split number `split` of `splits` as they are packed, chunk after chunk."""
    base = 0
    bases: dict[int, int] = {}
    for entry, lines in lines_of_split(store, split, splits, about.times, about.fragments):
        row = bases.get(entry.source, 0)
        records = lines["record"].astype(np.int64)
        yield Piece(base + records, row + records, np.full(len(lines), entry.source, dtype=np.int32), lines)
        base += entry.records
        bases[entry.source] = row + entry.records


def _array(values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    mask = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [mask, pa.py_buffer(values)])


class Spelled:
    """Words for their numbers; they are mostly the same for many lines, and those are spelled once."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = strings(words)
        self._last: tuple[int, int | None] | None = None
        self._array: pa.Array

    def of(self, numbers: NDArray[np.uint8], valid: NDArray[np.bool_] | None = None) -> pa.Array:
        """The words, [numbers] of at least one; null where one is not valid."""
        alike: tuple[int, int | None] | None = None
        if valid is not None and not valid.any():
            alike = len(numbers), None
        elif (valid is None or valid.all()) and not (numbers != numbers[0]).any():
            alike = len(numbers), int(numbers[0])
        if alike is None or alike != self._last:
            self._array = self._words.take(_array(numbers, valid))
            self._last = alike
        return self._array


def strings(words: tuple[str, ...]) -> pa.Array:
    """Words as an Arrow array (`pa.array` would import pandas where that is installed)."""
    import pyarrow as pa

    ends = np.cumsum([0, *(len(word) for word in words)], dtype=np.int32)
    data = "".join(words).encode("ascii")
    return pa.StringArray.from_buffers(len(words), pa.py_buffer(ends), pa.py_buffer(data))
