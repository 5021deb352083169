"""A plan and the token store to shards, at memory speed.

A pack's tokens are gathered by one `take` over a binary array laid on the mapped store, an element a
sequence: a copy per sequence, no index per token. A shard gets its final name, which carries its checksum,
when it is complete and on the disk.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from padless.packer.plan import PackPlan
from padless.packer.token_store import disk_full
from padless.runtime.format import IGNORE_INDEX, ColumnInfo, FileInfo, ShardInfo, shard_schema

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 32 * 2**20
"""Token bytes of a record batch, at most (or one pack)."""
SLICE_TOKENS = 2**18
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
            size = np.dtype(column.type[5:-1]).itemsize  # list<float32>
            if column.level == "token":
                token += size
            else:
                sequence += size
        found: NDArray[np.int64] = tokens * token + sequences * sequence + 36
        return found


class Gather(Protocol):
    """Where the tokens of a split's sequences come from."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[sequences]: their tokens."""

    @property
    def ids(self) -> NDArray[Any] | None:
        """[sequences]: each one's line of the sequence table; None: its own number."""

    def fill(
        self, sequences: NDArray[Any], tokens: NDArray[Any], labels: NDArray[np.int32] | None
    ) -> NDArray[np.int64]:
        """Write these sequences one after the other into `tokens` and, where given, `labels`.

        Returns the targets of each.
        """

    @property
    def is_weighted(self) -> bool:
        """Whether the tokens have weights, some of which are not 1."""

    def extra(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        """An extra column of these sequences: [sequences], or the values of all their tokens."""


@dataclass(frozen=True)
class StoreGather:
    """Sequences as elements of a binary array over the mapped token store."""

    binary: pa.Array
    elements: NDArray[np.int32]
    """[sequences]: the element that holds each."""
    lengths: NDArray[np.int32]
    ids: NDArray[Any] | None
    """[sequences]: each one's line of the sequence table; None: its own number."""
    weights: pa.Array | None = None
    """The weights of the tokens, in elements like theirs."""
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Sequence-level columns, [sequences] each."""
    cut: bool = False
    """Fragments, of which all but the first token is trained, whatever the store says."""

    def fill(
        self, sequences: NDArray[Any], tokens: NDArray[Any], labels: NDArray[np.int32] | None
    ) -> NDArray[np.int64]:
        values = self.values(sequences)
        lengths = self.lengths[sequences]
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        # Ten times as fast as np.where: all ones where trained, and -1 - t is ~t.
        trained = values >> 31
        found = values ^ trained
        tokens[:] = found
        if self.cut:  # elsewhere than in the store, so the starts marked there are not these
            trained[:] = -1
            trained[starts] = 0
        if labels is not None:
            found -= IGNORE_INDEX
            found &= trained
            found += IGNORE_INDEX
            labels[:] = found
        counts: NDArray[np.int64] = -np.add.reduceat(trained, starts, dtype=np.int64)
        return counts

    def values(self, sequences: NDArray[Any]) -> NDArray[np.int32]:
        """The stored tokens of these sequences, one after the other."""
        return np.frombuffer(self._taken(self.binary, sequences), dtype="<i4")

    @property
    def is_weighted(self) -> bool:
        return self.weights is not None

    def extra(self, name: str, sequences: NDArray[Any]) -> NDArray[Any]:
        if name in self.extras:
            column: NDArray[Any] = self.extras[name][sequences]
            return column
        found: NDArray[np.float32] = np.frombuffer(self._taken(self.weights, sequences), dtype="<f4").copy()
        found[found == 0] = 1  # the record gives none
        trained = self.values(sequences) < 0
        if self.cut:  # as in `fill`
            lengths = self.lengths[sequences]
            trained[:] = True
            trained[np.cumsum(lengths, dtype=np.int64) - lengths] = False
        found[~trained] = 0
        return found

    def _taken(self, binary: pa.Array, sequences: NDArray[Any]) -> pa.Buffer:
        import pyarrow as pa

        elements = self.elements[sequences]
        indexes = pa.Array.from_buffers(pa.int32(), len(elements), [None, pa.py_buffer(elements)])
        taken = binary.take(indexes)
        tokens = int(self.lengths[sequences].sum(dtype=np.int64))
        return taken.buffers()[2].slice(0, tokens * 4)


def cut_shards(plan: PackPlan, lengths: NDArray[np.int32], layout: Layout) -> list[list[tuple[int, int]]]:
    """Packs [start, stop) of each record batch, by shard: filled in order up to the two limits."""
    id_bytes = np.dtype(layout.id_type).itemsize
    token_ends = np.zeros(len(plan.order) + 1, dtype=np.int64)
    np.cumsum(lengths[plan.order], out=token_ends[1:])
    token_ends = token_ends[plan.offsets]  # at pack ends from here on
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
    *,
    ahead: bool,
) -> ShardInfo:
    """Write one shard; `report` gets the tokens of each batch as it is done.

    `ahead`: a batch is gathered while the one before it is written (half of the time each, and twice the
    memory: for when no other shard is written at the same time).
    """
    import pyarrow as pa

    schema = shard_schema(layout.id_type, labels=layout.labels, extras=layout.extras)
    options = pa.ipc.IpcWriteOptions(compression=layout.compression)
    begin = schema.serialize().size  # the schema is written together with the first batch
    places: list[tuple[int, int]] = []
    tokens = 0
    with DurableFile(folder, f"shard-{number:05d}") as file, ThreadPoolExecutor(1) as gatherer:

        def gathered() -> Iterator[tuple[pa.RecordBatch, int]]:
            waiting: deque[Future[tuple[pa.RecordBatch, int]]] = deque()
            for start, stop in batches:
                waiting.append(gatherer.submit(_batch, start, stop, plan, gather, layout, schema))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

        with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema, options=options) as stream:
            for batch, count in gathered():
                places.append((max(file.size, begin), batch.num_rows))
                stream.write_batch(batch)
                del batch
                tokens += count
                report(count)
        info = file.commit(lambda checksum: f"shard-{number:05d}-{checksum[5:13]}.arrow")
    first, last = batches[0][0], batches[-1][1]
    return ShardInfo(
        file=info.file,
        packs=last - first,
        sequences=int(plan.offsets[last] - plan.offsets[first]),
        tokens=tokens,
        bytes=info.bytes,
        checksum=info.checksum,
        batches=tuple(places),
    )


def _batch(
    start: int, stop: int, plan: PackPlan, gather: Gather, layout: Layout, schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """Packs [start, stop) as a record batch, and how many tokens it has."""
    import pyarrow as pa

    first = int(plan.offsets[start])
    sequences = plan.order[first : int(plan.offsets[stop])]
    sequence_offsets = plan.offsets[start : stop + 1] - first
    lengths = gather.lengths[sequences]
    ends = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    token_offsets = ends[sequence_offsets]
    total = int(ends[-1])
    ids = np.empty(total, dtype=layout.id_type)
    labels = np.empty(total if layout.labels else 0, dtype=np.int32)
    counts = np.zeros(len(sequences), dtype=np.int64)
    for low, high in _slices(ends):
        mine = slice(int(ends[low]), int(ends[high]))
        masked = labels[mine] if layout.labels else None
        counts[low:high] = gather.fill(sequences[low:high], ids[mine], masked)
    starts = sequence_offsets[:-1]
    columns = {
        "input_ids": _lists(ids, token_offsets),
        "labels": _lists(labels, token_offsets) if layout.labels else None,
        "seq_lengths": _lists(lengths, sequence_offsets),
        "sequence_ids": _lists(_line_ids(gather, sequences), sequence_offsets),
        "num_tokens": _flat(np.diff(token_offsets).astype(np.int32)),
        "num_targets": _flat(np.add.reduceat(counts, starts).astype(np.int32)),
        "max_seqlen": _flat(np.maximum.reduceat(lengths, starts)),
        "attention_cost": _flat(np.add.reduceat(lengths.astype(np.int64) ** 2, starts)),
    }
    for column in layout.extras:
        offsets = token_offsets if column.level == "token" else sequence_offsets
        columns[column.name] = _lists(gather.extra(column.name, sequences), offsets)
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


def _line_ids(gather: Gather, sequences: NDArray[Any]) -> NDArray[np.int64]:
    ids = sequences if gather.ids is None else gather.ids[sequences]
    return ids.astype(np.int64)


def _flat(values: NDArray[Any]) -> pa.Array:
    # Not pa.array: it imports pandas where that is installed.
    import pyarrow as pa

    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _lists(values: NDArray[Any], offsets: NDArray[np.int64]) -> pa.Array:
    import pyarrow as pa

    child = _flat(values)
    ends = pa.py_buffer(offsets.astype(np.int32))
    return pa.Array.from_buffers(pa.list_(child.type), len(offsets) - 1, [None, ends], children=[child])


class DurableFile:
    """A file under a temporary name: hashed as it is written, then fsynced and renamed, or removed."""

    def __init__(self, folder: str, name: str) -> None:
        import xxhash

        self.folder = folder
        self.path = os.path.join(folder, f".{name}.tmp")
        self.size = 0
        self.closed = False
        self._digest = xxhash.xxh3_128()
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self.closed:
            os.close(self._descriptor)
            self.closed = True
        if os.path.exists(self.path):
            os.remove(self.path)

    def write(self, data: Any) -> int:
        """Append; DiskFullError where there is no room."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self.size += len(view)
        rest = view
        try:
            while len(rest):
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise disk_full(error, self.path, len(rest)) from error
        return len(view)

    def flush(self) -> None:
        """Part of the file protocol; every write goes straight through."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        """Part of the file protocol; `commit` or the end of the `with` closes it."""

    def commit(self, name: Callable[[str], str]) -> FileInfo:
        """Put the complete file in its place, under the name that its checksum gives."""
        checksum = f"xxh3:{self._digest.hexdigest()}"
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_full(error, self.path, self.size) from error
        os.close(self._descriptor)
        self.closed = True
        final = name(checksum)
        os.replace(self.path, os.path.join(self.folder, final))
        return FileInfo(file=final, bytes=self.size, checksum=checksum)


def write_bytes(folder: str, name: str, data: bytes) -> FileInfo:
    """Write a small file whole."""
    with DurableFile(folder, name.replace("/", "-")) as file:
        file.write(data)
        return file.commit(lambda checksum: name)


def sync_folder(folder: str) -> None:
    """Make renames in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
