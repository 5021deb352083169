"""What the state of torchdata's StatefulDataLoader says about the stream inside it.

    worker 0   batch 0         batch 3        a loader that keeps the order takes the batches of its workers
    worker 1       batch 1         batch 4    in turn, so the worker whose batch came last stands where the
    worker 2           batch 2                whole stream does: here, after 5 batches, worker 1

The loader itself goes on under as many workers as before and no others; the stream goes on under any,
from that worker's state. Where the loader keeps a worker's state only now and then
(`snapshot_every_n_steps`), the steps that came after are counted on in the geometry that made them.
The price is that torchdata's keys are known here: they are the same from 0.8 to 0.11, and anything else
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from padless.runtime.bucket_order import BucketOrder
from padless.runtime.errors import StateError
from padless.runtime.order import Position, StepOrder


@dataclass(frozen=True, kw_only=True)
class FoundState:
    """A stream's own state, and how many steps a loader has yielded since it was taken."""

    state: Mapping[str, Any]
    steps: int = 0


def find_state(state: Any) -> FoundState:
    """The stream's state in a state of its own or of a StatefulDataLoader; raises StateError.

    Of a loader with workers it is that of the worker which yielded last.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"the state is a {type(state).__name__}, not the dict that state_dict() gave")
    if "version" in state:
        return FoundState(state=state)
    try:
        if "_snapshot" in state:
            return _of_workers(state)
        if "_num_yielded" in state:
            return FoundState(state=_of_a_stream(state["dataset_state"]))
    except StateError:  # which is a ValueError too
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise StateError(
            f"the state of a StatefulDataLoader is damaged, or of a torchdata that is not known here "
            f"({problem!r}): load an earlier one, or one of torchdata 0.8 to 0.11"
        ) from None
    raise StateError(
        f"the state has {', '.join(map(repr, state)) or 'nothing'}: it is none of a PackedStream, nor of a "
        "StatefulDataLoader over one; load what state_dict() of either gave"
    )


def _of_workers(state: Mapping[str, Any]) -> FoundState:
    """The state of a loader with workers."""
    snapshot, steps = state["_snapshot"], int(state["_steps_since_snapshot"])
    workers, last = snapshot["_worker_snapshots"], int(snapshot["_last_yielded_worker_id"])
    known = len(workers), snapshot["_main_snapshot"]["_num_workers"]
    if steps < 0 or not 0 <= last < known[0] == known[1]:
        raise ValueError(f"worker {last} of {known}, {steps} steps")
    found = _of_a_stream(workers[f"worker_{last}"]["dataset_state"])
    if found.get("worker") not in (None, [last, len(workers)], (last, len(workers))):
        raise ValueError(f"the state of worker {found['worker']} stands for worker {last} of {len(workers)}")
    return FoundState(state=found, steps=steps)


def _of_a_stream(state: Any) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(
            "the StatefulDataLoader that gave this state had no PackedStream for its data set: load what the "
            "state_dict() of one over a stream gave"
        )
    return state


def position_after(order: StepOrder | BucketOrder, position: Position, steps: int) -> Position:
    """The position so many steps of an order further on; raises StateError where its epoch has fewer."""
    for window in order.windows(position):
        for start in range(0, len(window.packs), window.step):
            steps -= 1
            if not steps:
                return window.after(min(start + window.step, len(window.packs)))
    raise StateError(
        f"the state is damaged: it counts {steps} steps beyond the end of its epoch; load an earlier one"
    )
