"""CSV and TSV by the rules of Python's csv module: a header, then rows of strings.

Whether a newline ends a row depends on every quote before it, so the parent parses too, only to
find where rows end; chunks are byte ranges as elsewhere. Values are never typed and never None: a
blank cell is the empty string.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from padless.packer.errors import InputError
from padless.packer.sources.chunks import (
    BadRecord,
    Chunk,
    CutOptions,
    Piece,
    Records,
    chunk_data,
)
from padless.packer.sources.stream import ByteStream
from padless.packer.sources.urls import plain_name

# The module refuses fields above 131,072 characters, which a document in a cell easily has.
FIELD_CHARACTERS = 2**31 - 1


def cut(stream: ByteStream, options: CutOptions) -> Iterator[Piece]:
    """Pieces of whole rows; `args` are the delimiter and the columns.

    Raises InputError for bytes that are not UTF-8, a column named twice and a quote never closed.
    """
    import csv

    csv.field_size_limit(FIELD_CHARACTERS)
    name = plain_name(stream.path)
    name = os.path.splitext(name)[0] if stream.compression else name
    delimiter = "\t" if name.lower().endswith(".tsv") else ","
    start = stream.offset
    taken: list[bytes] = []
    rows = csv.reader(_decoded(stream, taken), delimiter=delimiter)
    args: tuple[str, ...] = ()
    line, last_row, size, filled, row_at = 1, [b""], 0, False, 0
    try:
        for row in rows:
            last_row = taken[row_at:]
            size += sum(map(len, last_row))
            row_at = len(taken)
            filled |= bool(args and row)
            if row and not args:
                args = (delimiter, *_columns(stream.path, row))
            elif size < options.chunk_bytes:
                continue
            if filled:
                payload = stream.keep(b"".join(taken))
                yield Piece(start=start, stop=start + size, line=line, payload=payload, args=args)
            start, line = start + size, rows.line_num + 1
            size, filled, row_at = 0, False, 0
            taken.clear()
    except csv.Error as error:
        raise InputError(
            f"{stream.path}, line {rows.line_num:,}: not valid CSV: {error}; mend the file there"
        ) from None
    # One more line shows whether the last row's quotes are closed: open ones swallow it.
    probe = [text.decode() for text in (*last_row[:-1], last_row[-1] + b"\n", b"x")]
    if len(list(csv.reader(probe, delimiter=delimiter))) < 2:
        raise InputError(
            f"{stream.path}, line {rows.line_num - len(last_row) + 1:,}: a quoted field of this "
            "row is never closed and would take in the rest of the file; close or double the quote"
        )
    if filled:
        payload = stream.keep(b"".join(taken))
        yield Piece(start=start, stop=start + size, line=line, payload=payload, args=args)


def read(chunk: Chunk) -> Records:
    """Rows as dicts of strings; a row with too few or too many fields is a BadRecord."""
    import csv

    csv.field_size_limit(FIELD_CHARACTERS)
    delimiter, *columns = chunk.args
    texts = chunk_data(chunk).decode().split("\n")
    reader = csv.reader((text + "\n" for text in texts), delimiter=delimiter)
    rows: list[Any] = []
    lines: list[int] = []
    line = chunk.line
    for fields in reader:
        if fields:
            if len(fields) == len(columns):
                rows.append(dict(zip(columns, fields, strict=True)))
            else:
                message = f"{len(fields)} fields where the header has {len(columns)}"
                rows.append(BadRecord(line, message))
            lines.append(line)
        line = chunk.line + reader.line_num
    return Records(rows=rows, lines=lines)


def _columns(path: str, header: list[str]) -> list[str]:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise InputError(
            f"{path}: the header names {', '.join(map(repr, twice))} more than once, so a row "
            "would lose a value; rename the columns"
        )
    return header


def _decoded(stream: ByteStream, taken: list[bytes]) -> Iterator[str]:
    """Lines as text for the csv module; their bytes are left in `taken`."""
    for number, line in enumerate(stream.lines(), 1):
        taken.append(line)
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{stream.path}, line {number:,}: byte 0x{line[error.start]:02x} is not UTF-8; "
                "convert the file (for example iconv -f WINDOWS-1252 -t UTF-8)"
            ) from None
