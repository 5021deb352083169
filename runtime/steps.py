"""Which options make which steps: the order of a reader's packs, for streams and samplers alike.

Options are refused here with what they would have done, before a pack is read; what an order is, is
the business of `padless.runtime.order` and `bucket_order`.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral

import numpy as np

from padless.runtime.bucket_order import BucketOrder
from padless.runtime.errors import StreamError
from padless.runtime.order import LAST_EPOCH, Numbers, StepOrder, attention_costs
from padless.runtime.reader import PackedReader
from padless.runtime.shard_order import ShardShuffle


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
    refuse_fractions(packs_per_batch=packs_per_batch, world_size=world_size, seed=seed)
    if tokens_per_batch is not None:
        refuse_fractions(tokens_per_batch=tokens_per_batch)
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


def refuse_fractions(**options: object) -> None:
    """Raise StreamError for an option that is no whole number."""
    for name, value in options.items():
        if not isinstance(value, Integral):
            raise StreamError(f"{name} is {value!r}; give a whole number")


def check_epoch(epoch: int) -> None:
    """Raise StreamError for an epoch that there is not."""
    refuse_fractions(epoch=epoch)
    if not 0 <= epoch < LAST_EPOCH:
        raise StreamError(f"epoch is {epoch}; it is from 0 to 2**62 - 1")


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
