"""A build's chunks and shards as tasks of a Ray cluster (`padless[ray]`); the bytes are the local engine's.

The driver walks the sources, keeps the token store and plans, as it does on one machine; chunks are
tokenized and shards are written wherever the cluster has a core. A chunk's tokens come back through Ray's
object store, and the driver alone writes into the work folder: tasks are then pure functions, which Ray may
do again when a node dies, and no lock or half-written range outlives a driver. The price is that every token
passes the driver once (4 bytes). Output, work folder and sources lie on storage that all nodes have at the
same path.

What lies behind URLs needs no such storage: a source's bytes travel with its chunks, and for an output the
driver, which has all tokens, writes the shards at memory speed beside its upload (packer/publish.py). Sending
tokens out to nodes would take the driver what the upload takes it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from itertools import chain
from typing import Any

from padless.packer.ahead import Ahead
from padless.packer.chunk import ChunkWork
from padless.packer.engine import LocalEngine
from padless.packer.errors import ClusterError, InputError, WorkerLostError, disk_full
from padless.packer.gather import Gather
from padless.packer.gather_part import Batches, part_of
from padless.packer.plan import PackPlan
from padless.packer.pool import IN_FLIGHT
from padless.packer.prepared import Prepared, Task
from padless.packer.ray_tasks import SEEN, ChunkJob, Run, ShardJob, pack, tokenize, versions, write
from padless.packer.sources import Chunk
from padless.packer.token_store import ChunkStore, Counter, Entry, Reserved
from padless.packer.write import Layout
from padless.runtime.format import ShardInfo

RETRIES = 3
"""How often Ray gives a task to another worker when the one that had it is lost."""
ANSWER = 10.0
"""Seconds that a cluster's head has to answer in."""
LOOK = 2.0
"""Seconds after which the cluster is asked again how many cores it has."""
TASK_BYTES = 2**18
"""Of chunks that are given out together, about: one of the common size is a task, of small files many are."""

_NAMES = ("local", "auto")
"""Ray's words for a cluster of this machine: a new one, and one that runs."""


class RayEngine:
    """The cores of a cluster, those of nodes that join later too."""

    is_here = False

    def __init__(self, address: str | None, most: int | None, *, is_shared: bool) -> None:
        """`address` as in PackConfig; `most` tasks under way, None: IN_FLIGHT for each core.

        `is_shared`: nodes have the output folder; otherwise this process writes the shards.
        """
        try:
            import ray
        except ImportError as error:
            raise InputError(
                f"--engine ray needs the package ray ({error}): pip install 'padless[ray]', or leave the "
                "option out to work on this machine"
            ) from None
        self._ray: Any = ray
        self._address, self._most, self._is_shared = _address(address), most, is_shared
        self._run: Run = {}
        self._ours = ExitStack()
        """What to undo once the build has ended, where the connection is ours."""
        self._under_way: set[Any] = set()
        self._cores, self._looked = 0, -LOOK

    def start(self) -> None:
        """Join the cluster, or start one on this machine. InputError where there is none to join."""
        if not self._ray.is_initialized():  # by the program that calls us
            self._connect()
        if not self._count_cores():
            raise InputError("the Ray cluster has no CPU to give to a task: start a node with --num-cpus")

    def _connect(self) -> None:
        address = self._address
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options |= {"include_dashboard": False, "num_cpus": len(os.sched_getaffinity(0))}
        try:
            if address not in _NAMES:  # Ray itself would try for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
            # Ray prints what it hears of nodes to stdout, where the summary belongs.
            self._ours.enter_context(redirect_stdout(sys.stderr))
            self._ours.callback(self._ray.shutdown)
            self._ray.init(address=address, **options)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(
                f"no Ray cluster at {address} ({reason[0]}): start one (ray start --head) and give its "
                "--ray-address HOST:PORT, or leave that and RAY_ADDRESS out for one of this machine"
            ) from None

    def _count_cores(self) -> int:
        if time.monotonic() - self._looked >= LOOK:
            self._cores = int(self._ray.cluster_resources().get("CPU", 0))
            self._looked = time.monotonic()
        return self._cores

    def run_chunks(
        self,
        work: ChunkWork,
        prepared: deque[Prepared],
        tasks: Iterator[Task],
        store: ChunkStore,
        report: Callable[[Entry], None],
        *,
        small: bool,
    ) -> None:
        """As `Engine` says; what was prepared here is prepared again where it is finished."""
        self._show(store)
        ahead = Ahead(chain([item.task for item in prepared], tasks))
        prepared.clear()
        ends = Reserved((Counter(store.used[0]), Counter(store.used[1])))
        ask = self._ray.remote(num_cpus=1, max_retries=RETRIES)(tokenize)
        able = self._ray.put(pack(work))
        seen: dict[int, tuple[str, int, int]] = {}
        running: dict[Any, list[Chunk]] = {}
        try:
            while True:
                most = self._most or max(1, IN_FLIGHT * self._count_cores())
                while len(running) < most and (together := _together(ahead)):
                    jobs = [ChunkJob(task=task, source=_source(task.chunk, seen)) for task in together]
                    running[self._ask(ask, able, pack(jobs))] = [task.chunk for task in together]
                if not running:
                    break
                for done in self._ray.wait(list(running), num_returns=1)[0]:
                    for chunk, result in zip(running.pop(done), self._answer(done), strict=True):
                        entry = store.write(chunk.index, chunk.source, chunk.size, result, ends)
                        report(entry)
                        if entry.problems:
                            ahead.stop_at(entry.chunk)
        except BaseException:
            self.cancel()
            raise
        store.publish()

    def _show(self, store: ChunkStore) -> None:
        """Leave the sign by which nodes know the work folder, where they are to see it."""
        self._run = {"id": secrets.token_hex(16), "versions": versions(), "work": None}
        if not self._is_shared:
            return
        self._run["work"] = os.path.abspath(store.folder)
        path = os.path.join(store.folder, SEEN)
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write(self._run["id"])
        except OSError as error:
            raise disk_full(error, path, len(self._run["id"])) from error

    def shard_writer(
        self,
        folder: str,
        shards: list[Batches],
        plan: PackPlan,
        gather: Gather,
        layout: Layout,
        report: Callable[[int], None],
    ) -> tuple[int, Callable[[int, Batches], ShardInfo]]:
        if not self._is_shared:
            here = LocalEngine(len(os.sched_getaffinity(0)))
            return here.shard_writer(folder, shards, plan, gather, layout, report)
        ask = self._ray.remote(num_cpus=1, max_retries=RETRIES)(write)

        def write_one(number: int, batches: Batches) -> ShardInfo:
            part, packs, inside = part_of(gather, plan, batches)
            job = ShardJob(
                folder=os.path.abspath(folder),
                number=number,
                part=part,
                plan=packs,
                batches=inside,
                layout=layout,
            )
            info: ShardInfo = self._answer(self._ask(ask, pack(job)))
            report(info.tokens)
            return info

        return min(max(len(shards), 1), self._most or max(1, self._count_cores())), write_one

    def _ask(self, ask: Any, *values: Any) -> Any:
        """Begin a task; what its answer will be had by."""
        asked = ask.remote(self._run, *values)
        self._under_way.add(asked)
        return asked

    def _answer(self, asked: Any) -> Any:
        """What a task gave; raises what it could not do."""
        errors = self._ray.exceptions
        try:
            found = self._ray.get(asked)
        except errors.RayTaskError as error:  # it did not get as far as our code
            reason = str(error).strip().splitlines()[-1]
            raise ClusterError(
                f"a node cannot run padless ({reason}): install the same version on every node and run the "
                "same command again, it goes on where it stopped"
            ) from None
        except errors.RayError as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise WorkerLostError(
                f"a task was given up after {RETRIES} more tries: {type(error).__name__}, {reason} (often "
                "too little memory on a node): what was finished is kept, run the same command again"
            ) from None
        finally:
            self._under_way.discard(asked)
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self) -> None:
        """End the tasks that are under way."""
        for asked in list(self._under_way):
            self._ray.cancel(asked, force=False)

    def stop(self) -> None:
        """Leave the cluster, which ends what is left of our tasks; one that we started is shut down."""
        self._ours.close()


def _address(given: str | None) -> str:
    """HOST:PORT, or one of _NAMES. InputError for another form."""
    found = given or os.environ.get("RAY_ADDRESS") or "local"
    if found in _NAMES or "://" not in found and found.rpartition(":")[2].isdecimal():
        return found
    why = "has no port"
    if "://" in found:
        why = "is of Ray Client, whose driver does not see the cluster's storage: run on one of its nodes"
    raise InputError(
        f"{'--ray-address' if given else 'RAY_ADDRESS'} {found} {why}; give HOST:PORT of the head"
    )


def _together(tasks: Iterator[Task]) -> list[Task]:
    """The next tasks of about TASK_BYTES, at least one; none where there are no more."""
    found: list[Task] = []
    size = 0
    while size < TASK_BYTES and (task := next(tasks, None)) is not None:
        found.append(task)
        size += task.chunk.size
    return found


def _source(chunk: Chunk, seen: dict[int, tuple[str, int, int]]) -> tuple[str, int, int] | None:
    """What a node must find at a chunk's path, looked up once for each source."""
    if chunk.payload is not None and chunk.reader != "tokens":
        return None  # its bytes travel
    if chunk.source not in seen:
        about = os.stat(chunk.path)
        seen[chunk.source] = (chunk.path, about.st_size, about.st_mtime_ns)
    return seen[chunk.source]
