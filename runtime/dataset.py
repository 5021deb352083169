"""Packs by number, and the batches of numbers that trainers with a sharding of their own deal out.

    dataset = PackedDataset("packed")
    sampler = PackBatchSampler(dataset, packs_per_batch=4, world_size=2)
    loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate))

accelerate gives batch number n to rank n modulo the ranks. The sampler has the batches of a step
behind each other, in whole steps: so each rank gets its own, as many as the others, and none twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from padless.runtime.batch import Pack
from padless.runtime.bucket_order import BucketOrder
from padless.runtime.errors import StreamError
from padless.runtime.order import Numbers, Position, StepOrder, attention_costs
from padless.runtime.reader import PackedReader
from padless.runtime.shard_order import ShardShuffle


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

    Each pass is one epoch and moves to the next; packs that do not fill a step are left out.
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
        self.epoch = 0
        self._order = step_order(
            dataset.reader,
            packs_per_batch=packs_per_batch,
            tokens_per_batch=tokens_per_batch,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            balance=balance,
        )
        if not len(self):
            raise StreamError(
                f"{len(dataset)} packs fill no step of {world_size} ranks with {packs_per_batch} packs each; "
                "take fewer packs a batch or fewer ranks"
            )

    def __len__(self) -> int:
        """Batches of an epoch over all ranks."""
        return self._order.num_steps(Position(epoch=0), False) * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._order.whole_steps(Position(epoch=self.epoch)):
            yield from (step[rank :: self.world_size].tolist() for rank in range(self.world_size))
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch


def step_order(
    reader: PackedReader,
    *,
    packs_per_batch: int,
    world_size: int,
    seed: int,
    shuffle: bool | str,
    balance: str | None,
    tokens_per_batch: int | None = None,
    pads: bool = False,
    checked: bool = True,
) -> StepOrder | BucketOrder:
    """The order of a reader's packs in steps of all ranks; raises StreamError for wrong options.

    `checked`: that every length fills a step is one of them; otherwise an epoch may leave all of one out.
    """
    if packs_per_batch < 1:
        raise StreamError(f"packs_per_batch is {packs_per_batch}; a batch takes at least 1 pack")
    if world_size < 1:
        raise StreamError(f"world_size is {world_size}; there is at least 1 rank")
    if balance not in (None, "attention"):
        raise StreamError(f"balance is {balance!r}; it is None or 'attention'")
    if shuffle not in (True, False, "shards"):
        raise StreamError(f"shuffle is {shuffle!r}; it is True, False or 'shards'")
    if not 0 <= seed < 2**62:
        raise StreamError(f"seed is {seed}; it is from 0 to 2**62 - 1")
    whole = StepOrder(
        num_packs=len(reader),
        group=packs_per_batch * world_size,
        seed=seed,
        shuffle=bool(shuffle),
        costs=pack_costs(reader) if balance else None,
        near=_shard_shuffle(reader, seed) if shuffle_of(reader, shuffle) == "shards" else None,
    )
    if tokens_per_batch is None:
        return whole
    if packs_per_batch != 1:
        raise StreamError(
            f"packs_per_batch is {packs_per_batch} and tokens_per_batch {tokens_per_batch}: give one of them"
        )
    return _by_length(reader, whole, tokens_per_batch, pads, checked)


def _by_length(
    reader: PackedReader, whole: StepOrder, tokens: int, pads: bool, checked: bool
) -> StepOrder | BucketOrder:
    """Steps of packs of one length each, as many as `tokens` a batch and rank have room for."""
    longest, ranks = reader.buckets[-1].max_length, whole.group
    if tokens < longest:
        raise StreamError(
            f"tokens_per_batch is {tokens:,} and packs hold up to {longest:,}: a batch takes at least 1 "
            f"pack, give {longest:,} or more"
        )
    if len(reader.buckets) == 1:
        return replace(whole, group=tokens // longest * ranks)
    if whole.near is not None:
        raise StreamError(
            "tokens_per_batch takes packs of one length a batch, and shuffle='shards' (which a URL needs) "
            "goes by where packs lie: copy the folder, and leave shuffle='shards' out"
        )
    orders, first = [], 0
    for bucket in reader.buckets:
        mine = slice(first, first + bucket.packs)
        first += bucket.packs
        group = tokens // bucket.max_length * ranks
        if checked and not pads and 0 < bucket.packs < group:
            raise StreamError(
                f"{bucket.packs:,} packs of {bucket.max_length:,} tokens fill no step of {ranks:,} ranks "
                f"with {group // ranks:,} packs each, so they would never be seen: take fewer ranks or "
                f"tokens, remainder='pad', or pack with --packs-multiple {group:,}"
            )
        costs = None if whole.costs is None else whole.costs[mine]
        orders.append(replace(whole, num_packs=bucket.packs, group=group, costs=costs))
    return BucketOrder(orders=tuple(orders), seed=whole.seed, pads=pads)


def shuffle_of(reader: PackedReader, shuffle: bool | str) -> bool | str:
    """How packs are shuffled: stored ones behind a URL shard by shard; a plan gathers from all shards."""
    by_shards = reader.remote is not None and reader.plan is None
    return "shards" if shuffle is True and by_shards else shuffle


def _shard_shuffle(reader: PackedReader, seed: int) -> ShardShuffle:
    if reader.plan is not None:
        raise StreamError("shuffle='shards' goes by stored packs and plan= by others; give one of them")
    return ShardShuffle(shard_packs=tuple(shard.packs for shard in reader.manifest.shards), seed=seed)


def pack_costs(reader: PackedReader) -> Numbers:
    """The cost of each pack, from the sequence table: the shards stay untouched."""
    packs, lengths = reader.pack_sizes()
    lengths = lengths.astype(np.float64)
    # Sums of whole numbers below 2**53: exact in doubles.
    tokens = np.bincount(packs, weights=lengths, minlength=len(reader))
    squares = np.bincount(packs, weights=lengths * lengths, minlength=len(reader))
    return attention_costs(tokens.astype(np.int64), squares.astype(np.int64))
