"""A StatefulDataLoader over a stream in one process: its workers, what they make ahead, and its states.

Real workers take a tenth of a second each to start. What they see of their being workers is what
`get_worker_info` tells them, which PyTorch keeps in a variable of the module that it is set in here.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from padless.runtime.stream import PackedStream


@contextmanager
def as_worker(number: int, workers: int, stream: PackedStream) -> Iterator[None]:
    """Be a worker of a loader."""
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=workers, seed=0, dataset=stream
    )
    try:
        yield
    finally:
        torch_worker._worker_info = before


@contextmanager
def workers_ended() -> Iterator[None]:
    """What is raised in here keeps no loader alive, so that a loader's real workers end at once.

    A loader that waits for the garbage collector in a cycle with its error has lost the thread of its
    queue when it comes to tell its workers to end: it waits for each for five seconds and kills it.
    """
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


class InWorkers:
    """One pass of a loader with workers, each of which makes batches before they are yielded.

    Going on from a state of this very class is what the loader's own `load_state_dict` does: each
    worker takes its part of it up, and what was yielded since is made again.
    """

    def __init__(
        self, stream: PackedStream, workers: int, *, every: int = 1, state: dict[str, Any] | None = None
    ) -> None:
        self.workers, self.every = workers, every
        self.streams = [copy.copy(stream) for _ in range(workers)]
        self.batches: list[Any] = []
        self.states: list[dict[str, Any]] = []
        self.snapshot: dict[str, Any] = {}
        self.yielded, self.last = 0, workers - 1
        for number, own in enumerate(self.streams):
            with as_worker(number, workers, own):
                if state is not None:
                    own.load_state_dict(
                        state["_snapshot"]["_worker_snapshots"][f"worker_{number}"]["dataset_state"]
                    )
                self.batches.append(iter(own))
                self.states.append(own.state_dict())
        if state is not None:
            self.yielded = state["_snapshot"]["_snapshot_step"]
            self.last = state["_snapshot"]["_last_yielded_worker_id"]
        self.ready: dict[int, list[Any]] = {number: [] for number in range(workers)}
        self._keep()
        for _ in range(state["_steps_since_snapshot"] if state is not None else 0):
            next(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = (self.last + 1) % self.workers
        with as_worker(number, self.workers, self.streams[number]):
            while len(self.ready[number]) < 2:  # one to yield and one ahead
                batch = next(self.batches[number], None)
                self.ready[number].append((batch, self.streams[number].state_dict()))
        batch, self.states[number] = self.ready[number].pop(0)
        if batch is None:
            raise StopIteration
        self.last = number
        self.yielded += 1
        if self.yielded % self.every == 0:
            self._keep()
        return batch

    def _keep(self) -> None:
        snapshots = {
            f"worker_{number}": {"worker_id": number, "dataset_state": state, "fetcher_state": None}
            for number, state in enumerate(self.states)
        }
        self.snapshot = {
            "_snapshot_step": self.yielded,
            "_last_yielded_worker_id": self.last,
            "_main_snapshot": {"_num_workers": self.workers},
            "_worker_snapshots": snapshots,
        }

    def state_dict(self) -> dict[str, Any]:
        """As torchdata's, but for what no stream is asked."""
        return {
            "_snapshot": self.snapshot,
            "_steps_since_snapshot": self.yielded - self.snapshot["_snapshot_step"],
            "_iterator_finished": False,
        }
