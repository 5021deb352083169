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

Checksum = Future[str | None]
"""As a manifest has it; None of what could not be read."""

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
    """A file's checksum, once it is known; None where nobody began with it, or it could not be read."""
    begun = _begun.pop(os.path.realpath(path), None)
    return None if begun is None else begun.result()


def _shards(folder: str) -> list[str]:
    """The shards of a folder, or of its splits; none of what is no packed folder."""
    import json

    try:
        with open(os.path.join(folder, "manifest.json"), "rb") as file:
            manifest = json.load(file)
        if manifest["kind"] == "splits":
            inside = [_shards(os.path.join(folder, split["name"])) for split in manifest["splits"]]
            return [path for paths in inside for path in paths]
        return [os.path.realpath(os.path.join(folder, shard["file"])) for shard in manifest["shards"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _work(queue: Iterator[tuple[str, Checksum]]) -> None:
    import mmap

    import xxhash

    for path, begun in queue:
        checksum = None
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                digest = xxhash.xxh3_128()
                digest.update(data)  # in one call, which need not wait for its turn among the threads
                checksum = f"xxh3:{digest.hexdigest()}"
        except (OSError, ValueError):  # whoever opens it next says what is wrong
            pass
        begun.set_result(checksum)
