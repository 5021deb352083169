"""The words that the sources speak: files in, chunks through the process boundary, records out.

A chunk names a byte range (or carries the bytes, where a range cannot be read again), so a task for
a worker is some hundred bytes and the parent never hands records over. The price is that plain
files are read twice, the second time from the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from padless.packer.errors import InputError
from padless.runtime.storage import Stamp


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of whole records of one source file, small enough for one worker's task."""

    index: int
    """0, 1, 2 ... over all sources, in the order of the records."""
    source: int
    """Index into the list of `SourceFile`."""
    reader: str
    """Key of `READERS`."""
    path: str
    start: int = 0
    """First byte (decompressed), or first row for columnar files; half-open with `stop`."""
    stop: int = 0
    line: int = 1
    """1-based line of the first byte, for messages to people."""
    payload: bytes | None = None
    """The bytes themselves, where they cannot be read again by range."""
    args: tuple[str, ...] = ()
    """The reader's own arguments: text-by; a CSV file's delimiter and columns; columns that hold files; where
    tokens and their mask lie."""

    @property
    def size(self) -> int:
        """Bytes, about."""
        return max(self.stop - self.start, len(self.payload or b""))


@dataclass(frozen=True)
class BadRecord:
    """A malformed row; whether it stops the build or is dropped is the caller's decision."""

    line: int | None
    message: str


@dataclass(kw_only=True)
class Records:
    """What one chunk holds."""

    rows: list[Any]
    """Dicts (objects, table rows), strings (text), or `BadRecord`."""
    lines: Sequence[int] | None
    """1-based line of each row, None where the format has no lines."""
    replaced: int = 0
    """Lone surrogates that became U+FFFD."""
    json: bytes | None = None
    """What the rows were read from, where that is JSON."""


@dataclass(kw_only=True)
class SourceFile:
    """One input: a local file, one on the Hub or behind a URL, or a data set handed over as an object.

    Bytes, checksum and chunks are known once the walk has passed it; a file on the Hub comes with the first
    two.
    """

    path: str
    name: str
    """Path below the deepest common folder of all sources, "/" separated."""
    kind: str
    """json, parquet, csv, text, tokens, or object (`data`)."""
    compression: str | None = None
    argument: int = 0
    """Which of the sources that were given names it."""
    split: str = ""
    """The folder of splits that its records go to; "" where all go to one, or each by its content."""
    revision: str | None = None
    """The Hub's commit that it is read at, or a URL's mark of its content; None: neither."""
    stamp: Stamp | None = None
    """What a URL's store says of it; None: not behind a URL of that sort."""
    data: Any = None
    """The object of the `datasets` library whose rows these are."""
    size: int = 0
    """Bytes to come, about; for progress, and to choose how to work."""
    bytes: int = 0
    checksum: str = ""
    """"xxh3:" and 32 hex digits over the raw (compressed) bytes."""
    chunks: int = 0

    @property
    def is_on_hub(self) -> bool:
        """Whether the Hub tells its bytes and checksum beforehand."""
        return self.revision is not None and self.stamp is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A chunk before the walk has numbered it; fields as in `Chunk`."""

    start: int
    stop: int
    line: int = 1
    payload: bytes | None = None
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOptions:
    """What the user decides about cutting; a reader takes what concerns it."""

    chunk_bytes: int
    text_by: str
    exact_cuts: bool = False
    """Prove each cut before it is made, instead of leaving that to the reader of the piece."""
    images: bool = False
    """Measure the images that lie in tables, instead of leaving them out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """The two sides of a kind of file: cutting in the parent, reading in a worker."""

    cut: Callable[[Any, CutOptions], Iterator[Piece]]
    """Takes a `ByteStream`, the `RowStream` of an object, or a `TokenStream`."""
    read: Callable[[Chunk], Records]


def chunk_data(chunk: Chunk) -> bytes:
    """The bytes of a chunk, from its payload or its file.

    Raises InputError where the file has become shorter since it was walked.
    """
    if chunk.payload is not None:
        return chunk.payload
    with open(chunk.path, "rb", buffering=0) as file:
        file.seek(chunk.start)
        size = chunk.stop - chunk.start
        data = file.read(size)
        while len(data) < size and (more := file.read(size - len(data))):
            data += more
    if len(data) < size:
        raise InputError(
            f"{chunk.path} ended at byte {chunk.start + len(data):,}, before {chunk.stop:,}, which "
            "it had a moment ago: it changed during the build; build again once it is complete"
        )
    return data
