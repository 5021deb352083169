"""Sequence tables of packed folders as lines of a build, and what a split becomes of all folders' lines."""

from __future__ import annotations

import numpy as np

from padless.packer.errors import InputError
from padless.packer.folder_tokens import Elements, FolderGather, Segment
from padless.packer.gather import Gather
from padless.packer.lines import LINE, REASONS, STATUSES, WHOLE
from padless.packer.tables import Account, Piece, SplitLines, strings
from padless.runtime.reader import PackedReader, column_to_numpy


def read_table(reader: PackedReader, records: int, sources: int) -> Piece:
    """A folder's table, its records and sources numbered behind those of the folders before it."""
    import pyarrow.compute as pc

    names = ("record", "source", "row", "part", "start", "length", "num_targets", "cut")
    table = reader.sequence_table((*names, "status", "reason"))
    columns = {name: column_to_numpy(table.column(name)) for name in names}
    lines = np.zeros(table.num_rows, dtype=LINE)
    for name in ("part", "start", "length", "cut"):
        lines[name] = columns[name]
    lines["targets"] = columns["num_targets"]
    for name, words in (("status", STATUSES), ("reason", REASONS)):
        codes = pc.index_in(table.column(name), value_set=strings(words))
        if pc.any(pc.and_(codes.is_null(), table.column(name).is_valid())).as_py():
            raise InputError(
                f"{reader.path} has a {name} that this padless does not know: upgrade padless, or build again"
            )
        lines[name] = column_to_numpy(pc.fill_null(codes, 0))
    lines["reason"][lines["status"] == WHOLE] = 0
    return Piece(
        columns["record"] + records, columns["row"], (columns["source"] + sources).astype(np.int32), lines
    )


def assemble(
    pieces: list[Piece], segments: list[Segment], sources: int, empty_replies: int
) -> tuple[SplitLines, Gather, Piece]:
    """A split's account and sequences, its tokens, and its table, from the folders' one after the other."""
    piece = Piece(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    lines = piece.lines
    kept = lines["length"] > 0
    lengths = np.ascontiguousarray(lines["length"][kept])
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    ids = None if kept.all() else np.flatnonzero(kept)
    segments = [s._replace(numbers=np.where(s.numbers < 0, -1, number[s.numbers])) for s in segments]
    elements = Elements.lay(segments, len(lengths))
    found = SplitLines(lengths, elements.elements, ids, len(lines), 0, [])
    account = Account(sources)
    account.add(lines, piece.source)
    account.empty_replies = empty_replies  # none of them was dropped: that is refused
    account.enter(found)
    return found, FolderGather(elements, lengths, ids, lines["targets"][kept]), piece
