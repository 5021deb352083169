"""What `pack` keeps from call to call: entries by the name of their content, in a cache of limited size.

packs/NAME (folders), records/NAME and tokenizers/NAME; whatever was used longest ago goes first when they
grow past the limit. An entry that a process has asked for stays as long as that process lives: shards are
opened when a pack of theirs is first wanted, so nothing may be taken from under a training run. Processes
hold entries by shared locks that die with them (locks/, empty files), and who removes one holds it alone.
The price is that a process that packs much may pass the limit with what it uses itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from padless.packer.errors import InputError
from padless.runtime.format import MANIFEST, PadlessError, check_file, read_manifest

LIMIT = "PADLESS_PACKS_BYTES"
"""The environment variable with the limit, for all entries together."""
DEFAULT_BYTES = 64 << 30
KINDS = ("packs", "records", "tokenizers")
_GONE = ".gone"
_held: dict[str, int] = {}
"""The locks of this process, by their files' paths: a second one of its own would be another's to flock."""


def limit_bytes() -> int:
    """The limit that the environment sets; InputError where it is no number."""
    asked = os.environ.get(LIMIT, str(DEFAULT_BYTES))
    if not asked.isdecimal():
        raise InputError(f"{LIMIT} is {asked!r}; set it to a whole number of bytes")
    return int(asked)


class KeptPacks:
    """The entries of one cache folder."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def hold(self, kind: str, name: str) -> Path:
        """The entry's path, whether there is one or not; it counts as used now, and stays."""
        path = self.folder / kind / name
        lock = str(self._lock(path))
        if lock not in _held:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _held[lock] = descriptor
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return path

    def heal(self, path: Path) -> None:
        """Take away a folder of packs that has its manifest, and not the files that it lists."""
        if not is_damaged(path):
            return
        with _alone(f"{self._lock(path)}.heal"):
            if is_damaged(path):  # still: another process may have been here
                self._remove(path)

    def make_room(self) -> None:
        """Remove what was used longest ago and nobody holds, until the rest is within the limit."""
        found = []
        for kind in KINDS:
            for path in (self.folder / kind).glob("*"):
                if path.name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime_ns, path))
        sizes = {path: _size(path) for _, path in found}
        total = sum(sizes.values())
        for _, path in sorted(found):
            if total <= self.limit:
                break
            if str(self._lock(path)) in _held:
                continue
            with _alone(str(self._lock(path)), wait=False) as mine:
                if mine:
                    self._remove(path)
                    total -= sizes[path]

    def _lock(self, path: Path) -> Path:
        lock = self.folder / "locks" / f"{path.parent.name}-{path.name}"
        lock.parent.mkdir(parents=True, exist_ok=True)
        return lock

    def _remove(self, path: Path) -> None:
        """Away from its name at once, so that nobody finds half of it."""
        gone = path.with_name(f".{path.name}{_GONE}")
        shutil.rmtree(gone, ignore_errors=True)  # of a process that was killed here
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
            else:
                path.unlink()


def is_damaged(path: Path) -> bool:
    """Whether a folder says that it is done and is not: no readable manifest, files missing or cut.

    Sizes alone are compared, so that opening stays instant; changed bytes are the reader's to find.
    """
    if not (path / MANIFEST).exists():
        return False
    try:
        for file in read_manifest(path).files:
            check_file(path / file.file, file.bytes)
    except PadlessError:
        return True
    return not all((path / name).exists() for name in ("dataset_info.json", "state.json"))


def _size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder; those that go meanwhile are none."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_size
    return total


@contextlib.contextmanager
def _alone(lock: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock that nobody else holds; False where somebody does and this is not to wait for."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
