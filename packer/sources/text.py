"""Plain text: which lines begin a record, and nothing else.

    line    every line begins one        blank   a blank line does (it is then trimmed off)
    file    only the first line          REGEX   the lines that it matches, each line by itself

Blank lines at both ends of a record are trimmed, records of nothing else are none, and CRLF is read
as a newline. Judging line by line makes a record the same whatever the block it was cut from; the
price is that an expression cannot look across lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from padless.packer.errors import InputError
from padless.packer.sources.chunks import Chunk, CutOptions, Piece, Records, chunk_data
from padless.packer.sources.stream import ByteStream, cut_blocks


def begins_record(text_by: str) -> Callable[[str], bool]:
    """Whether a line (without its newline) begins a record; raises InputError for a bad regex."""
    if text_by == "line":
        return lambda line: True
    if text_by == "blank":
        return lambda line: not line.strip()
    if text_by == "file":
        return lambda line: False
    try:
        pattern = re.compile(text_by)
    except re.error as error:
        raise InputError(
            f"--text-by {text_by!r} is no regular expression ({error}); "
            "use line, blank, file, or an expression that matches where a record begins"
        ) from None
    return lambda line: pattern.match(line) is not None


def cut(stream: ByteStream, options: CutOptions) -> Iterator[Piece]:
    """Pieces that begin where a record does; `args` is `text_by`."""
    begins = begins_record(options.text_by)

    def last_boundary(block: bytearray) -> int:
        stop = block.rfind(b"\n")
        while stop > 0:
            start = block.rfind(b"\n", 0, stop) + 1
            # A byte that is not UTF-8 is the reader's to report, with its line.
            line = block[start:stop].removesuffix(b"\r").decode(errors="replace")
            if begins(line):
                return start
            stop = start - 1
        return 0

    args = (options.text_by,)
    for piece in cut_blocks(stream, options.chunk_bytes, last_boundary):
        yield Piece(start=piece.start, stop=piece.stop, line=piece.line, payload=piece.payload, args=args)


def read(chunk: Chunk) -> Records:
    """The records of a piece as strings, lines joined by a newline.

    Raises InputError for bytes that are not UTF-8.
    """
    data = chunk_data(chunk)
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = chunk.line + data.count(b"\n", 0, error.start)
        raise InputError(
            f"{chunk.path}, line {line:,}: byte 0x{data[error.start]:02x} is not UTF-8; "
            "convert the file (for example iconv -f WINDOWS-1252 -t UTF-8)"
        ) from None
    (text_by,) = chunk.args
    if text_by == "file":
        return Records(rows=[text], lines=[chunk.line])
    begins = begins_record(text_by)
    lines = text.split("\n")
    starts = [0, *(at for at in range(1, len(lines)) if begins(lines[at])), len(lines)]
    rows: list[str] = []
    numbers: list[int] = []
    for start, stop in zip(starts, starts[1:], strict=False):
        while start < stop and not lines[start].strip():
            start += 1
        while start < stop and not lines[stop - 1].strip():
            stop -= 1
        if start < stop:
            rows.append("\n".join(lines[start:stop]))
            numbers.append(chunk.line + start)
    return Records(rows=rows, lines=numbers)
