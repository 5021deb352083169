"""Document boundaries as lines of `start,end` in a gzip file, written as fast as the tokens beside them.

Short sequences have so many of them that a general CSV writer and zlib took a quarter of an export. Ends go
up, so the numbers of many lines have as many digits: these are a matrix of bytes, filled four digits at a
time from a table. The gzip file is stored, not squeezed (RFC 1951, 3.2.4; RFC 1952): squeezing takes as long
as all the tokens, to save 3 % of their bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

_LINES = 2**13
"""Lines of a chunk at most: what fits a core's own cache."""
_STORED = 2**16 - 1
"""Bytes of a stored block at most."""
_MOST_DIGITS = 19


def boundary_lines(ends: NDArray[np.int64]) -> Iterator[bytes]:
    """`start,end` and a line feed for each document; `ends` go up, and are where the next one begins."""
    start = at = 0
    # ends[: first_wider[d]] have at most d + 1 digits.
    first_wider = np.searchsorted(ends, 10 ** np.arange(1, _MOST_DIGITS, dtype=np.int64)).tolist()
    for digits, stop in enumerate([*first_wider, len(ends)], 1):
        while at < stop:
            some = ends[at : min(at + _LINES, stop)]
            yield b"%d,%d\n" % (start, some[0])  # the one before may have fewer digits
            texts = _texts(some, digits)
            lines = np.empty((len(some) - 1, 2 * digits + 2), dtype=np.uint8)
            lines[:, :digits], lines[:, digits] = texts[:-1], ord(",")
            lines[:, digits + 1 : -1], lines[:, -1] = texts[1:], ord("\n")
            yield lines.tobytes()
            at, start = at + len(some), int(some[-1])


def _texts(numbers: NDArray[np.int64], digits: int) -> NDArray[np.uint8]:
    """[n] numbers of so many digits -> [n, digits] ASCII."""
    groups = -(-digits // 4)
    found = np.empty((len(numbers), groups), dtype=np.uint32)
    for group in range(groups - 1, 0, -1):
        above = numbers // 10_000
        found[:, group] = _four_digits()[numbers - above * 10_000]
        numbers = above
    found[:, 0] = _four_digits()[numbers]
    return found.view(np.uint8)[:, -digits:]


@cache
def _four_digits() -> NDArray[np.uint32]:
    """0000 to 9999 as ASCII, the four bytes of each as one number in memory."""
    table = np.array([list(b"%04d" % number) for number in range(10_000)], dtype=np.uint8)
    return table.view(np.uint32).reshape(-1)


def stored_gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A gzip file whose content is the pieces, uncompressed; the same bytes on any day and any system."""
    crc = size = 0
    yield b"\x1f\x8b\x08" + bytes(6) + b"\xff"  # deflate; no name, no time, unknown system
    for piece in pieces:
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        for at in range(0, len(piece), _STORED):
            block = piece[at : at + _STORED]
            yield struct.pack("<BHH", 0, len(block), len(block) ^ 0xFFFF) + block
    yield struct.pack("<BHHII", 1, 0, 0xFFFF, crc, size & 0xFFFFFFFF)
