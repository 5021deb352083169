"""Columns of a record batch whose values are made while Arrow writes them.

Without compression Arrow hands a file one buffer of a batch after the other and looks into none. So tokens
need not be in memory: their column is laid over reserved addresses with nothing behind them, and when its
turn comes its values are made, a slice that fits a core's own cache at a time, and go straight into the file.
The price is that nobody else may look into such a batch.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.durable import DurableFile, WriteOnly

Slices = Callable[[], Iterator[NDArray[Any]]]
"""A column's values, one part after the other."""


class LateFile(WriteOnly):
    """A file for Arrow's stream writer, to which some columns are given only when they are written."""

    def __init__(self, file: DurableFile) -> None:
        self._file = file
        self._late: dict[int, tuple[int, Slices]] = {}
        """address -> bytes, and what makes them."""
        self.closed = False

    def column(self, shape: tuple[int, ...], dtype: np.dtype[Any], slices: Slices) -> NDArray[Any]:
        """An array to make a column of; its values are those of `slices` when it is written."""
        count = int(np.prod(shape))
        reserved = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found = np.frombuffer(reserved, dtype=dtype, count=count).reshape(shape)
        self._late[found.__array_interface__["data"][0]] = (found.nbytes, slices)
        return found

    def write(self, data: Any) -> int:
        """Append a buffer, or what stands for it."""
        size, slices = self._late.pop(getattr(data, "address", 0), (0, None))
        if slices is None:
            return self._file.write(data)
        begin = self._file.size
        for values in slices():
            self._file.write(values)
        if not size == self._file.size - begin == len(data):
            raise RuntimeError(
                f"a column of {size} bytes got {self._file.size - begin}, and {len(data)} lie there"
            )
        return size

    def check(self) -> None:
        """See that every column was written; RuntimeError where Arrow took the reserved memory for values."""
        if self._late:
            raise RuntimeError(f"{len(self._late)} columns were not written from their buffers")

    def tell(self) -> int:
        return self._file.size
