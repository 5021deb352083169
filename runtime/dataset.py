"""Packs by number, and the batches of numbers that trainers with a sharding of their own deal out.

    dataset = PackedDataset("packed")
    sampler = PackBatchSampler(dataset, packs_per_batch=4, world_size=2)
    loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate))

accelerate gives batch number n to rank n modulo the ranks. The sampler has the batches of a step
behind each other, in whole steps: so each rank gets its own, as many as the others, and none twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Sampler

from padless.runtime.batch import Pack
from padless.runtime.bucket_order import BucketOrder
from padless.runtime.errors import StateError, StreamError
from padless.runtime.order import Position
from padless.runtime.ranks import is_accelerates_count
from padless.runtime.reader import PackedReader
from padless.runtime.steps import check_epoch, shuffle_of, step_order
from padless.runtime.stream_state import StreamState, data_identity


class PackedDataset(Dataset[Pack]):
    """The packs of a folder by number, for `DataLoader(..., collate_fn=collate)` and trainers."""

    def __init__(
        self,
        path: str | Path,
        *,
        split: str | None = None,
        plan: str | None = None,
        verify: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a folder; options are PackedReader's, and so is what it raises."""
        self.reader = PackedReader(
            path, split=split, plan=plan, verify=verify, storage_options=storage_options
        )

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Pack:
        return self.reader[index]

    @property
    def path(self) -> Path:
        """The packed folder."""
        return self.reader.path

    def to_hf(self) -> Any:
        """The same packs as a `datasets.Dataset`, memory-mapped; raises StreamError by a plan or of a URL."""
        from datasets import load_from_disk

        if self.reader.remote is not None:
            raise StreamError(
                f"a datasets.Dataset is mapped from a folder, and {self.reader.location} is a URL: copy it "
                "here"
            )
        if self.reader.plan is not None:
            raise StreamError(
                "a datasets.Dataset has the packs as they are stored, not by a plan; repack them"
            )
        return load_from_disk(str(self.reader.path))


class PackBatchSampler(Sampler[list[int]]):
    """The batches of all ranks, step after step, for loaders that split batches over ranks.

    Each pass is one epoch and moves to the next; packs that do not fill a step are left out. A pass that
    was broken off begins anew. StatefulDataLoader keeps states of it that go on anywhere.
    """

    # What accelerate asks a batch sampler: nothing is incomplete here, so nothing is filled up.
    drop_last = True

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        world_size: int,
        packs_per_batch: int = 1,
        tokens_per_batch: int | None = None,
        seed: int = 0,
        shuffle: bool | str = True,
        balance: str | None = None,
    ) -> None:
        """Order the packs of a data set; arguments as of PackedStream. Raises StreamError."""
        self.batch_size = packs_per_batch
        self.world_size = world_size
        self._steps: dict[str, Any] = {
            "packs_per_batch": packs_per_batch,
            "tokens_per_batch": tokens_per_batch,
        }
        self._steps |= {"world_size": world_size, "balance": balance}
        self._order = step_order(dataset.reader, seed=seed, shuffle=shuffle, **self._steps)
        self._state = StreamState(
            data=data_identity(dataset.reader.manifest, dataset.reader.plan),
            seed=seed,
            shuffle=shuffle_of(dataset.reader, shuffle),
            position=Position(epoch=0),
        )
        self._start = Position(epoch=0), 0
        """Where the next pass begins: behind whole steps, and behind the batches of so many ranks."""
        self._reached: tuple[Position, int] | None = None
        """Where the pass stands that is under way."""
        if not len(self):
            raise StreamError(
                f"{len(dataset)} packs fill no step of {world_size} ranks with {packs_per_batch} packs each; "
                "take fewer packs a batch or fewer ranks"
            )

    def __len__(self) -> int:
        """Batches of an epoch over all ranks."""
        return self._order.num_steps(Position(epoch=0), False) * self.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is under way, or else of the next one."""
        return self._start[0].epoch

    def __iter__(self) -> Iterator[list[int]]:
        self._reached = None
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        position, served = self._start
        self._start = Position(epoch=position.epoch), 0
        for window in self._order.windows(position):
            for start in range(0, len(window.packs) - window.step + 1, window.step):
                step, after = window.packs[start : start + window.step], window.after(start + window.step)
                for rank in range(served, self.world_size):
                    self._reached = (position, rank + 1) if rank + 1 < self.world_size else (after, 0)
                    yield step[rank :: self.world_size].tolist()
                position, served = after, 0
        self._start, self._reached = (Position(epoch=self.epoch + 1), 0), None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. At its own epoch a sampler stays where a state has put it.

        What accelerate's loaders say by themselves is passed over, since a sampler goes from epoch to epoch.
        Raises StreamError.
        """
        check_epoch(epoch)
        if epoch != self.epoch and not is_accelerates_count():
            self._start = Position(epoch=epoch), 0

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, by what was taken: loaders that take ahead keep a state a batch."""
        position, served = self._reached or self._start
        own = self._state.at(position).to_dict()
        return own | ({"ranks_served": served, "steps": self._steps} if served else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass at a state, with any number of ranks and packs a batch.

        It is a sampler's or a stream's. Raises StateError for one of another data set, seed, shuffle or
        version, and for one within a step where steps are others now.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"the state is a {type(state).__name__}, not the dict that state_dict() gave")
        served = state.get("ranks_served", 0)
        if served and (state.get("steps") != self._steps or served not in range(self.world_size)):
            raise StateError(
                f"the state was taken behind the batches of {served} ranks in a step of "
                f"{state.get('steps')}, steps are of {self._steps} now: go on with those, or load a state "
                "that was taken behind the last rank's batch"
            )
        orders = self._order.orders if isinstance(self._order, BucketOrder) else ()
        buckets = tuple(order.num_packs for order in orders)
        whole = {key: value for key, value in state.items() if key != "ranks_served"}
        position = self._state.load(whole, num_packs=self._order.num_packs, buckets=buckets).position
        if not self._order.num_steps(position, False):
            position = Position(epoch=position.epoch + 1)
        self._start, self._reached = (position, served), None
