"""How long ranks wait for one another, measured; `PackedStream.predicted_idle` says it beforehand.

    clock = StepClock()
    for batch in stream:
        with clock.working():              # what a rank does without the others
            loss = model(**batch.model_inputs()).loss
        loss.backward()                    # DDP waits in here for the slowest rank
    print(clock.idle_share())              # every rank calls it, and gets the same

Only time in which a rank depends on nobody says how far ranks are apart: measured around a collective,
everybody takes as long as the slowest. Under DDP that is the forward pass, or both ways within
`no_sync()`. On a GPU two events mark it, so that the step waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from padless.runtime.errors import StepClockError


class StepClock:
    """The seconds that this rank works in each step."""

    def __init__(
        self,
        *,
        batches_per_step: int = 1,
        device: torch.device | str = "cpu",
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """- batches_per_step: how often `working` is entered in a step, by gradient accumulation.
        - device: where the work is done; on "cuda" it is timed there.
        - now: seconds, on other devices.
        """
        if batches_per_step < 1:
            raise StepClockError(f"batches_per_step is {batches_per_step}; it is at least 1")
        self.batches_per_step = batches_per_step
        self.device = torch.device(device)
        self._now = now
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time what is done within; nothing of it counts if it raises."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record(stream)
            yield
            end.record(stream)
            self._events.append((begin, end))
        else:
            begun = self._now()
            yield
            self._seconds.append(self._now() - begun)

    def step_seconds(self) -> torch.Tensor:
        """[steps] float64: what this rank worked in each whole step so far."""
        if self._events:
            torch.cuda.synchronize(self.device)
            self._seconds += [begin.elapsed_time(end) / 1000 for begin, end in self._events]
            self._events.clear()
        whole = len(self._seconds) // self.batches_per_step * self.batches_per_step
        times = torch.tensor(self._seconds[:whole], dtype=torch.float64)
        return times.reshape(-1, self.batches_per_step).sum(dim=1)

    def idle_share(self, *, skip: int = 0, group: torch.distributed.ProcessGroup | None = None) -> float:
        """The share of their time for which the ranks of `group` (all, by default) waited: from 0 to 1.

        A step lasts as long as its slowest rank works. The first `skip` steps, in which kernels are
        compiled and caches filled, are left out. Collective: every rank calls it. 0 for one process.

        Raises StepClockError where ranks timed different numbers of steps, or none but the skipped.
        """
        mine = self.step_seconds()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        times = mine[None]
        if distributed:
            # The clock's device is that of the work, which need not be one that the group speaks.
            on = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
            ranks = torch.distributed.get_world_size(group)
            counts = [torch.zeros(1, dtype=torch.int64, device=on) for _ in range(ranks)]
            torch.distributed.all_gather(counts, torch.tensor([len(mine)], device=on), group=group)
            found = [int(count) for count in counts]
            if len(set(found)) > 1:
                raise StepClockError(f"ranks timed {found} steps; all have to time the same ones")
            parts = [torch.empty(len(mine), dtype=torch.float64, device=on) for _ in range(ranks)]
            torch.distributed.all_gather(parts, mine.to(on), group=group)
            times = torch.stack(parts).cpu()
        if times.shape[1] <= skip:
            raise StepClockError(f"{times.shape[1]} whole steps were timed, and {skip} are to be skipped")
        return waiting(times[:, skip:])


def waiting(times: torch.Tensor) -> float:
    """The share of all ranks' time in which they wait: `times` [ranks, steps], of work alone."""
    whole = float(times.max(dim=0).values.sum()) * len(times)
    return 1 - float(times.sum()) / whole if whole else 0.0
