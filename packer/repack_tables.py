"""Sequence tables of packed folders as lines of a build, and what a split becomes of all folders' lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.extra_columns import GROUP, PICTURES, without_value
from padless.packer.folder_tokens import Elements, FolderGather, Segment, renumbered
from padless.packer.fragments import Cutter
from padless.packer.lines import LINE, REASONS, STATUSES, WHOLE
from padless.packer.recut import are_settled
from padless.packer.table_writer import LINES_PER_GROUP, ColumnPiece, Piece
from padless.packer.tables import Account, SplitLines
from padless.runtime.format import ColumnInfo
from padless.runtime.reader import PackedReader, column_to_numpy

if TYPE_CHECKING:
    import pyarrow as pa

NUMBERS = ("record", "source", "row", "part", "start", "length", "num_targets", "cut")
"""The columns of a table but for its words and the places in its plan."""


class Table(NamedTuple):
    """A sequence table as planning needs it, and its lines for whoever writes them."""

    lengths: NDArray[np.int32]
    """[lines]: tokens as packed, 0 where dropped."""
    targets: NDArray[np.int32]
    pieces: Callable[[], Iterator[Piece | ColumnPiece]]
    """All lines in their order, from the first on each time."""


def read_table(reader: PackedReader, records: int, sources: int) -> Piece:
    """A folder's table, its records and sources numbered behind those of the folders before it."""
    total = sum(info.lines for info in reader.manifest.sequence_tables)
    record, row = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    source, lines = np.empty(total, dtype=np.int32), np.zeros(total, dtype=LINE)
    end = 0
    for piece in _pieces(reader, records, sources):
        start, end = end, end + len(piece.record)
        if end > total:
            break  # the reader is about to complain
        record[start:end], row[start:end], source[start:end] = piece[:3]
        for name in ("part", "start", "cut", "length", "targets", "status", "reason"):
            lines[name][start:end] = piece.lines[name]
    return Piece(record, row, source, lines)


def read_settled(
    reader: PackedReader, records: int, sources: int, max_length: int, account: Account
) -> Table | None:
    """The same where every record stays as it is at `max_length`, entered into `account`; otherwise None.

    Its lines are read again for whoever wants them: in memory they would take as long to be put there as
    the table takes to be decoded ten times.
    """
    total = sum(info.lines for info in reader.manifest.sequence_tables)
    lengths, targets = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32)
    counted = deepcopy(account)
    end = 0
    for columns in _columns(reader, ("source", "part", "length", "num_targets", "cut")):
        start, end = end, end + len(columns["length"])
        if end > total:
            break
        if not are_settled(columns, max_length):
            return None
        lengths[start:end], targets[start:end] = columns["length"], columns["targets"]
        counted.add(columns, columns["source"] + sources)
    vars(account).update(vars(counted))
    return Table(lengths, targets, lambda: _pieces(reader, records, sources))


def held_table(piece: Piece, account: Account) -> Table:
    """Lines that are in memory, entered into `account`."""
    lines = piece.lines
    for start in range(0, len(lines), LINES_PER_GROUP):  # in a core's own cache
        here = slice(start, start + LINES_PER_GROUP)
        account.add(lines[here], piece.source[here])
    lengths, targets = np.ascontiguousarray(lines["length"]), np.ascontiguousarray(lines["targets"])
    return Table(lengths, targets, lambda: iter([piece]))


def _pieces(reader: PackedReader, records: int, sources: int) -> Iterator[ColumnPiece]:
    """A folder's table, some lines at a time."""
    for columns in _columns(reader):
        yield ColumnPiece(columns["record"] + records, columns["row"], columns["source"] + sources, columns)


def _columns(reader: PackedReader, numbers: Sequence[str] = NUMBERS) -> Iterator[dict[str, NDArray[Any]]]:
    """The columns of a folder's table by their names in LINE, or some of them, some lines at a time."""
    for table in reader.sequence_lines((*numbers, "status", "reason"), lines=LINES_PER_GROUP, coded=True):
        columns = {name: column_to_numpy(table.column(name)) for name in numbers}
        columns["targets"] = columns.pop("num_targets")
        for name, words in (("status", STATUSES), ("reason", REASONS)):
            codes = _codes(table.column(name), words)
            if codes is None:
                raise InputError(
                    f"{reader.path} has a {name} that this padless does not know: upgrade padless, or build "
                    "again"
                )
            columns[name] = codes
        columns["reason"][columns["status"] == WHOLE] = 0
        columns["empty_reply"] = np.zeros(len(columns["length"]), dtype=np.uint8)  # no folder tells
        yield columns


def _codes(column: pa.ChunkedArray, words: tuple[str, ...]) -> NDArray[np.uint8] | None:
    """Where each string stands among `words`, 0 for null; None where one is not among them."""
    import pyarrow as pa

    found = []
    for chunk in column.chunks:
        known = chunk.dictionary.to_pylist()
        code_of = np.array([words.index(w) if w in words else 255 for w in known] + [0], dtype=np.uint8)
        # Null is -1, the last; Arrow's own fill_null would import pandas, a tenth of a second.
        found.append(code_of.take(column_to_numpy(pa.chunked_array([chunk.indices]))))
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
    tables: list[Table],
    segments: list[Segment],
    extras: dict[str, NDArray[Any]],
    account: Account,
    empty_replies: int,
) -> tuple[SplitLines, FolderGather, Table]:
    """A split's account and sequences, its tokens, and its table, from the folders' one after the other.

    The tables are in the account already.
    """
    table = tables[0]
    if len(tables) > 1:
        table = Table(
            np.concatenate([one.lengths for one in tables]),
            np.concatenate([one.targets for one in tables]),
            lambda: chain.from_iterable(one.pieces() for one in tables),
        )
    lengths, targets = table.lengths, table.targets
    kept = lengths > 0
    ids = None
    if not kept.all():
        ids = np.flatnonzero(kept)
        lengths, targets = lengths[kept], targets[kept]
        extras = {name: column[kept] for name, column in extras.items()}
        segments = renumbered(segments, np.where(kept, np.cumsum(kept) - 1, -1))
    elements = Elements.lay(segments, len(lengths))
    found = SplitLines(lengths, elements.places, ids, len(kept), 0, [], extras=extras)
    account.empty_replies = empty_replies  # none of them was dropped: that is refused
    account.enter(found)
    return found, FolderGather(elements, lengths, ids, targets, extras), table


def cut_again(gather: FolderGather, table: Table, split: SplitLines) -> tuple[FolderGather, Table]:
    """The tokens and the table of a split's fragments, from those of what was cut."""
    assert split.fragments is not None
    piece = in_one(table)
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
    found = Piece(piece.record[origin], piece.row[origin], piece.source[origin], lines)
    return cut, Table(lines["length"], lines["targets"], lambda: iter([found]))


def in_one(table: Table) -> Piece:
    """All lines of a table that is in memory."""
    pieces = [piece for piece in table.pieces() if isinstance(piece, Piece)]
    return pieces[0] if len(pieces) == 1 else Piece(*map(np.concatenate, zip(*pieces, strict=True)))
