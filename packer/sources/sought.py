"""A file of records read from anywhere: the records that begin in a range of its bytes.

Lines end in newlines; a text's records begin where its lines say so. The elements of a JSON array stand
between separators that hold a key, which no string can contain; where the first mebibyte of an array has no
such separator of its own, the file cannot be sought and has to be read from its start.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

from padless.packer.sources.chunks import Chunk, SourceFile
from padless.packer.sources.json_array import element_separator
from padless.packer.sources.json_text import sniff
from padless.packer.sources.stream import ByteStream
from padless.packer.sources.text import begins_record
from padless.packer.sources.walk import read_chunk

_FARTHEST = 16 * 2**20
"""Bytes behind a block in which a JSON array must have a boundary."""


class UnseekableError(Exception):
    """The source has to be read from its start."""


class SoughtFile:
    """A plain file of JSON or text, not compressed; a context manager.

    Raises UnseekableError, and what reading the file's beginning raises.
    """

    def __init__(self, file: SourceFile, text_by: str) -> None:
        self._path, self._text_by = file.path, text_by
        with ByteStream(file.path, None) as stream:
            stream.skip_mark()
            self._reader = sniff(stream) if file.kind == "json" else "text"
            self._start = stream.offset
            if self._reader == "json_array":
                # An object over several lines has no elements.
                self._separator = element_separator(stream) if stream.peek(1) == b"[" else b""
        if self._reader == "json_array" and not self._separator:
            raise UnseekableError
        with open(file.path, "rb") as opened:
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._stop = len(self._bytes)
        if self._reader == "json_array":
            self._stop = self._bytes.rfind(b"]")
            if self._stop < 0 or self._bytes[self._stop + 1 :].strip():
                raise UnseekableError

    def __enter__(self) -> SoughtFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.close()

    def records(self, begin: int, end: int) -> list[Any]:
        """The records that begin from byte `begin` on and before `end`."""
        start, stop = self._boundary(begin), self._boundary(end)
        if self._reader == "json_array":
            start += 1  # behind the bracket or comma
        data = self._bytes[start:stop]
        if not data.strip():
            return []
        args = (self._text_by,) if self._reader == "text" else ()
        chunk = Chunk(index=0, source=0, reader=self._reader, path=self._path, payload=data, args=args)
        return read_chunk(chunk).rows

    def _boundary(self, at: int) -> int:
        """The first place from `at` on where a record begins (in an array: the comma before it)."""
        if at <= self._start or at >= self._stop:
            return self._start if at <= self._start else self._stop
        if self._reader == "json_array":
            return self._comma(at)
        return next((place for place in self._lines(at) if place >= at), self._stop)

    def _comma(self, at: int) -> int:
        ahead = self._separator.index(b",")
        found = self._bytes.find(self._separator, max(0, at - ahead), at + _FARTHEST)
        if 0 <= found < self._stop - ahead:
            return found + ahead
        if self._stop - at > _FARTHEST:
            raise UnseekableError
        return self._stop

    def _lines(self, at: int) -> Iterator[int]:
        """Beginnings of lines that begin a record."""
        begins = begins_record(self._text_by) if self._reader == "text" else None
        place = self._bytes.find(b"\n", at - 1) + 1
        while 0 < place < self._stop:
            end = self._bytes.find(b"\n", place)
            line = self._bytes[place : end if end >= 0 else self._stop] if begins else b""
            if begins is None or begins(line.removesuffix(b"\r").decode(errors="replace")):
                yield place
            place = end + 1
