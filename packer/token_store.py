"""Finished chunks on disk: tokens and lines in two files, and a journal that says which chunks are whole.

Workers reserve a range of each file and write into it; the parent enters a chunk in the journal once its
worker reports it. A third file, mostly a hole, has the weights of tokens at the same places, where records
weigh their turns. What the journal does not name is not there, so a run that was stopped at any moment
goes on with the chunks that were finished, after their checksums are seen to hold.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from padless.packer.errors import disk_full
from padless.packer.lines import LINE, Problem

if TYPE_CHECKING:
    from padless.packer.chunk import ChunkResult

MOST_PROBLEMS = 20
"""Of one chunk: an entry has to fit into a pipe."""


class Entry(NamedTuple):
    """One finished chunk: where its tokens (int32) and lines lie, in entries, and how many."""

    chunk: int
    source: int
    records: int
    tokens_at: int
    tokens: int
    lines_at: int
    lines: int
    replaced: int
    size: int
    """Bytes of the source that it came from, for progress."""
    check: str
    weighted: int = 0
    """Bytes for each of its tokens in the file of weights, the same for all chunks that have any."""
    behind: int = 0
    """Entries behind its tokens that hold what is told of its images."""
    weighs: bool = False
    """Whether a weight is given for any of its tokens, where the file of weights has a teacher's say too."""
    problems: tuple[Problem, ...] = ()


class ChunkStore:
    """The chunks of one build, by number. `key` names all that decides their bytes.

    A store begins with cuts on trust; `clear` says when they have to be exact, and a later run sees it.
    """

    def __init__(self, folder: str, key: str) -> None:
        self.folder = folder
        self._key = key
        self.tokens_path = os.path.join(folder, "tokens.bin")
        self.weights_path = os.path.join(folder, "weights.bin")
        self.lines_path = os.path.join(folder, "lines.bin")
        self.entries: dict[int, Entry] = {}
        self._maps: list[mmap.mmap] = []
        self.exact_cuts = False
        """How the sources are cut: the numbers of the chunks mean nothing otherwise."""
        journal = os.path.join(folder, "journal.jsonl")
        if not self._take_up(journal, key):
            for path in (journal, self.tokens_path, self.weights_path, self.lines_path):
                if os.path.exists(path):
                    os.remove(path)
        flags = os.O_RDWR | os.O_CREAT
        self._tokens = os.open(self.tokens_path, flags, 0o666)
        self._weights = os.open(self.weights_path, flags, 0o666)
        self._lines = os.open(self.lines_path, flags, 0o666)
        self._journal = open(journal, "a", encoding="utf-8")
        if not self.entries:
            self._journal.truncate(0)
            self._enter(self._head())
        self.used = (
            max((e.tokens_at + e.tokens + e.behind for e in self.entries.values()), default=0),
            max((e.lines_at + e.lines for e in self.entries.values()), default=0),
        )
        # Behind the finished chunks is a hole again: chunks without weights write none there.
        os.ftruncate(self._weights, min(self.used[0] * self.weight_bytes, os.fstat(self._weights).st_size))

    def _take_up(self, journal: str, key: str) -> bool:
        """Enter the chunks of an earlier run of the same build; False where there are none."""
        try:
            with open(journal, "r+b") as file:
                whole, _, torn = file.read().rpartition(b"\n")
                if torn:  # or the next line would be torn with it
                    file.truncate(len(whole) + 1)
            rows = [json.loads(line) for line in whole.splitlines()]
            if not rows or rows[0].get("key") != key:
                return False
            self.exact_cuts = rows[0]["exact_cuts"]
            # Read chunk after chunk, not mapped: a large store would stay in memory when it has been seen.
            for entry in (Entry(**row) for row in rows[1:]):
                stored = entry.tokens + entry.behind
                mine = _read_at(self.tokens_path, np.dtype("<i4"), entry.tokens_at, stored)
                about = _read_at(self.lines_path, LINE, entry.lines_at, entry.lines)
                size, weighing = entry.weighted, None
                if size:
                    at, count = entry.tokens_at * size, entry.tokens * size
                    weighing = _read_at(self.weights_path, np.dtype(np.uint8), at, count)
                if entry.check == _check(mine, about, weighing):
                    self.entries[entry.chunk] = entry
        except (OSError, ValueError, KeyError):  # nothing there, or nothing of ours
            self.entries.clear()
        return bool(self.entries)

    def _head(self) -> dict[str, Any]:
        return {"key": self._key, "exact_cuts": self.exact_cuts}

    def _enter(self, row: dict[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        try:
            self._journal.write(line)
            self._journal.flush()
        except OSError as error:
            raise disk_full(error, self._journal.name, len(line)) from error

    def write(self, index: int, source: int, size: int, result: ChunkResult, ends: Reserved) -> Entry:
        """Write a chunk's arrays into ranges of their own; called in a worker."""
        values = result.values
        if result.images:
            padded = result.images.ljust(-(-len(result.images) // 4) * 4, b"\0")
            values = np.concatenate([values, np.frombuffer(padded, dtype=np.int32)])
        tokens_at, lines_at = ends.reserve(len(values), len(result.lines))
        _write_at(self._tokens, values, tokens_at, self.tokens_path)
        if result.weights is not None:
            _write_at(self._weights, result.weights, tokens_at, self.weights_path)
        _write_at(self._lines, result.lines, lines_at, self.lines_path)
        return Entry(
            chunk=index,
            source=source,
            records=result.records,
            tokens_at=tokens_at,
            tokens=len(result.values),
            lines_at=lines_at,
            lines=len(result.lines),
            replaced=result.replaced,
            size=size,
            check=_check(values, result.lines, result.weights),
            weighted=0 if result.weights is None else result.weights.itemsize,
            behind=len(values) - len(result.values),
            weighs=_weighs(result.weights),
            problems=tuple(result.problems[:MOST_PROBLEMS]),
        )

    def clear(self, *, exact_cuts: bool) -> None:
        """Forget every chunk; from now on the sources are cut so."""
        self.exact_cuts = exact_cuts
        self.entries.clear()
        self._journal.seek(0)
        self._journal.truncate(0)
        self._enter(self._head())
        os.ftruncate(self._weights, 0)
        self.used = (0, 0)

    def commit(self, entry: Entry) -> None:
        """Make a chunk part of the build; one with problems never is."""
        self.entries[entry.chunk] = entry
        if not entry.problems:
            row = entry._asdict()
            del row["problems"]
            self._enter(row)

    def cut_back(self) -> None:
        """Give back what lies behind the last finished chunk (after a full disk)."""
        tokens = max((e.tokens_at + e.tokens + e.behind for e in self.entries.values()), default=0)
        lines = max((e.lines_at + e.lines for e in self.entries.values()), default=0)
        os.ftruncate(self._tokens, tokens * 4)
        os.ftruncate(self._weights, min(tokens * self.weight_bytes, os.fstat(self._weights).st_size))
        os.ftruncate(self._lines, lines * LINE.itemsize)

    def lines_of(self, entry: Entry) -> NDArray[np.void]:
        """A chunk's lines, read into memory."""
        size = entry.lines * LINE.itemsize
        return np.frombuffer(os.pread(self._lines, size, entry.lines_at * LINE.itemsize), dtype=LINE)

    def map_tokens(self) -> mmap.mmap | None:
        """All tokens, mapped; None where there are none."""
        size = os.fstat(self._tokens).st_size
        return self._map(self._tokens, size) if size else None

    def _map(self, descriptor: int, size: int) -> mmap.mmap:
        found = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        self._maps.append(found)
        return found

    def let_go(self) -> None:
        """Take what was read of the mapped files out of this process's memory; the system may keep it."""
        for found in self._maps:
            found.madvise(mmap.MADV_DONTNEED)

    def publish(self) -> None:
        """Let other machines see what was written, where the folder is on network storage.

        File systems of that kind bring a file to the server when one who has it open closes it; closing a
        copy will do, and costs nothing elsewhere.
        """
        for descriptor, path in ((self._tokens, self.tokens_path), (self._weights, self.weights_path)):
            try:
                os.close(os.dup(descriptor))
            except OSError as error:
                raise disk_full(error, path, 0) from error

    @property
    def is_pictured(self) -> bool:
        """Whether any sequence has images."""
        return any(entry.behind for entry in self.entries.values())

    @property
    def is_weighted(self) -> bool:
        """Whether any record weighs its turns."""
        return any(entry.weighted for entry in self.entries.values())

    @property
    def weighs(self) -> bool:
        """The same, of records with a teacher."""
        return any(entry.weighs for entry in self.entries.values())

    @property
    def weight_bytes(self) -> int:
        """What a token takes in the file of weights."""
        return max((entry.weighted for entry in self.entries.values()), default=0) or 4

    def map_weights(self) -> mmap.mmap:
        """The weights (or what else there is) of all tokens, mapped; call it where `is_weighted`."""
        size = os.fstat(self._tokens).st_size // 4 * self.weight_bytes
        os.ftruncate(self._weights, size)
        return self._map(self._weights, size)

    def close(self) -> None:
        os.close(self._tokens)
        os.close(self._weights)
        os.close(self._lines)
        self._journal.close()


class Counter:
    """A number that threads share; processes have multiprocessing's Value, which looks the same."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._lock = threading.Lock()

    def get_lock(self) -> threading.Lock:
        return self._lock


class Reserved:
    """How far the two files are used: shared by all workers."""

    def __init__(self, ends: tuple[Any, Any]) -> None:
        self._ends = ends

    def reserve(self, tokens: int, lines: int) -> tuple[int, int]:
        """Ranges for so many entries; their first ones."""
        found: list[int] = []
        for end, count in zip(self._ends, (tokens, lines), strict=True):
            with end.get_lock():
                found.append(end.value)
                end.value += count
        return found[0], found[1]


def _check(values: NDArray[np.int32], lines: NDArray[np.void], weights: NDArray[Any] | None) -> str:
    digest = xxhash.xxh3_64(_bytes(values))
    digest.update(_bytes(lines))
    if weights is not None:
        digest.update(_bytes(weights))
    return digest.hexdigest()


def _weighs(weights: NDArray[Any] | None) -> bool:
    names = None if weights is None else weights.dtype.names
    return weights is not None and "loss_weight" in (names or ()) and bool(weights["loss_weight"].any())


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _read_at(path: str, kind: np.dtype[Any], entry: int, count: int) -> NDArray[Any]:
    """So many entries of a file, fewer where it ends before."""
    return np.fromfile(path, kind, count, offset=entry * kind.itemsize)


def _write_at(descriptor: int, array: NDArray[Any], entry: int, path: str) -> None:
    data = _bytes(array)
    at = entry * array.itemsize
    try:
        while len(data):
            written = os.pwrite(descriptor, data, at)
            data, at = data[written:], at + written
    except OSError as error:
        raise disk_full(error, path, len(data)) from error
