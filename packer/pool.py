"""Chunks through workers: threads for a small input, forked processes for a larger one.

Threads share what was rendered in the shadow of the tokenizer's load, and the encoder runs without the
GIL, so they serve a small input best. Processes are forked after the load and share its tables. The bytes
are the same either way: a chunk's result is a function of its task.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from padless.packer.chunk import ChunkWork, Prepared, Task
from padless.packer.token_store import ChunkStore, Entry, Reserved
from padless.runtime.format import PadlessError

IN_FLIGHT = 2
"""Tasks a worker has at hand, so that it never waits for the parent."""


class WorkerLostError(PadlessError, RuntimeError):
    """A worker process ended without a word."""


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

    Stops handing out chunks after the first that has problems; those before it are always finished.
    """
    context = _context()
    ends = Reserved((context.Value("q", store.used[0]), context.Value("q", store.used[1])))
    if threads or workers == 1 or context.get_start_method() != "fork":
        _in_threads(work, prepared, tasks, workers, store, ends, report)
    else:
        _in_processes(context, work, prepared, tasks, workers, store, ends, report)


def _context() -> Any:
    # Workers use no thread pools of their own, so forking is sound; elsewhere threads do.
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _complete(
    work: ChunkWork, store: ChunkStore, ends: Reserved, task: Task, ready: Prepared | None
) -> Entry:
    chunk = task.chunk
    result = work.finish(ready or work.prepare(task))
    size = max(chunk.stop - chunk.start, len(chunk.payload or b""))
    return store.write(chunk.index, chunk.source, size, result, ends)


def _in_threads(
    work: ChunkWork,
    prepared: deque[Prepared],
    tasks: Iterator[Task],
    workers: int,
    store: ChunkStore,
    ends: Reserved,
    report: Callable[[Entry], None],
) -> None:
    def items() -> Iterator[tuple[Task, Prepared | None]]:
        while prepared:
            ready = prepared.popleft()
            yield ready.task, ready
        for task in tasks:
            yield task, None

    if workers == 1:
        for task, ready in items():
            entry = _complete(work, store, ends, task, ready)
            report(entry)
            if entry.problems:
                return
        return
    waiting = items()
    running: set[Future[Entry]] = set()
    with ThreadPoolExecutor(workers) as pool:
        stopped = False
        try:
            while True:
                while not stopped and len(running) < workers * IN_FLIGHT:
                    item = next(waiting, None)
                    if item is None:
                        break
                    running.add(pool.submit(_complete, work, store, ends, *item))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    entry = future.result()
                    report(entry)
                    stopped = stopped or bool(entry.problems)
        except BaseException:
            for future in running:
                future.cancel()
            raise


def _in_processes(
    context: Any,
    work: ChunkWork,
    prepared: deque[Prepared],
    tasks: Iterator[Task],
    workers: int,
    store: ChunkStore,
    ends: Reserved,
    report: Callable[[Entry], None],
) -> None:
    ready = {item.task.chunk.index: item for item in prepared}
    waiting: Iterator[Task] = _chain(deque(item.task for item in prepared), tasks)
    prepared.clear()
    gc.freeze()  # what is there now is shared: no collection may touch it
    pipes: dict[Connection, Any] = {}
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            others = [*pipes, here]
            process = context.Process(
                target=_worker, args=(there, others, work, ready, store, ends), daemon=True
            )
            process.start()
            there.close()
            pipes[here] = process
        ready.clear()
        _feed(pipes, waiting, report)
    finally:
        gc.unfreeze()
        for pipe, process in pipes.items():
            pipe.close()
            if sys.exc_info()[0] is not None:
                process.terminate()
        for process in pipes.values():
            process.join()


def _chain(first: deque[Task], then: Iterator[Task]) -> Iterator[Task]:
    while first:
        yield first.popleft()
    yield from then


def _feed(pipes: dict[Connection, Any], waiting: Iterator[Task], report: Callable[[Entry], None]) -> None:
    busy = dict.fromkeys(pipes, 0)
    stopped = False

    def give(pipe: Connection) -> None:
        if not stopped and (task := next(waiting, None)) is not None:
            pipe.send(task)
            busy[pipe] += 1

    for _ in range(IN_FLIGHT):
        for pipe in pipes:
            give(pipe)
    while any(busy.values()):
        for ready in wait_for([pipe for pipe, count in busy.items() if count]):
            assert isinstance(ready, Connection)
            pipe = ready
            try:
                found = pipe.recv()
            except EOFError:
                process = pipes[pipe]
                process.join()
                raise WorkerLostError(
                    f"a worker process ended unexpectedly (exit {process.exitcode}; -9 is often too little "
                    "memory): what was finished is kept, run the same command again, with fewer --workers"
                ) from None
            busy[pipe] -= 1
            if isinstance(found, BaseException):
                raise found
            report(found)
            stopped = stopped or bool(found.problems)
            give(pipe)


def _worker(
    pipe: Connection,
    others: list[Connection],
    work: ChunkWork,
    ready: dict[int, Prepared],
    store: ChunkStore,
    ends: Reserved,
) -> None:
    """A forked worker: tasks in, entries or an exception out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:  # inherited ends would keep a dead parent's pipes open
        other.close()
    gc.disable()  # records make no cycles, and a collection costs a tenth of the time
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            found: Any = _complete(work, store, ends, task, ready.pop(task.chunk.index, None))
        except (PadlessError, OSError) as error:
            found = error
        except BaseException as error:  # ours: the parent shows where
            found = RuntimeError(f"{error}\n{traceback.format_exc()}")
        try:
            pipe.send(found)
        except (BrokenPipeError, OSError):
            os._exit(0)
