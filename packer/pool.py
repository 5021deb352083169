"""Chunks through workers: threads for a small input, forked processes for a larger one.

Threads share what was rendered in the shadow of the tokenizer's load, and the encoder runs without the
GIL, so they serve a small input best. Processes (packer/processes.py) are forked after the load and share
its tables. The bytes are the same either way: a chunk's result is a function of its task.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain

from padless.packer.ahead import Ahead
from padless.packer.chunk import ChunkWork
from padless.packer.prepared import Prepared, Task
from padless.packer.token_store import ChunkStore, Counter, Entry, Reserved

IN_FLIGHT = 2
"""Tasks a worker has at hand, so that it never waits for the parent."""


def run_chunks(
    work: ChunkWork,
    prepared: deque[Prepared],
    tasks: Iterator[Task],
    workers: int,
    store: ChunkStore,
    report: Callable[[Entry], None],
    *,
    threads: bool,
) -> None:
    """Finish the prepared chunks and then all tasks, in threads or processes; `report` sees each entry.

    Stops handing out chunks behind the first that has problems; those before it are always finished.
    """
    ready = {item.task.chunk.index: item for item in prepared}
    ahead = Ahead(chain([item.task for item in prepared], tasks))
    prepared.clear()
    # Workers use no thread pools of their own, so forking is sound; where there is no fork, threads do.
    if threads or workers == 1 or sys.platform != "linux":
        ends = Reserved((Counter(store.used[0]), Counter(store.used[1])))
        _in_threads(work, ready, ahead, workers, store, ends, report)
    else:
        from padless.packer.processes import in_processes

        in_processes(work, ready, ahead, workers, store, report)


def complete(work: ChunkWork, store: ChunkStore, ends: Reserved, task: Task, ready: Prepared | None) -> Entry:
    """One chunk, from its task to its entry."""
    chunk = task.chunk
    result = work.finish(ready or work.prepare(task))
    return store.write(chunk.index, chunk.source, chunk.size, result, ends)


def _in_threads(
    work: ChunkWork,
    ready: dict[int, Prepared],
    ahead: Ahead,
    workers: int,
    store: ChunkStore,
    ends: Reserved,
    report: Callable[[Entry], None],
) -> None:
    def items() -> Iterator[tuple[Task, Prepared | None]]:
        for task in ahead:
            found = ready.pop(task.chunk.index, None)
            if found is None and workers == 1:
                # One worker encodes, without the GIL; this thread would only wait for it, so it renders.
                found = work.prepare(task)
            yield task, found

    waiting = items()
    running: set[Future[Entry]] = set()
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while len(running) < workers * IN_FLIGHT:
                    item = next(waiting, None)
                    if item is None:
                        break
                    running.add(pool.submit(complete, work, store, ends, *item))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    entry = future.result()
                    report(entry)
                    if entry.problems:
                        ahead.stop_at(entry.chunk)
        except BaseException:
            for future in running:
                future.cancel()
            raise
