"""Complete files by their checksum in a folder of limited size, shared by all processes of a machine.

A file is written under another name, compared with its checksum and renamed into place: what lies under
its own name is whole, whenever a process died. One process fetches a file while others that want it wait,
by a lock that dies with its holder. Where the limit is passed, the files used longest ago are removed, and
nothing that was not put here. One that is open or mapped lives on until it is closed, so a little more than
the limit may be on the disk; hence whoever wants a file says how it is opened, and gets it open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from padless.runtime.errors import ChecksumError, TruncatedFileError

T = TypeVar("T")
_TRIES = 3
_NAME = re.compile(r"xxh3-[0-9a-f]{32}(\.part)?")
_FORGOTTEN = 24 * 3600
"""Seconds after which nobody is writing a part any more."""


class FileCache:
    """Files of at most `limit` bytes in all, in a folder that is made where it is missing."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def open(
        self,
        name: str,
        size: int,
        checksum: str,
        fetch: Callable[[], Iterable[bytes]],
        opened: Callable[[Path], T],
    ) -> T:
        """What `opened` makes of the file of that size and checksum, which need not be there afterwards.

        It is given the file as it lies here, or out of the pieces that `fetch` gives. `name` is for
        messages. Damage on the way is tried three times. Raises TruncatedFileError or ChecksumError
        where it comes each time, and whatever `fetch` and `opened` raise.
        """
        path = self.folder / checksum.replace(":", "-")
        with contextlib.suppress(FileNotFoundError):  # never fetched, or removed by others just now
            return _open_whole(path, size, opened)
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                return _open_whole(path, size, opened)
            part = path.with_suffix(".part")
            try:
                for left in reversed(range(_TRIES)):
                    try:
                        _write(part, name, size, checksum, fetch())
                        break
                    except (TruncatedFileError, ChecksumError):
                        if not left:
                            raise
                found = opened(part)  # under this name nobody removes it
                self._make_room(size)
                part.rename(path)
                return found
            finally:
                part.unlink(missing_ok=True)

    def has(self, size: int, checksum: str) -> bool:
        """Whether the file of that size and checksum lies here."""
        path = self.folder / checksum.replace(":", "-")
        return path.exists() and path.stat().st_size == size

    def _make_room(self, size: int) -> None:
        """Remove the files used longest ago, until another of `size` bytes fits."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                name = _NAME.fullmatch(path.name)
                if name is None:
                    continue
                found = path.stat()
                if not name[1]:
                    files.append((found.st_mtime_ns, found.st_size, path))
                elif time.time() - found.st_mtime > _FORGOTTEN:
                    path.unlink()
        total = size + sum(each for _, each, _ in files)
        for _, each, path in sorted(files):
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= each


def _open_whole(path: Path, size: int, opened: Callable[[Path], T]) -> T:
    """Open a complete file, which then counts as used just now; raises FileNotFoundError for any other."""
    if path.stat().st_size != size:
        raise FileNotFoundError(path)
    os.utime(path)
    return opened(path)


def _write(part: Path, name: str, size: int, checksum: str, pieces: Iterable[bytes]) -> None:
    """Write the pieces, synced; raises TruncatedFileError or ChecksumError where they are not the file."""
    import xxhash

    digest, written = xxhash.xxh3_128(), 0
    with part.open("wb") as out:
        for piece in pieces:
            written += len(piece)
            digest.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    way_out = "copy the folder there again, or rebuild it with pack-dataset build --force"
    if written != size:
        raise TruncatedFileError(f"{name} has {written} bytes, the manifest says {size}; {way_out}")
    if (found := f"xxh3:{digest.hexdigest()}") != checksum:
        raise ChecksumError(f"{name} is {found}, the manifest says {checksum}; {way_out}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for everybody else who holds the lock of that name, in this process or another.

    The holder removes the lock's file, so one who waited has to see that what it holds is still that file.
    """
    while True:
        with path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if not _is_file(path, file.fileno()):
                    continue
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
            finally:
                # By name: a process forked meanwhile has the file open, and would hold the lock.
                fcntl.flock(file, fcntl.LOCK_UN)


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
