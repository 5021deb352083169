"""A source file's bytes in one pass: decompressed, hashed as they go by, cut where a reader says.

The checksum is that of the raw file, taken from the very reads that feed the cutting, so it costs
no second pass. Compressed streams go through the parent, which makes it the bottleneck at some
300 MB/s of gzip: the remedy is to decompress beforehand.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import xxhash

from padless.packer.errors import InputError, SourceLostError
from padless.packer.hub import PREFIX, lost, open_stream
from padless.packer.sources.chunks import Piece
from padless.packer.sources.urls import UrlFile, keep_nameless
from padless.runtime.storage import is_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A freed mebibyte also raises glibc's threshold for giving memory back; with less, every block of
# the walk is paged in anew (910 MB of JSONL: 1.2 s instead of 0.4).
READ_BYTES = 1 << 20
LINES_BYTES = 1 << 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
NON_BLANK = re.compile(rb"\S")


class HashedFile(io.FileIO):
    """A file opened for reading that hashes whatever is read from it."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "rb")
        self.hash = xxhash.xxh3_128()
        self.size = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._passed(data)
        return data

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = super().readinto(buffer) or 0
        self._passed(memoryview(buffer)[:count])
        return count

    def _passed(self, data: bytes | memoryview) -> None:
        self.hash.update(data)
        self.size += len(data)


class RemoteFile(io.RawIOBase):
    """A file on the Hub, read from its start; its size and checksum are those that the Hub lists."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.size = 0
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        try:
            if self._stream is None:
                self._stream = open_stream(self.url)
            data = self._stream.read(len(view))
        except Exception as error:  # of the HTTP library's many kinds
            raise lost(self.url, error) from error
        view[: len(data)] = data
        self.size += len(data)
        return len(data)

    def close(self) -> None:
        self._stream = None  # the connection goes with it
        super().close()


class ByteStream:
    """The decompressed bytes of one file, with a way to put back what was read ahead."""

    def __init__(self, path: str, compression: str | None) -> None:
        self.path = path
        self.compression = compression
        self.offset = 0
        """Of the next byte, in the decompressed stream."""
        self.line = 1
        """1-based line of the first byte that is not skipped."""
        self.is_on_hub = path.startswith(PREFIX)
        self.is_remote = is_url(path)
        self._raw = _raw(path)
        self._decoded = _decoder(self._raw, compression)
        self._copy: IO[bytes] | None = None
        self._ahead = b""

    def __enter__(self) -> ByteStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._decoded.close()
        self._raw.close()
        if self._copy is not None:
            self._copy.close()

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer only at the end.

        Raises InputError where a compressed file is broken or cut.
        """
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        while len(data) < size and (more := self._read_decoded(size - len(data))):
            data = data + more if data else more
        self.offset += len(data)
        return data

    def peek(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end, which stay to be read."""
        data = self.read(size)
        self._ahead = data + self._ahead
        self.offset -= len(data)
        return data

    def skip_mark(self) -> None:
        """Step over a UTF-8 byte-order mark; raises InputError for UTF-16."""
        head = self.peek(3)
        if head == BYTE_ORDER_MARK:
            self.read(3)
        elif head.startswith(UTF16_MARKS):
            raise InputError(
                f"{self.path} begins with a UTF-16 byte-order mark, padless reads UTF-8; "
                "convert it (iconv -f UTF-16 -t UTF-8)"
            )

    def skip_blank(self) -> None:
        """Step to the first byte that is no white space, counting lines."""
        while data := self.peek(READ_BYTES):
            found = NON_BLANK.search(data)
            blank = self.read(found.start() if found else len(data))
            self.line += blank.count(b"\n")
            if found:
                return

    def lines(self) -> Iterator[bytes]:
        """Line by line, each with its newline; the last one as it is."""
        rest = b""
        # Reads grow with an unfinished line, so that a very long line is not copied per block.
        while data := self.read(max(LINES_BYTES, len(rest))):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line + b"\n"
        if rest:
            yield rest

    @property
    def hands_over(self) -> bool:
        """Whether a piece takes its bytes along, since a worker could not read the range itself."""
        return bool(self.compression) or self.is_remote

    def keep(self, data: bytes) -> bytes | None:
        """The payload of a piece: the data where it is handed over."""
        return data if self.hands_over else None

    def seekable_path(self) -> str:
        """A path of the whole file for who reads anywhere in it; all behind a URL comes first.

        Raises as reading does, and DiskFullError.
        """
        if not self.is_remote:
            return self.path
        if self._copy is None:
            self._copy = keep_nameless(self.read, self.path)
        return f"/dev/fd/{self._copy.fileno()}"

    def finish(self) -> tuple[int, str]:
        """Read what is left; returns the raw file's bytes and checksum, which the Hub knows beforehand."""
        assert not isinstance(self._raw, RemoteFile)
        while self._raw.read(READ_BYTES):
            pass
        return self._raw.size, f"xxh3:{self._raw.hash.hexdigest()}"

    def check_size(self, size: int) -> None:
        """See that a file from the Hub, read to its end, had as many bytes as the Hub lists.

        Raises SourceLostError; a connection that ends early can look like the end of the file.
        """
        while self._raw.read(READ_BYTES):
            pass
        if self._raw.size != size:
            raise lost(self.path, OSError(f"{self._raw.size:,} of {size:,} bytes"))

    def error_at(self, offset: int, message: str) -> InputError:
        """An error that names the file with the line and column (characters) of a byte."""
        line, column = 1, 1
        with ByteStream(self.path, self.compression) as again:
            again.skip_mark()
            while data := again.read(min(READ_BYTES, offset - again.offset)):
                newlines = data.count(b"\n")
                line += newlines
                tail = data[data.rfind(b"\n") + 1 :]
                characters = len(tail.translate(None, CONTINUATION_BYTES))
                column = characters + (1 if newlines else column)
        return InputError(f"{self.path}, line {line:,}, column {column:,}: {message}")

    def _read_decoded(self, size: int) -> bytes:
        if not self.compression:
            return self._raw.read(size) or b""
        import lzma
        import zlib

        try:
            return self._decoded.read(size)
        except (SourceLostError, InputError):
            raise
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise InputError(
                f"{self.path} cannot be decompressed ({self.compression}: {error}): it is broken, "
                "cut short or not of that kind; fetch it again, or decompress it yourself"
            ) from error


def cut_blocks(
    stream: ByteStream, chunk_bytes: int, last_boundary: Callable[[bytearray], int]
) -> Iterator[Piece]:
    """Pieces of about `chunk_bytes`, cut where `last_boundary(block)` says.

    The function gives the last place in the block at which a record may begin, 0 where there is
    none: the block then doubles. Pieces of white space are left out.
    """
    start, line, block = stream.offset, stream.line, bytearray()
    ended = False
    while not ended:
        size = max(chunk_bytes, len(block))
        data = stream.read(size)
        ended = len(data) < size
        block += data  # in place: a long record is held once
        del data
        cut = len(block) if ended else last_boundary(block)
        blank = not NON_BLANK.search(block, 0, cut)
        payload = bytes(block[:cut]) if stream.hands_over and not blank else None
        newlines = block.count(b"\n", 0, cut)
        del block[:cut]
        if not blank:
            yield Piece(start=start, stop=start + cut, line=line, payload=payload)
        line += newlines
        start += cut


def _raw(path: str) -> HashedFile | RemoteFile | UrlFile:
    if path.startswith(PREFIX):
        return RemoteFile(path)
    return UrlFile(path) if is_url(path) else HashedFile(path)


def _decoder(raw: HashedFile | RemoteFile | UrlFile, compression: str | None) -> BinaryIO:
    decoded: Any = raw
    if compression == "gzip":
        import gzip

        decoded = gzip.GzipFile(fileobj=io.BufferedReader(raw, READ_BYTES), mode="rb")
    elif compression == "bz2":
        import bz2

        decoded = bz2.BZ2File(raw)
    elif compression == "xz":
        import lzma

        decoded = lzma.LZMAFile(cast(BinaryIO, raw))
    elif compression == "zstd":
        import pyarrow as pa

        decoded = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
    return cast(BinaryIO, decoded)
