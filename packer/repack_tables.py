"""Sequence tables of packed folders as lines of a build, and what a split becomes of all folders' lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.extra_columns import GROUP, PICTURES, without_value
from padless.packer.folder_tokens import Elements, FolderGather, Segment, renumbered
from padless.packer.fragments import Cutter
from padless.packer.lines import LINE, REASONS, STATUSES, WHOLE
from padless.packer.table_writer import LINES_PER_GROUP, Piece
from padless.packer.tables import Account, SplitLines
from padless.runtime.format import ColumnInfo
from padless.runtime.reader import PackedReader, column_to_numpy

if TYPE_CHECKING:
    import pyarrow as pa


def read_table(reader: PackedReader, records: int, sources: int) -> Piece:
    """A folder's table, its records and sources numbered behind those of the folders before it."""
    numbers = ("record", "source", "row", "part", "start", "length", "num_targets", "cut")
    total = sum(info.lines for info in reader.manifest.sequence_tables)
    record, row = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    source = np.empty(total, dtype=np.int32)
    lines = np.zeros(total, dtype=LINE)
    end = 0
    for table in reader.sequence_lines((*numbers, "status", "reason"), lines=2**16, coded=True):
        start, end = end, end + table.num_rows
        if end > total:
            break  # the reader is about to complain
        columns = {name: column_to_numpy(table.column(name)) for name in numbers}
        np.add(columns["record"], records, out=record[start:end])
        np.add(columns["source"], sources, out=source[start:end])
        row[start:end] = columns["row"]
        mine = lines[start:end]
        for name in ("part", "start", "length", "cut"):
            mine[name] = columns[name]
        mine["targets"] = columns["num_targets"]
        for name, words in (("status", STATUSES), ("reason", REASONS)):
            codes = _codes(table.column(name), words)
            if codes is None:
                raise InputError(
                    f"{reader.path} has a {name} that this padless does not know: upgrade padless, or build "
                    "again"
                )
            mine[name] = codes
        mine["reason"][mine["status"] == WHOLE] = 0
    return Piece(record, row, source, lines)


def _codes(column: pa.ChunkedArray, words: tuple[str, ...]) -> NDArray[np.uint8] | None:
    """Where each string stands among `words`, 0 for null; None where one is not among them."""
    import pyarrow as pa

    found = []
    for chunk in column.chunks:
        known = chunk.dictionary.to_pylist()
        code_of = np.array([words.index(w) if w in words else 255 for w in known] + [0], dtype=np.uint8)
        found.append(code_of[column_to_numpy(pa.chunked_array([chunk.indices.fill_null(len(known))]))])
    codes = np.concatenate(found) if found else np.zeros(0, np.uint8)
    return None if (codes == 255).any() else codes


def sequence_columns(
    reader: PackedReader, columns: Iterable[ColumnInfo], lines: int, records: int
) -> dict[str, NDArray[Any]]:
    """The further columns at sequence level, [lines] each; -1 or "" where there is nothing.

    Pairs are numbered by their record, so behind the `records` of other folders.
    """
    found: dict[str, NDArray[Any]] = {}
    for column in columns:
        if column.level != "sequence":
            continue
        if column == PICTURES:
            values: NDArray[Any] = np.full(lines, "", dtype=object)
        else:
            values = without_value(column.name, lines, column.type[5:-1])
        if any(stored.name == column.name for stored in reader.manifest.extras):
            for batch in reader.batches():
                values[batch.flat("sequence_ids")] = batch.flat(column.name)
        if column.name == GROUP:
            values[values >= 0] += records
        found[column.name] = values
    return found


def assemble(
    pieces: list[Piece],
    segments: list[Segment],
    extras: dict[str, NDArray[Any]],
    sources: int,
    empty_replies: int,
) -> tuple[SplitLines, FolderGather, Piece]:
    """A split's account and sequences, its tokens, and its table, from the folders' one after the other."""
    piece = pieces[0]
    if len(pieces) > 1:
        piece = Piece(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    lines = piece.lines
    lengths, targets = np.ascontiguousarray(lines["length"]), np.ascontiguousarray(lines["targets"])
    kept = lengths > 0
    ids = None
    if not kept.all():
        ids = np.flatnonzero(kept)
        lengths, targets = lengths[kept], targets[kept]
        extras = {name: column[kept] for name, column in extras.items()}
        segments = renumbered(segments, np.where(kept, np.cumsum(kept) - 1, -1))
    elements = Elements.lay(segments, len(lengths))
    found = SplitLines(lengths, elements.elements, ids, len(lines), 0, [], extras=extras)
    account = Account(sources)
    for start in range(0, len(lines), LINES_PER_GROUP):  # in a core's own cache
        here = slice(start, start + LINES_PER_GROUP)
        account.add(lines[here], piece.source[here])
    account.empty_replies = empty_replies  # none of them was dropped: that is refused
    account.enter(found)
    return found, FolderGather(elements, lengths, ids, targets, extras), piece


def cut_again(gather: FolderGather, piece: Piece, split: SplitLines) -> tuple[FolderGather, Piece]:
    """The tokens and the table of a split's fragments, from those of what was cut."""
    assert split.fragments is not None
    lines, origin = Cutter(split.fragments).cut(piece.lines)
    cut = replace(
        gather,
        elements=gather.elements.fragments(split.elements, split.fragments.starts, split.lengths),
        lengths=split.lengths,
        ids=split.ids,
        targets=split.lengths - 1,
        extras=split.extras,
        cut=True,
    )
    return cut, Piece(piece.record[origin], piece.row[origin], piece.source[origin], lines)
