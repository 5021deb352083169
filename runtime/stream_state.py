"""Where a stream stands, as a small dict: what it belongs to, and how far it has gone.

A state says nothing about ranks, workers or packs a batch, so it goes on under others. It costs the
numbers of at most one window of packs, whatever the data's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padless.runtime.errors import StateError
from padless.runtime.format import Manifest, checksum_bytes
from padless.runtime.order import LAST_EPOCH, Position
from padless.runtime.plans import Plan

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamState:
    """The position of a stream over certain packs in a certain order."""

    data: str
    """Checksum of the plan and of all shards."""
    seed: int
    shuffle: bool | str
    position: Position
    worker: tuple[int, int] | None = None
    """The DataLoader worker, of how many, that made the last batch; none for a loop without."""

    def at(self, position: Position, *, worker: tuple[int, int] | None = None) -> StreamState:
        """The same stream elsewhere."""
        return StreamState(
            data=self.data,
            seed=self.seed,
            shuffle=self.shuffle,
            position=position,
            worker=worker if worker and worker[1] > 1 else None,
        )

    def first_step(self, worker: int, workers: int) -> int:
        """The first of the coming steps that is the worker's.

        A worker that goes on after its own batch leaves the next ones to its siblings.
        """
        return worker if self.worker is None else workers - 1

    def taken_up(self, worker: int, workers: int) -> StreamState:
        """The state for a stream that goes on there; raises StateError in a worker that it is not of.

        Without workers it is a position like any other, since loaders take batches of workers in turn.
        """
        if self.worker is None or workers == 0:
            return self.at(self.position)
        if self.worker != (worker, workers):
            raise StateError(
                f"the state was taken in DataLoader worker {self.worker[0]} of {self.worker[1]}, this is "
                f"{worker} of {workers}: a loader goes on with as many workers as before. For another number "
                "load the loader's state into the stream, stream.load_state_dict(state), and give the stream "
                "to a new loader"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """The state as numbers, strings and lists."""
        return {
            "version": STATE_VERSION,
            "data": self.data,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.position.epoch,
            "taken": self.position.taken,
            "left": self.position.left.tolist(),
            "group": self.position.group,
            **(
                {"buckets": [_numbers(one) for one in self.position.buckets]} if self.position.buckets else {}
            ),
            "worker": list(self.worker) if self.worker else None,
        }

    def load(self, state: Mapping[str, Any], *, num_packs: int, buckets: tuple[int, ...] = ()) -> StreamState:
        """The state that a dict holds, if it belongs to this stream; raises StateError.

        `buckets`: the packs of each length, where steps are of one length each.
        """
        if "version" not in state:
            raise StateError(
                f"the state has {', '.join(map(repr, state)) or 'nothing'}: it is none of a PackedStream or "
                "PackBatchSampler; load what state_dict() of one gave, and what a loader gave into a loader"
            )
        version = state["version"]
        if version != STATE_VERSION:
            raise StateError(
                f"the state has version {version!r}, this padless reads {STATE_VERSION}; "
                "load it with the padless that saved it"
            )
        if state.get("data") != self.data:
            raise StateError(
                f"the state belongs to the packed data {state.get('data')!r}, these are {self.data!r}: "
                "another folder, plan or split; open the one that it was saved with, or start anew"
            )
        for name, own in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state.get(name) != own:
                raise StateError(
                    f"the state was saved with {name}={state.get(name)!r}, this stream has {name}={own!r}; "
                    f"open the stream with {name}={state.get(name)!r}, or start anew"
                )
        if state.get("ranks_served"):
            raise StateError(
                "the state is a PackBatchSampler's, taken within a step: load one that was taken behind the "
                "last rank's batch"
            )
        try:
            epoch = int(state["epoch"])
            position = _position(state, epoch, num_packs)
            listed = [*state.get("buckets", ())]
            worker = state["worker"] and (int(state["worker"][0]), int(state["worker"][1]))
            if len(listed) == len(buckets):
                parts = [_position(one, epoch, packs) for one, packs in zip(listed, buckets, strict=True)]
                position = replace(position, buckets=tuple(parts))
            elif listed and buckets:
                raise ValueError(f"{len(listed)} lengths, of which there are {len(buckets)}")
        except StateError:  # which is a ValueError too
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
            raise StateError(f"the state is damaged ({problem!r}); load an earlier one") from None
        begun = bool(position.taken) if buckets else bool(listed)
        if begun and len(listed) != len(buckets):
            way = "with" if listed else "without"
            raise StateError(
                f"the state was saved in steps {way} tokens_per_batch over packs of several lengths, this "
                f"stream makes others: open it {way} tokens_per_batch, or start anew"
            )
        return replace(self, position=position, worker=worker or None)


def _numbers(position: Position) -> dict[str, Any]:
    """How far one length has gone."""
    return {"taken": position.taken, "left": position.left.tolist(), "group": position.group}


def _position(state: Mapping[str, Any], epoch: int, num_packs: int) -> Position:
    """A position among `num_packs` packs; StateError where it is none, and what reading the dict raises."""
    left = np.array(state["left"], dtype=np.int64).reshape(-1)
    taken, group = int(state["taken"]), int(state["group"])
    inside = 0 <= taken <= num_packs and ((left >= 0) & (left < num_packs)).all()
    if (
        not 0 <= epoch < LAST_EPOCH
        or group < 0
        or not inside
        or len(np.unique(left)) != len(left)
        or len(left) > taken
    ):
        raise StateError(
            f"the state is damaged: epoch {epoch}, {taken} of {num_packs} packs taken, {len(left)} of "
            "them left; load an earlier one"
        )
    return Position(epoch=epoch, taken=taken, left=left, group=group)


def data_identity(manifest: Manifest, plan: Plan | None = None) -> str:
    """A checksum over what the packs are: their plan, and the bytes of every shard."""
    hashed = manifest.plan_hash if plan is None else str(plan.facts["plan_hash"])
    parts = [hashed, *(shard.checksum for shard in manifest.shards)]
    return checksum_bytes("\n".join(parts).encode())
