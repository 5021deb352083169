"""Checksums of packed folders' files, worked out while the rest of padless is still being imported.

A repack compares every byte of its input with the manifest, which takes a hash and nothing else, and the
start of a process keeps one core busy and leaves the others idle. So `main` begins here, and this module
imports next to nothing. The price is work for nothing where the command turns out to be refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

Identity = tuple[int, int, int, int, int]
"""What a file that was changed or exchanged differs in: device, number, size, times of content and inode."""
Checksum = Future[tuple[str, Identity] | None]
"""As a manifest has it, and the file that was read; None of what could not be read."""

_begun: dict[str, Checksum] = {}
"""By the real path of the file."""


def start(arguments: Sequence[str]) -> None:
    """Begin with the shards of the folders among a repack's arguments, on cores that are free."""
    free = len(os.sched_getaffinity(0)) - 1
    if free < 1 or any(argument.startswith("--plan-only") for argument in arguments):
        return
    waiting: list[tuple[str, Checksum]] = []
    for before, folder in zip(("", *arguments), arguments, strict=False):
        if not before.startswith("-") and not folder.startswith(
            "-"
        ):  # what follows an option may be its value
            waiting += [(path, Future()) for path in _shards(folder)]
    _begun.update(waiting)
    queue = iter(waiting)
    for _ in range(min(free, len(waiting))):
        threading.Thread(target=_work, args=(queue,)).start()


def take(path: str | os.PathLike[str]) -> str | None:
    """A file's checksum, once it is known.

    None where nobody began with it, it could not be read, or it is no longer the file that was read.
    """
    begun = _begun.pop(os.path.realpath(path), None)
    if begun is None or (found := begun.result()) is None:
        return None
    checksum, read = found
    try:
        return checksum if _identity(os.stat(path)) == read else None
    except OSError:
        return None


def _shards(folder: str, *, is_split: bool = False) -> list[str]:
    """The shards of a folder, or of its splits; none of what is no packed folder."""
    import json

    try:
        with open(os.path.join(folder, "manifest.json"), "rb") as file:
            manifest = json.load(file)
        if manifest["kind"] == "splits" and not is_split:
            names = [split["name"] for split in manifest["splits"]]
            return [path for name in names for path in _shards(os.path.join(folder, name), is_split=True)]
        return [os.path.realpath(os.path.join(folder, shard["file"])) for shard in manifest["shards"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _identity(read: os.stat_result) -> Identity:
    return read.st_dev, read.st_ino, read.st_size, read.st_mtime_ns, read.st_ctime_ns


def _work(queue: Iterator[tuple[str, Checksum]]) -> None:
    import mmap

    import xxhash

    for path, begun in queue:
        found = None
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                read = _identity(os.fstat(file.fileno()))
                digest = xxhash.xxh3_128()
                digest.update(data)  # in one call, which need not wait for its turn among the threads
                found = f"xxh3:{digest.hexdigest()}", read
        except (OSError, ValueError):  # whoever opens it next says what is wrong
            pass
        begun.set_result(found)
