"""The order in which chunks are handed out: large ones early, so that the last to end is a small one.

Chunks have about one size, but a record that is larger is a chunk of its own. Handed out last, it would keep
one worker busy while all others are done. The walk over the sources is many times faster than tokenizing, so
it runs ahead of the workers, a few chunks for each that is handed out, and the largest of those ahead goes
first; chunks of the common size keep the order of the sources. What is ahead is bounded in number and, where
chunks carry their bytes, in bytes. The data set is the same for any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from padless.packer.prepared import Task

MOST_AHEAD = 4096
"""Chunks, some 2 GB of plain files."""
MOST_BYTES = 2**24
"""Of chunks that carry theirs."""
EACH_TIME = 8
"""Chunks to walk for one that is handed out: the first worker need not wait for the walk."""
LARGE = 2**21
"""Bytes from which on a chunk is handed out before its turn."""


class Ahead:
    """Tasks in the order of the sources, those of large chunks first; an iterator.

    After `stop_at(n)` only chunks before chunk n are still given: those behind one that stops the build need
    no work, but those before it may have an earlier reason.
    """

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self._waiting: deque[Task] = deque()
        self._large: list[tuple[int, int, Task]] = []
        self._bytes = 0
        self._stop: int | None = None
        self._is_through = False
        self._error: Exception | None = None

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Task:
        self._walk()
        while self._large or self._waiting:
            task = heappop(self._large)[2] if self._large else self._waiting.popleft()
            self._bytes -= len(task.chunk.payload or b"")
            if self._stop is None or task.chunk.index < self._stop:
                return task
            if not self._large and not self._waiting:
                self._walk()
        if self._error is not None and self._stop is None:
            raise self._error
        raise StopIteration

    def stop_at(self, chunk: int) -> None:
        """Give no chunk from this one on."""
        self._stop = chunk if self._stop is None else min(self._stop, chunk)

    def _walk(self) -> None:
        for _ in range(EACH_TIME):
            ahead = len(self._waiting) + len(self._large)
            if self._is_through or ahead and (ahead >= MOST_AHEAD or self._bytes >= MOST_BYTES):
                return
            try:
                task = next(self._tasks, None)
            except (
                Exception
            ) as error:  # what lies before it has its turn first, and perhaps a fault of its own
                self._error, self._is_through = error, True
                return
            if task is None or self._stop is not None and task.chunk.index >= self._stop:
                self._is_through = True
                return
            self._bytes += len(task.chunk.payload or b"")
            size = task.chunk.size
            if size < LARGE:
                self._waiting.append(task)
            else:
                heappush(self._large, (-size, task.chunk.index, task))
