"""Shards that an interrupted run finished, so that the next one need not write them again.

A shard enters the journal in the work folder when it has its name, under a key that says all that decides
its bytes: the chunks' own key, the plan, the layout. The next run takes it over where its file still has the
size and the checksum of its entry: reading a shard costs a small part of gathering and writing it. Everything
else that lies in the output without a manifest is swept away, as before.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from padless.packer.errors import disk_full
from padless.runtime.format import FormatError, ShardInfo, check_file

JOURNAL = "shards.jsonl"


class KeptShards:
    """The journal of one build; may be shared by threads. `key` names all that decides the shards' bytes."""

    def __init__(self, work: str, output: str, key: str) -> None:
        self._path = os.path.join(work, JOURNAL)
        self._output, self._key = output, key
        self._lock = Lock()
        self._whole: set[tuple[str, int]] = set()
        """Those whose checksum has been seen to hold."""
        self._found = self._take_up()
        """(split, number of the shard) -> what is known of it; only of files that are there."""

    def _take_up(self) -> dict[tuple[str, int], ShardInfo]:
        found: dict[tuple[str, int], ShardInfo] = {}
        try:
            with open(self._path, "r+b") as file:
                whole, _, torn = file.read().rpartition(b"\n")
                if torn:  # or the next line would be torn with it
                    file.truncate(len(whole) + 1 if whole else 0)
            for line in whole.splitlines():
                row: dict[str, Any] = json.loads(line)
                if row["key"] != self._key:
                    continue
                told = row["shard"]
                batches = tuple((int(at), int(packs)) for at, packs in told["batches"])
                # Without, an earlier padless wrote it, and the manifest would not be a fresh build's.
                blocks = told["block_checksums"]
                info = ShardInfo(**{**told, "batches": batches, "block_checksums": blocks})
                if os.path.exists(os.path.join(self._output, row["split"], info.file)):
                    found[row["split"], row["number"]] = info
        except (OSError, ValueError, KeyError, TypeError):  # nothing there, or nothing of ours
            return {}
        return found

    @property
    def files(self) -> set[str]:
        """The shards that are there, as paths below the output."""
        return {f"{split}/{info.file}" if split else info.file for (split, _), info in self._found.items()}

    @property
    def bytes(self) -> int:
        """What the shards take."""
        return sum(info.bytes for info in self._found.values())

    def find(self, split: str, number: int) -> ShardInfo | None:
        """A finished shard whose file is whole, or None."""
        info = self._found.get((split, number))
        if info is None or (split, number) in self._whole:
            return info
        path = Path(self._output, split, info.file)
        try:
            check_file(path, info.bytes, info.checksum)
        except (FormatError, OSError):  # it is written anew
            with self._lock:
                del self._found[split, number]
            path.unlink(missing_ok=True)
            return None
        self._whole.add((split, number))
        return info

    def add(self, split: str, number: int, info: ShardInfo) -> None:
        """Enter a shard that has just got its name."""
        line = json.dumps({"key": self._key, "split": split, "number": number, "shard": asdict(info)}) + "\n"
        with self._lock:
            self._found[split, number] = info
            try:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                raise disk_full(error, self._path, len(line)) from error

    def drop(self) -> None:
        """Remove the shards, whose build will not go on."""
        with self._lock:
            for file in self.files:
                path = os.path.join(self._output, file)
                if os.path.exists(path):
                    os.remove(path)
            self._found.clear()
