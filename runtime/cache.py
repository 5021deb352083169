"""Complete files by their checksum in a folder of limited size, shared by all processes of a machine.

A file is written under another name, compared with its checksum and renamed into place: what lies under
its own name is whole, whenever a process died. One process fetches a file while others that want it wait,
by a lock that dies with its holder. Where the limit is passed, the files used longest ago are removed; one
that is mapped lives on until it is closed, so a little more than the limit may be on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from padless.runtime.errors import ChecksumError, TruncatedFileError

_TRIES = 3


class FileCache:
    """Files of at most `limit` bytes in all, in a folder that is made where it is missing."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def get(self, name: str, size: int, checksum: str, fetch: Callable[[], Iterable[bytes]]) -> Path:
        """The file of that size and checksum: as it lies here, or out of the pieces that `fetch` gives.

        `name` is for messages. Damage on the way is tried three times. Raises TruncatedFileError or
        ChecksumError where it comes each time, and whatever `fetch` raises.
        """
        path = self.folder / checksum.replace(":", "-")
        if self._is_here(path, size):
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if self._is_here(path, size):  # another process was faster
                return path
            part = path.with_suffix(".part")
            try:
                for left in reversed(range(_TRIES)):
                    try:
                        _write(part, name, size, checksum, fetch())
                        break
                    except (TruncatedFileError, ChecksumError):
                        if not left:
                            raise
                self._make_room(size)
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)
        return path

    def _is_here(self, path: Path, size: int) -> bool:
        """Whether a file is complete; it then counts as used just now."""
        try:
            if path.stat().st_size != size:
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Remove the files used longest ago, until another of `size` bytes fits."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if not path.suffix:
                    found = path.stat()
                    files.append((found.st_mtime_ns, found.st_size, path))
        total = size + sum(each for _, each, _ in files)
        for _, each, path in sorted(files):
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= each


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
    """Wait for everybody else who holds the lock of that name, in this process or another."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # By name: a process forked meanwhile has the file open, and would hold the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
