"""Files that are whole or not there: written under a temporary name, hashed on the way, fsynced, renamed.

Large ones can go past the page cache (O_DIRECT) out of a few aligned blocks: they have to reach the disk
before they count anyway, and a block is hashed and written by a thread while the next one is filled. The
price is that whoever reads one next reads it from the disk. File systems without it are written as usual.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from padless.packer.errors import disk_full
from padless.runtime.format import BlockHasher, FileInfo

BLOCK = 4 * 2**20
"""Bytes that go past the page cache at a time."""
BLOCKS = 3
"""One that is filled, one that is written, one for when the disk takes longer."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class WriteOnly:
    """What Arrow asks of a file beside `write`, `tell` and `closed`."""

    def flush(self) -> None:
        """Nothing: who finishes the file sees to everything."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing likewise."""


class DurableFile(WriteOnly):
    """A file under a temporary name: hashed as it is written, then fsynced and renamed, or removed."""

    def __init__(self, folder: str, name: str, *, direct: bool = False, blocks: bool = False) -> None:
        """`direct`: past the page cache, where the file system can. `blocks`: they have checksums too."""
        self.folder = folder
        self.path = os.path.join(folder, f".{name}.tmp")
        self.size = 0
        self.closed = False
        self._hasher = BlockHasher(blocks=blocks)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._blocks: list[memoryview] = []
        self._filled = 0
        self._under_way: deque[Future[None]] = deque()
        if direct and _DIRECT:
            try:
                self._descriptor = os.open(self.path, flags | _DIRECT, 0o666)
                self._blocks = _blocks()
                self._thread = ThreadPoolExecutor(1)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        self._descriptor = os.open(self.path, flags, 0o666)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._blocks:
            self._thread.shutdown(cancel_futures=True)
            if _recycling:
                _spare.append(self._blocks)
            self._blocks = []
        if not self.closed:
            os.close(self._descriptor)
            self.closed = True
        if os.path.exists(self.path):
            os.remove(self.path)

    def write(self, data: Any) -> int:
        """Append; DiskFullError where there is no room."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        if not self._blocks:
            self._emit(view)
            return len(view)
        rest = view
        while len(rest):
            piece = rest[: BLOCK - self._filled]
            # numpy copies without the interpreter's lock.
            room = np.frombuffer(self._blocks[0], dtype=np.uint8, count=len(piece), offset=self._filled)
            np.copyto(room, np.frombuffer(piece, dtype=np.uint8))
            self._filled += len(piece)
            rest = rest[len(piece) :]
            if self._filled == BLOCK:
                self._send_block()
        return len(view)

    def _send_block(self) -> None:
        """Have what is filled written, and go on with a block that is free, once there is one."""
        block = self._blocks.pop(0)
        self._under_way.append(self._thread.submit(self._emit, block[: self._filled]))
        self._blocks.append(block)
        self._filled = 0
        if len(self._under_way) == BLOCKS:
            self._under_way.popleft().result()

    def _emit(self, view: memoryview) -> None:
        self._hasher.update(view)
        beyond = len(view) % mmap.PAGESIZE if self._blocks else 0
        self._put(view[: len(view) - beyond])
        if beyond:  # what fills no page ends the file and goes through the page cache
            self._use_cache()
            self._put(view[len(view) - beyond :])

    def _put(self, view: memoryview) -> None:
        rest = view
        try:
            while len(rest):
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._use_cache():
                        raise
                if 0 < len(rest) < len(view):  # no longer at a page's edge
                    self._use_cache()
        except OSError as error:
            raise disk_full(error, self.path, len(rest)) from error

    def _use_cache(self) -> bool:
        """Write as usual from here on; False where that was so before."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        if not flags & _DIRECT:
            return False
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return True

    def tell(self) -> int:
        return self.size

    @property
    def block_checksums(self) -> str:
        """Those of the committed file's blocks, which were asked for, as a manifest has them of a shard."""
        return self._hasher.block_checksums

    def commit(self, name: Callable[[str], str]) -> FileInfo:
        """Put the complete file in its place, under the name that its checksum gives."""
        if self._filled:
            self._send_block()
        while self._under_way:
            self._under_way.popleft().result()
        checksum = self._hasher.checksum
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_full(error, self.path, self.size) from error
        os.close(self._descriptor)
        self.closed = True
        final = name(checksum)
        os.replace(self.path, os.path.join(self.folder, final))
        return FileInfo(file=final, bytes=self.size, checksum=checksum)


_spare: list[list[memoryview]] = []
_recycling: set[object] = set()


@contextmanager
def recycled_blocks() -> Iterator[None]:
    """Meanwhile files that are done leave their blocks to those to come; none are left in the end.

    Fresh memory would have to be cleared first, which takes as long as to fill it.
    """
    mine = object()
    _recycling.add(mine)
    try:
        yield
    finally:
        _recycling.remove(mine)
        if not _recycling:
            _spare.clear()


def prepare_blocks(files: int) -> None:
    """Have blocks for so many files that are written at once, where a core has nothing else to do.

    They are there until the next `recycled_blocks` ends.
    """
    made = [_fresh_blocks() for _ in range(files)]
    for blocks in made:
        for block in blocks:
            np.frombuffer(block, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    _spare.extend(made)


def _blocks() -> list[memoryview]:
    try:
        return _spare.pop()
    except IndexError:
        return _fresh_blocks()


def _fresh_blocks() -> list[memoryview]:
    """Blocks that begin at a page, as they have to, in large pages where there are: each costs a fault."""
    memory = mmap.mmap(-1, BLOCKS * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return [view[start : start + BLOCK] for start in range(0, len(view), BLOCK)]


def write_bytes(folder: str, name: str, data: bytes) -> FileInfo:
    """Write a small file whole."""
    with DurableFile(folder, name.replace("/", "-")) as file:
        file.write(data)
        return file.commit(lambda checksum: name)


def sync_folder(folder: str) -> None:
    """Make renames in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
