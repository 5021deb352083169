"""Packs as a data set for any loader, and as a stream of ready batches, the same on every rank.

    stream = PackedStream("packed", packs_per_batch=4)
    for batch in stream:                        # this rank's batches of one epoch
        model(**batch.to("cuda").model_inputs())
        torch.save(stream.state_dict(), ...)    # goes on with the next batch, on any number of ranks

Every rank computes the whole order and takes its part of each step: no talk between ranks, and
always the same number of batches. The price is that one process knows nothing about slow others;
`balance="attention"` gives ranks packs of like cost instead.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import IterableDataset, get_worker_info

from padless.runtime.arrays import to_numpy
from padless.runtime.batch import Pack
from padless.runtime.bucket_order import BucketOrder, BucketWindow
from padless.runtime.collate import collate
from padless.runtime.dataset import PackedDataset
from padless.runtime.errors import StateError, StreamError
from padless.runtime.gather import Gather
from padless.runtime.loader_state import find_state, position_after
from padless.runtime.order import Position, StepOrder, Window, idle_share
from padless.runtime.ranks import (
    LOADERS,
    find_ranks,
    has_no_exact_states,
    is_called_by,
    refuse_to_be_split,
)
from padless.runtime.reader import PackedReader
from padless.runtime.schema import NONE_IS, OWN_COLUMNS, ColumnInfo, parse_type
from padless.runtime.steps import pack_costs, shuffle_of, step_order
from padless.runtime.stream_state import StreamState, data_identity
from padless.runtime.varlen_batch import VarlenBatch

__all__ = ["PackedDataset", "PackedStream"]

_LOG = logging.getLogger(__name__)
_REMAINDERS = ("drop", "pad")


class PackedStream(IterableDataset[VarlenBatch]):
    """This rank's batches, epoch after epoch; each `for` goes to the end of the current epoch.

    With DataLoader workers (`DataLoader(stream, batch_size=None, num_workers=2)`) the batches and
    their order are the same, but it is the workers' copies that advance: name the epoch with
    `set_epoch` before each pass, and take states through torchdata's StatefulDataLoader. Persistent
    workers go from epoch to epoch by themselves, do not hear of `set_epoch`, and raise StreamError where
    a pass begins after one that was broken off.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        packs_per_batch: int = 1,
        tokens_per_batch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool | str = True,
        remainder: str = "drop",
        balance: str | None = None,
        plan: str | None = None,
        replan: str | None = None,
        split: str | None = None,
        verify: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a folder for one of `world_size` data-parallel ranks.

        Ranks come from torch.distributed where it is initialised, else from RANK and WORLD_SIZE,
        else there is one. Packs that do not fill the last step are left out of an epoch ("drop"),
        or all are yielded once and ranks without any get a batch without targets ("pad").
        `tokens_per_batch` instead of packs: a step has packs of one length, on each rank as many as have
        room for so many tokens; where packs are of several lengths, the steps of all are mixed.
        `shuffle` is over all packs (True) or among those of a few shards at a time ("shards"), as it is
        always where the path is a URL, unless a plan gathers packs from all shards. `replan` names a strategy
        (such as "spread") that packs the sequences anew for each epoch. `verify` and `storage_options` are
        PackedReader's: without `verify` a changed byte of a local shard is seen when a batch is to have it.
        Raises StreamError, and what PackedReader raises.
        """
        super().__init__()
        if plan is not None and replan is not None:
            raise StreamError(f"plan is {plan!r} and replan {replan!r}: give one, packs are by one plan")
        if not 0 <= seed < 2**62:
            raise StreamError(f"seed is {seed}; it is from 0 to 2**62 - 1")
        self.reader = PackedReader(
            path, split=split, plan=plan, verify=verify, storage_options=storage_options
        )
        if replan is not None and (self.reader.remote is not None or shuffle == "shards"):
            raise StreamError(
                f"replan={replan!r} makes packs out of all shards: it takes a local folder and shuffle=True"
            )
        self.replan, self._seed, self._shuffle = replan, seed, shuffle
        self._planned_epoch = -1
        self.rank, self.world_size = find_ranks(rank, world_size)
        if remainder not in _REMAINDERS:
            raise StreamError(f"remainder is {remainder!r}; it is one of {', '.join(_REMAINDERS)}")
        self.packs_per_batch, self.tokens_per_batch = packs_per_batch, tokens_per_batch
        self.remainder, self.balance = remainder, balance
        data = data_identity(self.reader.manifest, self.reader.plan)
        self._order, self._gather = self._order_of_packs(self._steps), Gather(self.reader)
        self._plan_epoch(max(epoch, 0))
        self._state = StreamState(
            data=data if replan is None else f"{data} by {replan}",
            seed=seed,
            shuffle=shuffle_of(self.reader, shuffle),
            position=Position(epoch=0),
        )
        self._reached: tuple[Window | BucketWindow, int, tuple[int, int]] | None = None
        self._under_way = False
        self._without_states = False
        self._in_workers = _shared_flag()
        if not len(self):
            order = self._order
            groups = [one.group for one in order.orders] if isinstance(order, BucketOrder) else [order.group]
            raise StreamError(
                f"{self.reader.location} has {len(self.reader)} packs, a step of {self.world_size} "
                f"ranks takes {min(groups)}: no batch is full; take fewer packs a batch, or "
                "remainder='pad' (for evaluation)"
            )
        self.set_epoch(epoch)

    @property
    def _steps(self) -> dict[str, Any]:
        """What steps are made by: options of `step_order`."""
        return {
            "packs_per_batch": self.packs_per_batch,
            "tokens_per_batch": self.tokens_per_batch,
            "world_size": self.world_size,
            "balance": self.balance,
            "pads": self._pads,
        }

    def _order_of_packs(self, steps: Mapping[str, Any], *, checked: bool = True) -> StepOrder | BucketOrder:
        return step_order(self.reader, seed=self._seed, shuffle=self._shuffle, checked=checked, **steps)

    def _plan_epoch(self, epoch: int) -> None:
        """Have the packs of an epoch's own plan; every rank makes the same one."""
        if self.replan is not None and epoch != self._planned_epoch:
            self.reader = self.reader.replanned(self.replan, seed=self._seed, epoch=epoch)
            # A later epoch may have a pack less of a length: no reason to stop in the middle of a training.
            is_first = self._planned_epoch < 0
            self._order, self._planned_epoch = self._order_of_packs(self._steps, checked=is_first), epoch
            self._gather = Gather(self.reader)

    def __len__(self) -> int:
        """This rank's batches in a whole epoch; the same number on every rank."""
        return self._order.num_steps(Position(epoch=0), self._pads)

    @property
    def _pads(self) -> bool:
        return self.remainder == "pad"

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._settled().position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch. At its own epoch a stream stays where it is."""
        if epoch < 0:
            raise StreamError(f"epoch is {epoch}; epochs count from 0")
        self._in_workers[0] = 0
        if epoch != self.epoch:
            self._go(Position(epoch=epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins: the same on every rank after the same step.

        Raises StreamError where DataLoader workers made the last batches: their copies know, this one
        does not. In a worker it is what a StatefulDataLoader asks for.
        """
        if self._place()[1]:
            return self._settled().to_dict() | {"steps": self._steps}
        if self._in_workers[0]:
            raise StreamError(
                "the batches were made by the copies of this stream in DataLoader workers, so its own state "
                "is an old one: take states of torchdata's StatefulDataLoader, or make batches ahead without "
                "workers (num_workers=0, padless.runtime.prefetch.Prefetch); set_epoch() starts an epoch anew"
            )
        return self._settled().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with any number of ranks, workers and packs a batch.

        It is one of `state_dict()`, or the whole state of a StatefulDataLoader over a stream, with which
        a new loader goes on under another number of workers too: load it here, not into the loader.
        Raises StateError for a state of another data set, seed, shuffle or version, and of what it is not.
        """
        found = find_state(state)
        epoch = found.state.get("epoch")
        try:
            if isinstance(epoch, int) and epoch >= 0:
                self._plan_epoch(epoch)
            orders = self._order.orders if isinstance(self._order, BucketOrder) else ()
            buckets = tuple(order.num_packs for order in orders)
            loaded = self._state.load(found.state, num_packs=self._order.num_packs, buckets=buckets)
            if found.steps:
                order = self._order_that_made(found.state)
                loaded = loaded.at(position_after(order, loaded.position, found.steps))
            self._state = loaded.taken_up(*self._place())
            self._reached, self._under_way = None, False
            self._in_workers[0] = 0
        finally:
            self._plan_epoch(self.epoch)
        if self._state.worker is None:
            self._end_epoch()

    def _order_that_made(self, state: Mapping[str, Any]) -> StepOrder | BucketOrder:
        """The order, in steps as they were when the state was taken."""
        try:
            return self._order_of_packs({**state["steps"]}, checked=False)
        except (KeyError, TypeError, StreamError) as problem:
            raise StateError(f"the state does not say how its steps were made ({problem!r})") from None

    @staticmethod
    def _place() -> tuple[int, int]:
        """The DataLoader worker that this is, and of how many; 0 of 0 where it is none."""
        info = get_worker_info()
        return (0, 0) if info is None else (info.id, info.num_workers)

    def __iter__(self) -> Iterator[VarlenBatch]:
        refuse_to_be_split()
        return self._batches()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker cannot see whose loader it works for; the process that pickles for it can.
        refuse_to_be_split()
        if is_called_by(*LOADERS):
            self._in_workers[0] = 1
        kept = {key: value for key, value in self.__dict__.items() if key != "_in_workers"}
        return kept | {"_without_states": has_no_exact_states()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _in_workers=_shared_flag())

    def predicted_idle(self, *, world_size: int | None = None) -> float:
        """The share of the current epoch for which ranks would wait for the slowest of each step.

        By cost 24,576 L + L^2 summed over a pack's sequences; from 0 to 1.
        """
        world = world_size or self.world_size
        order = self._order_of_packs(self._steps | {"world_size": world})
        steps = order.whole_steps(Position(epoch=self.epoch))
        return idle_share(pack_costs(self.reader), world, steps)

    def _batches(self) -> Iterator[VarlenBatch]:
        """The rest of the epoch."""
        worker, workers = self._place()
        if workers:
            self._begin_in_worker(workers)
        place = worker, workers = worker, max(workers, 1)
        rank, world_size, gather = self.rank, self.world_size, self._gather
        begun = self._settled()
        first = begun.first_step(worker, workers)
        remaining = self._order.num_steps(begun.position, self._pads)
        number = 0
        for window in self._order.windows(begun.position):
            packs = window.packs
            if self._order.near is not None and isinstance(window, Window):
                here = max(0, window.taken - len(packs))
                self.reader.read_ahead(self._order.near.needed(here, window.epoch))
            for start in range(0, len(packs), window.step):
                if not remaining:
                    break
                mine = number % workers == first
                number += 1
                end = min(start + window.step, len(packs))
                remaining -= 1
                if mine:
                    chosen = packs[start + rank : end : world_size]
                    batch = gather(chosen) if len(chosen) else _without_targets(self.reader.manifest.columns)
                    self._reached = window, end, place
                    if workers == 1 and not remaining:
                        self._end_epoch()
                    yield batch
        if self.epoch == begun.position.epoch:
            self._go(Position(epoch=begun.position.epoch + 1))

    def _begin_in_worker(self, workers: int) -> None:
        """Begin a pass that the process with the loader does not see; raises StreamError."""
        self._in_workers[0] = 1
        if workers > 1 and (self._without_states or has_no_exact_states()):
            raise StreamError(
                "a StatefulDataLoader with in_order=False yields the batches of its workers as they come, "
                "and its states do not say which have come: leave in_order=False out, or take torch's own "
                "DataLoader, without states"
            )
        if self._under_way:
            raise StreamError(
                "the pass before this one was broken off, and what the persistent workers had made ahead is "
                "lost: leave persistent_workers=True out, or go through each pass to its end"
            )
        self._under_way = True

    def _settled(self) -> StreamState:
        """The state after the last batch: made where it is asked for, not with every batch."""
        if self._reached is not None:
            window, packs, worker = self._reached
            self._state = self._state.at(window.after(packs), worker=worker)
            self._reached = None
        return self._state

    def _go(self, position: Position) -> None:
        self._plan_epoch(position.epoch)
        self._state, self._reached, self._under_way = self._state.at(position), None, False

    def _end_epoch(self) -> None:
        """Move on where what remains of the epoch makes no batch, so that a state says so."""
        position = self._settled().position
        if not self._order.num_steps(position, self._pads):
            if remaining := self._order.remaining(position):
                _LOG.info("epoch %d leaves %d packs out: they fill no step", position.epoch, remaining)
            self._go(Position(epoch=position.epoch + 1))


def _shared_flag() -> mmap.mmap:
    """A byte, 0 at first, that forked processes share with this one."""
    return mmap.mmap(-1, 1)


def _without_targets(columns: Sequence[ColumnInfo]) -> VarlenBatch:
    """What a rank computes where no pack is left for it: two tokens of no sequence, untrained.

    Two, because losses shift by one, and some fail on nothing. Further columns are zeros, or what says that a
    sequence has none (NONE_IS).
    """
    further = [column for column in columns if column.name not in OWN_COLUMNS]
    none = np.full(2, -100, dtype=np.int32)
    return collate(
        [
            Pack(
                input_ids=np.zeros(2, dtype=np.int32),
                labels=none,
                seq_lengths=np.array([2], dtype=np.int32),
                sequence_ids=np.array([-1], dtype=np.int64),
                num_tokens=2,
                num_targets=0,
                max_seqlen=2,
                attention_cost=4,
                extras={column.name: _zeros(column) for column in further},
                extra_levels={column.name: column.level for column in further},
            )
        ]
    )


def _zeros(column: ColumnInfo) -> Any:
    """A further column's cell in a pack of two tokens and one sequence: zeros, NONE_IS, or empty strings."""
    kind = parse_type(column.type)
    empty = to_numpy(pa.array([], type=kind if column.level == "pack" else kind.value_type))
    cell = np.zeros((2 if column.level == "token" else 1, *empty.shape[1:]), dtype=empty.dtype)
    if empty.dtype == object:
        cell[:] = ""
    elif column.level == "sequence" and empty.dtype.kind in "if":
        cell[:] = NONE_IS.get(column.name, 0)
    return cell[0] if column.level == "pack" else cell
