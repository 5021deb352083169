"""What a training step costs: tokens a second, the device's idle time, the host's time, memory.

The timed loop waits for no step before it launches the next, as in training, but for the one before the last:
time is the device's own, between events on its stream. On a CPU it is the clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from training_batches import Batch

Marks = tuple[Any, Any, Any]
"""When a step began, had its gradients, and had new weights."""
ON_GPU = torch.cuda.is_available()


def mark() -> Any:
    """Now: an event on the device's stream, or seconds."""
    if not ON_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Seconds."""
    return (end - begin) if isinstance(end, float) else begin.elapsed_time(end) / 1e3


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


@dataclass(kw_only=True)
class Trainer:
    """A model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    def gradients(self, batch: Batch) -> torch.Tensor:
        """Forward and backward: the loss over all trained tokens, as transformers' Trainer divides it."""
        loss: torch.Tensor = self.model(**batch.inputs, num_items_in_batch=batch.targets).loss
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> tuple[Marks, torch.Tensor]:
        """One update; when its parts began and ended on the device, and the loss."""
        began = mark()
        loss = self.gradients(batch)
        had_gradients = mark()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (began, had_gradients, mark()), loss


@dataclass(kw_only=True)
class Timed:
    """Steps that were timed."""

    batches: list[Batch] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Seconds from the beginning of one to that of the next."""
    updates: list[float] = field(default_factory=list)
    """Of them, the optimizer's."""
    first_loss: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(self.steps)

    @property
    def tokens(self) -> int:
        """Real ones of all steps."""
        return sum(batch.tokens for batch in self.batches)

    @property
    def useful(self) -> float:
        """Real tokens of those computed."""
        return self.tokens / sum(batch.computed for batch in self.batches)


def time_steps(trainer: Trainer, batches: Iterable[Batch], steps: int, seconds: float) -> Timed:
    """So many steps, or as many as the time allows."""
    found, marks, loss = Timed(), list[Marks](), None
    synchronize()
    started = time.perf_counter()
    for batch in batches:
        told, own_loss = trainer.step(batch)
        loss = own_loss if loss is None else loss
        found.batches.append(batch)
        marks.append(told)
        if ON_GPU and len(marks) > 1:
            marks[-2][2].synchronize()
        if len(marks) == steps or time.perf_counter() - started > seconds:
            break
    synchronize()
    if loss is None:
        raise SystemExit("there is no batch to time")
    begins = [told[0] for told in marks[1:]] + [marks[-1][2]]
    found.steps = [between(told[0], end) for told, end in zip(marks, begins, strict=True)]
    found.updates = [between(had_gradients, end) for _, had_gradients, end in marks]
    found.first_loss = float(loss)
    return found


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The tenth, the fiftieth, the ninetieth."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[4], cuts[8]


def host_seconds(trainer: Trainer, batch: Batch) -> float:
    """Until forward and backward of a short batch are launched: the median of five, without an update."""
    found = []
    for _ in range(6):
        synchronize()
        begin = time.perf_counter()
        trainer.gradients(batch)
        found.append(time.perf_counter() - begin)
        trainer.optimizer.zero_grad(set_to_none=True)
    return statistics.median(found[1:])


def activation_bytes(trainer: Trainer, batch: Batch) -> int:
    """The peak of forward and backward over weights, gradients and the optimizer's state.

    Gradients are there beforehand, as when they are accumulated, so that they do not count.
    """
    trainer.gradients(batch)
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.gradients(batch)
    synchronize()
    peak = torch.cuda.max_memory_allocated()
    trainer.optimizer.zero_grad(set_to_none=True)
    return peak - before


def kernel_seconds(trainer: Trainer, batches: Sequence[Batch]) -> dict[str, float]:
    """The device's time in steps on these batches, by kernel; nothing is counted while it waits."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for batch in batches:
            trainer.step(batch)
        synchronize()
    found: dict[str, float] = {}
    for event in profiled.events() or []:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            found[event.name] = found.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
    return found
