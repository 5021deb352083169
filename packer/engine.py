"""Where the work of a build is done: who tokenizes its chunks and who writes its shards.

The stages are the same everywhere (`packer/pipeline.py`), and so are the bytes: a chunk's result is a
function of its task, a shard's of its packs. This machine's threads and processes are the default and cost
nothing to be started; a cluster costs its start, and a copy of every token on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from padless.packer.config import PackConfig
from padless.packer.gather import Gather
from padless.packer.gather_part import Batches
from padless.packer.plan import PackPlan
from padless.packer.write import Layout, write_shard
from padless.runtime.format import ShardInfo
from padless.runtime.storage import is_url

if TYPE_CHECKING:
    from padless.packer.chunk import ChunkWork
    from padless.packer.prepared import Prepared, Task
    from padless.packer.token_store import ChunkStore, Entry


class Engine(Protocol):
    """Who tokenizes chunks and writes shards."""

    is_here: bool
    """Whether its workers have what this process rendered, so that rendering ahead pays."""

    def start(self) -> None:
        """Be ready, before anything of the output is touched. InputError where that cannot be."""

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
        """Finish the prepared chunks and then all tasks; `report` sees each entry.

        Stops handing out chunks behind the first that has problems; those before it are always finished.
        """

    def shard_writer(
        self,
        folder: str,
        shards: list[Batches],
        plan: PackPlan,
        gather: Gather,
        layout: Layout,
        report: Callable[[int], None],
    ) -> tuple[int, Callable[[int, Batches], ShardInfo]]:
        """How many shards to ask for at a time, and what writes one: its number and batches to its facts.

        `report` gets the tokens that were written.
        """

    def cancel(self) -> None:
        """End what is under way: nobody waits for it any more."""

    def stop(self) -> None:
        """End what `start` began."""


class LocalEngine:
    """The cores of this machine."""

    is_here = True

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def start(self) -> None:
        """Workers are made when there is work."""

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
        from padless.packer.pool import run_chunks  # a repack has no chunks

        run_chunks(work, prepared, tasks, self.workers, store, report, threads=small)

    def shard_writer(
        self,
        folder: str,
        shards: list[Batches],
        plan: PackPlan,
        gather: Gather,
        layout: Layout,
        report: Callable[[int], None],
    ) -> tuple[int, Callable[[int, Batches], ShardInfo]]:
        # One more than there are cores: each waits for the disk now and then.
        writers = min(self.workers + 1, max(len(shards), 1))
        return writers, partial(write_shard, folder, plan=plan, gather=gather, layout=layout, report=report)

    def cancel(self) -> None:
        """Shards that are being written come to their end."""

    def stop(self) -> None:
        """Workers end with their work."""


def engine_of(config: PackConfig, workers: int) -> Engine:
    """The engine that is asked for, not started yet. InputError where it is not installed."""
    if config.engine == "ray":
        from padless.packer.ray_engine import RayEngine

        return RayEngine(config.ray_address, config.workers, is_shared=not is_url(config.output))
    return LocalEngine(workers)
