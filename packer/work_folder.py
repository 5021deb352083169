"""`DIR/.work`: what a build keeps for the next try, and the lock that lets only one build write there."""

from __future__ import annotations

import fcntl
import os
import shutil
import time

from padless.packer.errors import BusyError
from padless.runtime.format import WORK_FOLDER

WORK_FILES = (
    "lock",
    "tokens.bin",
    "weights.bin",
    "lines.bin",
    "buckets.bin",
    "buckets-weights.bin",
    "journal.jsonl",
    "splits.json",
    "shards.jsonl",
    "ray",
)
"""All that `DIR/.work` ever holds."""
DYING = 10.0
"""Seconds that the workers of a killed build may take to notice, before its folder counts as busy."""


class WorkFolder:
    """`DIR/.work`: locked while a build uses it, kept when one is stopped, removed when one is done."""

    def __init__(self, output: str) -> None:
        self.path = os.path.join(output, WORK_FOLDER)
        patience = time.monotonic() + DYING
        while (lock := self._try_lock()) is None:
            # Forked workers hold the lock with their parent, so that nobody writes while one is left.
            if not self._is_orphaned() or time.monotonic() > patience:
                raise BusyError(
                    f"another build is writing into {output}; wait for it, or give another --output"
                )
            time.sleep(0.02)
        self._lock = lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode("ascii"), 0)

    def _try_lock(self) -> int | None:
        """The locked file's descriptor, or None while others hold it."""
        os.makedirs(self.path, exist_ok=True)
        path = os.path.join(self.path, "lock")
        found = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(found), os.stat(path)):
                return found
        except (BlockingIOError, FileNotFoundError):  # held, or removed by who held it
            pass
        os.close(found)
        return None

    def _is_orphaned(self) -> bool:
        """Whether the build that took the lock is no more, so that what holds it will go too."""
        try:
            with open(os.path.join(self.path, "lock"), encoding="ascii") as file:
                os.kill(int(file.read()), 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        except (ValueError, PermissionError):  # about to be written, or somebody else's
            return False
        return False

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def release(self) -> None:
        """Leave what is there for the next run."""
        os.close(self._lock)


def wait_for_build(output: str) -> None:
    """Come back when nobody builds there any more, or once who does has let go of the lock."""
    try:
        lock = os.open(os.path.join(output, WORK_FOLDER, "lock"), os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):  # it is done
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)
