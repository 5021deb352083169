"""A Ray cluster of several nodes on this machine, and tasks that wait at a gate so that a test can strike.

A held task leaves a mark (its node, its process) and goes on when the gate opens, however slow the machine.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster

from padless.packer import ray_engine, ray_tasks

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
PATIENCE = 240.0
"""Seconds after which something never comes; a machine may be as slow as it likes until then."""


@contextlib.contextmanager
def cluster_of(nodes: int) -> Iterator[Cluster]:
    """A cluster that this process is a driver of; nothing is left of it afterwards."""
    folder = tempfile.mkdtemp(prefix="ray-")  # paths of sockets may not be long
    # Ray notes the address of the last cluster there, and does not make the folder for it.
    os.mkdir(os.path.join(folder, "ray"))
    settings = {
        "RAY_TMPDIR": folder,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_register_timeout_seconds": str(int(PATIENCE)),  # a slow start is no failed one
    }
    with patch.dict(os.environ, settings):
        cluster = Cluster()
        try:
            for number in range(nodes):
                _add_node(cluster, {} if number else {"temp_dir": folder})
            _await_nodes(cluster, nodes)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _add_node(cluster: Cluster, more: dict[str, Any]) -> None:
    """Start a node; Ray gives a raylet half a minute, which on a loaded machine may be too little."""
    for attempt in range(4):
        before = {*cluster.worker_nodes}
        try:
            cluster.add_node(**NODE, **more)
            return
        except Exception as error:
            if attempt == 3 or "timed out" not in str(error).lower():
                raise
            for late in {*cluster.worker_nodes} - before:  # it counts as one that is there, and may be dead
                cluster.remove_node(late)


def _await_nodes(cluster: Cluster, nodes: int) -> None:
    """Come back when so many nodes live, or one more that was given up and came all the same."""
    patience = time.monotonic() + PATIENCE
    while len(cluster.global_state._live_node_ids()) < nodes:
        if time.monotonic() > patience:
            raise TimeoutError(
                f"{nodes} nodes were started, and these live: {cluster.global_state.node_table()}"
            )
        time.sleep(0.1)


class Mark(NamedTuple):
    """A task that waits at the gate, or did."""

    number: int
    """Of the chunk or shard."""
    node: str
    pid: int


class Gate:
    """Where tasks of one stage wait, from number `first` on."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        self.folder, self.first = folder, first
        folder.mkdir(exist_ok=True)

    def held(self, stage: str) -> Callable[..., Any]:
        """`tokenize` or `write` of padless.packer.ray_tasks, that waits before it begins."""
        folder, first = str(self.folder), self.first

        # Nested, so that it travels by value: the nodes need not know of it.
        def task(run: Any, *packed: Any) -> Any:
            job = pickle.loads(packed[-1].data)
            number = job[0].task.chunk.index if stage == "tokenize" else job.number
            if number >= first:
                node = ray.get_runtime_context().get_node_id()
                with open(os.path.join(folder, f"{number}-{node}-{os.getpid()}.mark"), "w"):
                    pass
                while not os.path.exists(os.path.join(folder, "open")):
                    time.sleep(0.02)
            return getattr(ray_tasks, stage)(run, *packed)

        return task

    def holding(self, stage: str) -> Any:
        """Have the engine's tasks of a stage wait."""
        return patch.object(ray_engine, stage, self.held(stage))

    @property
    def marks(self) -> list[Mark]:
        parts = [path.stem.split("-") for path in self.folder.glob("*.mark")]
        return [Mark(int(number), node, int(pid)) for number, node, pid in parts]

    def open(self) -> None:
        (self.folder / "open").touch()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Come back when it is so; fail when it never is."""
    patience = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < patience, "it never came"
        time.sleep(0.02)
