"""A JSON array, cut into runs of whole elements while it streams.

    [{"a": 1}, {"a": "},{"}, {"a": 2}]      a block of the file that begins at an element
               ^ candidate    ^ candidate   the separator learned before, searched from the end

A cut is right if every piece, read between two brackets, parses: the pieces put together are then the
array. Whoever reads a piece parses it anyway, so a candidate is taken on trust, which costs one rfind a
block, and a piece that does not parse raises CutError. The walk is then done again with `exact_cuts`: a
candidate is taken only if everything from the last boundary up to it parses (about 1 GB/s), otherwise
the block is scanned token by token (100 MB/s), and a malformed file is told by its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import overload

import orjson

from padless.packer.errors import CutError, InputError
from padless.packer.sources.chunks import Chunk, CutOptions, Piece, Records, chunk_data
from padless.packer.sources.json_text import MalformedError, as_row, parse
from padless.packer.sources.stream import NON_BLANK, READ_BYTES, ByteStream

# A string runs to its closing quote, or to the end of the block where that is still missing;
# possessive, since a megabyte of escapes must not be remembered for backtracking.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
KEY = re.compile(rb',\s*\{\s*"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
OPENING, CLOSING, COMMA, ARRAY_END = b"{[", b"}]", ord(","), ord("]")
CLOSING_OR_BLANK = b"}] \t\r\n"
_HEAD_BYTES = 1 << 20
WAY_OUT = (
    "mend the file there; in a file of one record a line (.jsonl) bad records can be left out "
    "with --on-bad-record drop"
)


def separators(block: bytes) -> Iterator[int]:
    """Positions of the commas between the elements, and of the bracket that closes the array.

    `block` begins between two elements of the array.
    """
    depth = 0
    for token in TOKEN.finditer(block):
        at = token.start()
        byte = block[at]
        if byte in OPENING:
            depth += 1
        elif byte == COMMA:
            if depth == 0:
                yield at
        elif byte in CLOSING:
            if depth == 0:
                yield at
                return
            depth -= 1


def cut(stream: ByteStream, options: CutOptions) -> Iterator[Piece]:
    """Pieces of whole elements, without the comma or bracket behind them.

    Raises InputError with line and column where the array is malformed; without `exact_cuts` CutError,
    since a wrong cut lets all that follows it look malformed.
    """
    try:
        yield from _cut(stream, options)
    except InputError as error:
        raise error if options.exact_cuts else CutError(str(error)) from error


def _cut(stream: ByteStream, options: CutOptions) -> Iterator[Piece]:
    if stream.peek(1) != b"[":
        yield from _one_object(stream)
        return
    stream.read(1)
    start, line, block, separator = stream.offset, stream.line, b"", b""
    begun = ended = False
    while not ended:
        size = max(options.chunk_bytes, len(block))
        data = stream.read(size)
        ended = len(data) < size
        block = block + data if block else data
        if ended:
            _parse_at(stream, start, b"[" + block)
            comma = block.rindex(b"]")
        else:
            comma = _by_separator(block, separator, checked=options.exact_cuts)
            if comma < 0:
                comma = _by_scan(stream, start, block)
                if comma < 0:
                    continue
                separator = _learn(block, comma)
        first = NON_BLANK.search(block, 0, comma)
        if first:
            skipped = first.start()
            yield Piece(
                start=start + skipped,
                stop=start + comma,
                line=line + block.count(b"\n", 0, skipped),
                payload=stream.keep(block[skipped:comma]),
            )
        elif begun or not ended:
            raise _error(stream, start + comma, "a comma with no element beside it")
        begun = True
        start += comma + 1
        line += block.count(b"\n", 0, comma + 1)
        block = block[comma + 1 :]


def element_separator(stream: ByteStream) -> bytes:
    """The bytes between two elements that stand between no two other things in the array's first mebibyte.

    Empty where there are none such. They hold an unescaped key, so no string can contain them.
    """
    stream.read(1)
    head = stream.read(_HEAD_BYTES)
    commas = {at for at in separators(head) if head[at] == COMMA}
    separator = _learn(head, max(commas)) if commas else b""
    ahead = separator.index(b",") if separator else 0
    at = head.find(separator) if separator else -1
    while at >= 0:
        if at + ahead not in commas:
            return b""
        at = head.find(separator, at + 1)
    return separator


def read(chunk: Chunk) -> Records:
    """The elements of a piece: objects and strings, anything else as BadRecord.

    Raises CutError where the piece does not parse.
    """
    data = chunk_data(chunk)
    try:
        values, replaced = parse(b"[" + data + b"]")
    except MalformedError as error:
        raise CutError(
            f"{chunk.path} changed during the build (near line {chunk.line:,}: {error.reason}); "
            "build again once it is complete"
        ) from None
    lines = ElementLines(data, chunk.line)
    if all(isinstance(value, dict) for value in values):
        return Records(rows=values, lines=lines, replaced=replaced, json=data)
    rows = [as_row(value, line) for value, line in zip(values, lines, strict=True)]
    return Records(rows=rows, lines=lines, replaced=replaced, json=data)


class ElementLines(Sequence[int]):
    """1-based line of each element, found when first asked for: only messages need it."""

    def __init__(self, data: bytes, first_line: int) -> None:
        self._data = data
        self._first_line = first_line
        self._lines: list[int] | None = None

    def __len__(self) -> int:
        return len(self._found())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._found()[index]

    def _found(self) -> list[int]:
        if self._lines is None:
            line, counted, lines = self._first_line, 0, []
            for begin in (0, *(at + 1 for at in separators(self._data))):
                element = NON_BLANK.search(self._data, begin)
                at = element.start() if element else begin
                line += self._data.count(b"\n", counted, at)
                counted = at
                lines.append(line)
            self._lines = lines
        return self._lines


def _one_object(stream: ByteStream) -> Iterator[Piece]:
    """A file that is a single object over several lines: one record, whole in memory."""
    start, data = stream.offset, b""
    while more := stream.read(max(READ_BYTES, len(data))):
        data += more
    data = data.rstrip()
    _parse_at(stream, start, b"[" + data + b"]")
    yield Piece(start=start, stop=start + len(data), line=stream.line, payload=stream.keep(data))


def _by_separator(block: bytes, separator: bytes, *, checked: bool) -> int:
    """The comma in the last occurrence of a separator seen before; `checked`: where it is a true one."""
    at = block.rfind(separator) if separator else -1
    if at < 0:
        return -1
    comma = block.index(b",", at)
    if not checked:
        return comma
    try:
        orjson.loads(b"[" + block[:comma] + b"]")
    except orjson.JSONDecodeError:
        return -1
    return comma


def _by_scan(stream: ByteStream, start: int, block: bytes) -> int:
    """The last comma between two elements, -1 where the block has none."""
    comma = -1
    for at in separators(block):
        if block[at] == COMMA:
            comma = at
        elif NON_BLANK.search(block, at + 1) or block[at] != ARRAY_END:
            _parse_at(stream, start, b"[" + block)
    if comma >= 0:
        _parse_at(stream, start, b"[" + block[:comma] + b"]")
    return comma


def _learn(block: bytes, comma: int) -> bytes:
    """The bytes around a comma between two objects: brackets closing before it, first key behind.

    The brackets tell `}]},{"role"` from the `"},{"role"` inside a record.
    """
    behind = KEY.match(block, comma)
    start = comma
    while start and block[start - 1] in CLOSING_OR_BLANK:
        start -= 1
    return block[start : behind.end()] if behind else b""


def _parse_at(stream: ByteStream, start: int, text: bytes) -> None:
    """Raises InputError unless `text` parses; its second byte is the file's byte `start`."""
    try:
        parse(text)
    except MalformedError as error:
        raise _error(stream, start + max(0, error.position - 1), error.reason) from None


def _error(stream: ByteStream, offset: int, reason: str) -> InputError:
    return stream.error_at(offset, f"not valid JSON: {reason}; {WAY_OUT}")
