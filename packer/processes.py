"""Forked workers: tasks over pipes, results in the store, a lost worker told apart from a bad record."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from padless.packer.ahead import Ahead
from padless.packer.chunk import ChunkWork
from padless.packer.errors import WorkerLostError
from padless.packer.pool import IN_FLIGHT, complete
from padless.packer.prepared import Prepared
from padless.packer.token_store import ChunkStore, Entry, Reserved
from padless.runtime.format import PadlessError


def in_processes(
    work: ChunkWork,
    ready: dict[int, Prepared],
    ahead: Ahead,
    workers: int,
    store: ChunkStore,
    report: Callable[[Entry], None],
) -> None:
    """Fork the workers, keep them busy until there are no tasks, and let them go."""
    context = multiprocessing.get_context("fork")
    ends = Reserved((context.Value("q", store.used[0]), context.Value("q", store.used[1])))
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
        _feed(pipes, ahead, report)
    finally:
        gc.unfreeze()
        for pipe, process in pipes.items():
            pipe.close()
            if sys.exc_info()[0] is not None:
                process.terminate()
        for process in pipes.values():
            process.join()


def _feed(pipes: dict[Connection, Any], ahead: Ahead, report: Callable[[Entry], None]) -> None:
    busy = dict.fromkeys(pipes, 0)

    def give(pipe: Connection) -> None:
        if (task := next(ahead, None)) is not None:
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
            if found.problems:
                ahead.stop_at(found.chunk)
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
            found: Any = complete(work, store, ends, task, ready.pop(task.chunk.index, None))
        except (PadlessError, OSError) as error:
            found = error
        except BaseException as error:  # ours: the parent shows where
            found = RuntimeError(f"{error}\n{traceback.format_exc()}")
        try:
            pipe.send(found)
        except (BrokenPipeError, OSError):
            os._exit(0)
