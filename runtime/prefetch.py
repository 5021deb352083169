"""The next batches made in a thread, and copied to the GPU on a stream of their own, beside the step.

    batches = Prefetch(stream, device="cuda")
    for batch in batches:                       # on the device, ready
        model(**batch.model_inputs())
        torch.save(batches.state_dict(), ...)   # what was yielded; not what lies ready

A batch is seen when it is yielded: those that were made ahead are made again after a stop. The price is
the memory of `ahead` batches, in page-locked memory and on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Semaphore, Thread, current_thread, main_thread
from typing import Any

import torch

from padless.runtime.errors import StreamError
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch

_LOOKS_UP = 0.2
"""Seconds after which a waiting thread sees whether the process is about to end."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A batch that lies ready, and the stream's state after it."""

    batch: VarlenBatch
    state: dict[str, Any]
    arrived: torch.cuda.Event | None
    """Where the copy to the device ends on its own CUDA stream."""


class Prefetch:
    """A stream's batches, the next ones made while the last is used; each `for` is an epoch's rest.

    Ask this object for states and set epochs on it: the stream itself runs ahead meanwhile.
    """

    def __init__(
        self, stream: PackedStream, *, device: torch.device | str | None = None, ahead: int = 2
    ) -> None:
        """Prefetch up to `ahead` batches, to a device where one is given; raises StreamError."""
        if ahead < 1:
            raise StreamError(f"ahead is {ahead}; at least 1 batch is made ahead")
        self.stream = stream
        self.ahead = ahead
        self.device = None if device is None else torch.device(device)
        self._yielded: dict[str, Any] | None = None

    def __len__(self) -> int:
        """This rank's batches in a whole epoch."""
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins: after the last one that was yielded."""
        return self.stream.state_dict() if self._yielded is None else self._yielded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, between two loops; raises StateError, and StreamError within one."""
        self._refuse_inside("load a state")
        self.stream.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch, between two loops; raises StreamError within one."""
        self._refuse_inside("set an epoch")
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[VarlenBatch]:
        self._refuse_inside("start another loop")
        batches = iter(self.stream)
        made: SimpleQueue[_Made | BaseException | None] = SimpleQueue()
        room, stopped = Semaphore(self.ahead), Event()
        loop = current_thread()
        thread = Thread(target=self._make, args=(batches, made, room, stopped, loop), name="padless-prefetch")
        self._yielded = self.stream.state_dict()
        thread.start()
        try:
            while (found := made.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                room.release()
                self._yielded = found.state
                yield self._received(found)
            self._yielded = self.stream.state_dict()
        finally:
            stopped.set()
            room.release()
            thread.join()
            if not sys.is_finalizing():  # then nobody comes for the stream, and numpy may be gone
                self.stream.load_state_dict(self._yielded)
            self._yielded = None

    def _make(
        self,
        batches: Iterator[VarlenBatch],
        made: SimpleQueue[_Made | BaseException | None],
        room: Semaphore,
        stopped: Event,
        loop: Thread,
    ) -> None:
        """What the thread does: batches as long as there is room, then None, or what went wrong."""
        try:
            side = None
            if self.device is not None and self.device.type == "cuda":
                side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            while _acquired(room, loop) and not stopped.is_set():
                batch = next(batches, None)
                if batch is None:
                    made.put(None)
                    return
                state, arrived = self.stream.state_dict(), None
                if side is not None:
                    with torch.cuda.stream(side):
                        batch = batch.pin_memory().to(side.device, non_blocking=True)
                        arrived = side.record_event()
                elif self.device is not None:
                    batch = batch.to(self.device)
                made.put(_Made(batch=batch, state=state, arrived=arrived))
        except BaseException as problem:  # whatever it is, the loop must hear of it, or wait for ever
            made.put(problem)

    def _received(self, found: _Made) -> VarlenBatch:
        """The batch, usable on the current CUDA stream as soon as its copy has ended."""
        if found.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(found.arrived)
            # All tensors are views of one buffer, which was allocated for the side stream.
            found.batch["input_ids"].record_stream(current)
        return found.batch

    def _refuse_inside(self, what: str) -> None:
        if self._yielded is not None:
            raise StreamError(f"a loop over this Prefetch is going on: end or close it, then {what}")


def _acquired(room: Semaphore, loop: Thread) -> bool:
    """Wait for room; false where the process ends instead, and with it the thread of the loop.

    Python waits for threads that are no daemons, that of the loop among them where the main thread ends
    first. One that came back from torch or Arrow after Python was taken down would abort the process, with
    all that it had done being done.
    """
    while not room.acquire(timeout=_LOOKS_UP):
        if not main_thread().is_alive() and (loop.daemon or not loop.is_alive()):
            return False
    return True
