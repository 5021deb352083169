"""A plan and the tokens of its sequences to shards, at memory speed.

Tokens are gathered when Arrow writes them, a slice at a time, straight into the blocks that go to the disk:
touching fresh memory costs more than filling it, and no batch is ever in memory (but where it is compressed).
A shard gets its final name, which carries its checksum, when it is complete and on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.arrow_lists import flat_array, list_array
from padless.packer.durable import DurableFile
from padless.packer.gather import BatchGather, Gather
from padless.packer.late_columns import LateFile, Slices
from padless.packer.plan import PackPlan, pack_tokens
from padless.runtime.format import ColumnInfo, ShardInfo, shard_schema

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 32 * 2**20
"""Token bytes of a record batch, at most (or one pack)."""
STRING_BYTES = 96
"""What a text at sequence level takes, about."""
SLICE_TOKENS = 2**19
"""Tokens gathered at a time: temporaries stay in a core's own cache."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What every shard of a folder has in common."""

    id_type: str
    labels: bool
    compression: str | None
    shard_bytes: int
    extras: tuple[ColumnInfo, ...] = ()

    def pack_bytes(self, tokens: NDArray[Any], sequences: NDArray[Any]) -> NDArray[np.int64]:
        """About what packs take in a shard."""
        token = np.dtype(self.id_type).itemsize + (4 if self.labels else 0)
        sequence = 12
        for column in self.extras:
            size = _value_bytes(column.type)
            if column.level == "token":
                token += size
            else:
                sequence += size
        found: NDArray[np.int64] = tokens * token + sequences * sequence + 36
        return found


def _value(kind: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape of a value: `list<int32>` -> int32, (); `list<fixed_size_list<float32, 8>>` -> (8,)."""
    inner, _, count = kind[5:-1].removeprefix("fixed_size_list<").removesuffix(">").partition(", ")
    return np.dtype(inner), (int(count),) if count else ()


def _value_bytes(kind: str) -> int:
    """Bytes of a value; of a string about."""
    if kind == "list<string>":
        return STRING_BYTES
    dtype, shape = _value(kind)
    return dtype.itemsize * int(np.prod(shape))


def cut_shards(plan: PackPlan, lengths: NDArray[np.int32], layout: Layout) -> list[list[tuple[int, int]]]:
    """Packs [start, stop) of each record batch, by shard: filled in order up to the two limits."""
    id_bytes = np.dtype(layout.id_type).itemsize
    token_ends = np.zeros(len(plan) + 1, dtype=np.int64)
    np.cumsum(pack_tokens(plan, lengths), out=token_ends[1:])
    byte_ends = np.zeros(len(plan) + 1, dtype=np.int64)
    np.cumsum(layout.pack_bytes(np.diff(token_ends), np.diff(plan.offsets)), out=byte_ends[1:])
    shards: list[list[tuple[int, int]]] = []
    start = shard_start = 0
    while start < len(plan):
        by_batch = np.searchsorted(token_ends, token_ends[start] + BATCH_BYTES // id_bytes, "right") - 1
        by_shard = np.searchsorted(byte_ends, byte_ends[shard_start] + layout.shard_bytes, "right") - 1
        if not shards or by_shard <= start:  # the shard is full
            shards.append([])
            shard_start = start
            by_shard = np.searchsorted(byte_ends, byte_ends[start] + layout.shard_bytes, "right") - 1
        stop = max(start + 1, min(int(by_batch), int(by_shard)))
        shards[-1].append((start, stop))
        start = stop
    return shards


def write_shard(
    folder: str,
    number: int,
    batches: list[tuple[int, int]],
    plan: PackPlan,
    gather: Gather,
    layout: Layout,
    report: Callable[[int], None],
    attempt: str = "",
) -> ShardInfo:
    """Write one shard; `report` gets the tokens of each batch as it is done.

    `attempt` (8 hex digits) keeps apart who may be writing the same shard at the same time.
    """
    import pyarrow as pa

    schema = shard_schema(layout.id_type, labels=layout.labels, extras=layout.extras)
    options = pa.ipc.IpcWriteOptions(compression=layout.compression)
    begin = schema.serialize().size  # the schema is written together with the first batch
    places: list[tuple[int, int]] = []
    tokens = 0
    name = f"shard-{number:05d}"
    unfinished = f"{name}-{attempt}" if attempt else name
    with DurableFile(folder, unfinished, direct=True, blocks=True) as file:
        late = LateFile(file)
        with pa.ipc.new_stream(pa.PythonFile(late, mode="w"), schema, options=options) as stream:
            for start, stop in batches:
                batch, count = _batch(start, stop, plan, gather, layout, schema, late)
                places.append((max(file.size, begin), batch.num_rows))
                stream.write_batch(batch)
                late.check()
                tokens += count
                report(count)
        info = file.commit(lambda checksum: f"{name}-{checksum[5:13]}.arrow")
    first, last = batches[0][0], batches[-1][1]
    return ShardInfo(
        file=info.file,
        packs=last - first,
        sequences=int(plan.offsets[last] - plan.offsets[first]),
        tokens=tokens,
        bytes=info.bytes,
        checksum=info.checksum,
        batches=tuple(places),
        block_checksums=file.block_checksums,
    )


def _batch(
    start: int,
    stop: int,
    plan: PackPlan,
    split: Gather,
    layout: Layout,
    schema: pa.Schema,
    late: LateFile,
) -> tuple[pa.RecordBatch, int]:
    """Packs [start, stop) as a record batch for `late` alone, and how many tokens they have."""
    import pyarrow as pa

    first = int(plan.offsets[start])
    sequences = plan.order[first : int(plan.offsets[stop])]
    gather = split.of_batch(start, sequences)
    sequence_offsets = plan.offsets[start : stop + 1] - first
    lengths = gather.lengths.take(sequences)
    ends = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    token_offsets = ends[sequence_offsets]
    total = int(ends[-1])
    starts = sequence_offsets[:-1]
    targets = np.empty(len(starts), dtype=np.int32)

    def ids() -> Iterator[NDArray[Any]]:
        counts = np.zeros(len(sequences), dtype=np.int64)
        for low, high in _slices(ends):
            found, counts[low:high] = gather.tokens(sequences[low:high])
            yield found.astype(layout.id_type, copy=False)
        targets[:] = np.add.reduceat(counts, starts)  # their column comes after this one

    def by_token(kind: str, values: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
        dtype, shape = _value(kind)

        def slices() -> Iterator[NDArray[Any]]:
            return (values(sequences[low:high]).astype(dtype, copy=False) for low, high in _slices(ends))

        return tokens_of((total, *shape), dtype, slices)

    def tokens_of(shape: tuple[int, ...], dtype: np.dtype[Any], slices: Slices) -> NDArray[Any]:
        if layout.compression is None:
            return late.column(shape, dtype, slices)
        return np.concatenate([*slices()])

    columns = {
        "input_ids": list_array(tokens_of((total,), np.dtype(layout.id_type), ids), token_offsets),
        "labels": list_array(by_token("list<int32>", gather.labels), token_offsets)
        if layout.labels
        else None,
        "seq_lengths": list_array(lengths, sequence_offsets),
        "sequence_ids": list_array(_line_ids(gather, sequences), sequence_offsets),
        "num_tokens": flat_array(np.diff(token_offsets).astype(np.int32)),
        "num_targets": flat_array(targets),
        "max_seqlen": flat_array(np.maximum.reduceat(lengths, starts)),
        "attention_cost": flat_array(np.add.reduceat(lengths.astype(np.int64) ** 2, starts)),
    }
    for column in layout.extras:
        if column.level == "token":
            values = by_token(column.type, partial(gather.extra, column.name))
            columns[column.name] = list_array(values, token_offsets)
        else:
            columns[column.name] = list_array(gather.extra(column.name, sequences), sequence_offsets)
    arrays = [columns[name] for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema), total


def _slices(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of sequences of about SLICE_TOKENS."""
    low = 0
    while low < len(ends) - 1:
        high = int(np.searchsorted(ends, ends[low] + SLICE_TOKENS, "right")) - 1
        high = min(max(high, low + 1), len(ends) - 1)
        yield low, high
        low = high


def _line_ids(gather: BatchGather, sequences: NDArray[Any]) -> NDArray[np.int64]:
    ids = sequences if gather.ids is None else gather.ids[sequences]
    return ids.astype(np.int64)
