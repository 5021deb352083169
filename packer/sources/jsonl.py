"""One JSON value a line: cut at newlines, parsed line by line.

A raw newline cannot stand inside a JSON string, so every newline is a boundary and the parent never
parses: 910 MB are walked in about half a second. A line that does not parse spoils nothing but
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from padless.packer.sources.chunks import (
    BadRecord,
    Chunk,
    CutOptions,
    Piece,
    Records,
    chunk_data,
)
from padless.packer.sources.json_text import MalformedError, as_row, has_long_digits, parse
from padless.packer.sources.stream import ByteStream, cut_blocks

LONG_PIECE = 2**23
"""Bytes from which on a piece has one line that is most of it."""


def cut(stream: ByteStream, options: CutOptions) -> Iterator[Piece]:
    """Pieces of whole lines; a line longer than a block is a piece of its own."""
    return cut_blocks(stream, options.chunk_bytes, lambda block: block.rfind(b"\n") + 1)


def read(chunk: Chunk) -> Records:
    """The values of a piece's lines; blank lines are no records."""
    rows: list[Any] = []
    lines: list[int] = []
    replaced = 0
    data = chunk_data(chunk)
    exact = has_long_digits(data)
    for number, text in enumerate(_lines(data), chunk.line):
        try:
            row = None if exact else orjson.loads(text)
        except orjson.JSONDecodeError:
            row = None
        if row is None:
            text = bytes(text)
            if not text.strip():
                continue
            row, count = _slow(text, number)
            replaced += count
        rows.append(row if type(row) is dict else _checked(row, number))
        lines.append(number)
    return Records(rows=rows, lines=lines, replaced=replaced, json=data)


def _lines(data: bytes) -> Iterable[bytes | memoryview]:
    """The lines of a piece: copies where they are short, which is faster, otherwise views."""
    return data.split(b"\n") if len(data) < LONG_PIECE else _views(data)


def _views(data: bytes) -> Iterator[memoryview]:
    view, start = memoryview(data), 0
    while (stop := data.find(b"\n", start)) >= 0:
        yield view[start:stop]
        start = stop + 1
    yield view[start:]


def _slow(text: bytes, number: int) -> tuple[Any, int]:
    """A line that orjson refused: what the standard library makes of it, or a BadRecord."""
    try:
        return parse(text)
    except MalformedError as error:
        column = len(text[: error.position].decode(errors="replace")) + 1
        return BadRecord(number, f"not valid JSON: {error.reason} at column {column:,}"), 0


def _checked(row: Any, number: int) -> Any:
    return row if isinstance(row, BadRecord) else as_row(row, number)
