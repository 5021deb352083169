"""A large store put in the order of the shards, in one pass, before they are written.

The sequences of a record batch lie anywhere in the store. Gathered from where they lie, every batch touches
nearly every page: all of the store stays mapped, and of one larger than memory each sequence is a read of its
own. So a large store is copied first, as it lies, window after window, to a file that has a bucket for each
record batch; a batch then reads its bucket, and nothing else is in memory.

    store     a b c d e f g      windows [a b c d] [e f g]
    buckets   [a d . . ] [b c . .]  ->  [a d e] [b c f g]

The price is 4 bytes a token written, read and kept until the build ends, so a store that does no harm mapped
is left where it lies.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import disk_full
from padless.packer.gather import BatchGather, Gather, StoreGather, has_weight
from padless.packer.plan import PackPlan, pack_tokens
from padless.runtime.format import WORK_FOLDER

BUCKETS_FROM = 2**28
"""Tokens in a store (4 bytes each) from which on it goes through buckets: so much stays mapped at most."""
WINDOW_TOKENS, WINDOW_SEQUENCES = 2**21, 2**18
"""What is taken out of the store at a time."""
RUN_TOKENS, LARGEST_WINDOW = 2**12, 2**25
"""With many buckets a window is so large that each gets about so many tokens of it, up to a limit."""
TOKENS, WEIGHTS = "buckets.bin", "buckets-weights.bin"

Batch = tuple[int, int]
"""Packs [start, stop) of a record batch."""


def near(gather: Gather, plan: PackPlan, batches: Sequence[Batch], output: str) -> Gather:
    """The gather, or the same over buckets where it is of a store; `batches`: those that are to be written.

    Raises DiskFullError where the buckets find no room in the work folder of `output`.
    """
    if not isinstance(gather, StoreGather) or not batches:
        return gather
    packs = pack_tokens(plan, gather.lengths)
    tokens = np.array([packs[start:stop].sum() for start, stop in batches], dtype=np.int64)
    return _fill(gather, plan, batches, tokens, os.path.join(output, WORK_FOLDER))


def remove_buckets(output: str) -> None:
    """Remove those of an earlier run."""
    for name in (TOKENS, WEIGHTS):
        path = os.path.join(output, WORK_FOLDER, name)
        if os.path.exists(path):
            os.remove(path)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A file of buckets: one for each record batch, its sequences in ascending order."""

    path: str
    places: dict[int, tuple[int, int]]
    """First pack of a batch -> first token of its bucket, and how many it has."""
    type: np.dtype[Any]
    """Of what is stored for a token."""

    def read(self, first: int) -> Any:
        """A batch's bucket, as an Arrow buffer that is mapped for as long as somebody holds it."""
        import pyarrow as pa

        begin, tokens = (n * self.type.itemsize for n in self.places[first])
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            size = tokens + skipped
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, offset=begin - skipped)
        return pa.py_buffer(mapped).slice(skipped, tokens)


@dataclass(frozen=True, kw_only=True)
class BucketGather:
    """A split's sequences over buckets."""

    whole: StoreGather
    """Without its store."""
    stored: Buckets
    weights: Buckets | None

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.whole.lengths

    @property
    def is_weighted(self) -> bool:
        return self.weights is not None and has_weight(self.whole.kind)

    def of_batch(self, first: int, sequences: NDArray[Any]) -> BatchGather:
        """The sequences of one record batch, over its bucket."""
        import pyarrow as pa

        inside = np.sort(sequences)
        ends = np.zeros(len(inside) + 1, dtype=np.int64)
        np.cumsum(self.lengths[inside], out=ends[1:])

        def laid(buckets: Buckets) -> pa.Array:
            buffers = [None, pa.py_buffer(ends * buckets.type.itemsize), buckets.read(first)]
            return pa.Array.from_buffers(pa.large_binary(), len(inside), buffers)

        tokens = laid(self.stored)
        weights = None if self.weights is None else laid(self.weights)
        return _InBucket(**{**vars(self.whole), "binary": tokens, "weights": weights, "elements": inside})


class _InBucket(StoreGather):
    """`elements` are the bucket's sequences, ascending."""

    def _elements(self, sequences: NDArray[Any]) -> NDArray[np.int32]:
        return np.searchsorted(self.elements, sequences).astype(np.int32)


def _fill(
    gather: StoreGather, plan: PackPlan, batches: Sequence[Batch], tokens: NDArray[np.int64], work: str
) -> BucketGather:
    """Copy what the batches need, in the order of the sequences."""
    # [sequences]: the bucket of each; the last number is for those that no batch needs.
    kind = np.uint16 if len(batches) < 2**16 else np.int32
    bucket = np.full(len(gather.lengths), len(batches), dtype=kind)
    for number, (start, stop) in enumerate(batches):
        bucket[plan.order[plan.offsets[start] : plan.offsets[stop]]] = number
    begins = np.cumsum(tokens) - tokens + _taken(work)
    places = {start: (int(b), int(n)) for (start, _), b, n in zip(batches, begins, tokens, strict=True)}
    stored = Buckets(path=os.path.join(work, TOKENS), places=places, type=np.dtype("<i4"))
    writers = [_Writer(stored.path, begins)]
    beside: Buckets | None = None
    try:
        for low, high in _windows(gather.lengths, len(batches)):
            here = bucket[low:high]
            by_bucket = np.argsort(here, kind="stable")
            by_bucket = by_bucket[: np.searchsorted(here[by_bucket], len(batches))]
            if not len(by_bucket):
                continue
            sequences = by_bucket + low
            runs, firsts = np.unique(here[by_bucket], return_index=True)
            lengths = gather.lengths[sequences]
            edges = np.append((np.cumsum(lengths, dtype=np.int64) - lengths)[firsts], lengths.sum())
            writers[0].write(runs, edges, gather.values(sequences))
            if gather.weights is not None:
                values = gather.stored_weights(sequences)
                if beside is None:
                    path = os.path.join(work, WEIGHTS)
                    beside = Buckets(path=path, places=places, type=values.dtype)
                    writers.append(_Writer(path, begins))
                writers[1].write(runs, edges, values)
            gather.let_go()
    except BaseException:
        for writer in writers:
            writer.remove()
        raise
    finally:
        for writer in writers:
            writer.close()
    import pyarrow as pa

    pa.default_memory_pool().release_unused()  # what windows were taken into
    whole = replace(gather, binary=None, weights=None, elements=np.zeros(0, np.int32))
    return BucketGather(whole=whole, stored=stored, weights=beside)


def _taken(work: str) -> int:
    """Tokens that another split's buckets take in the files."""
    path = os.path.join(work, TOKENS)
    return os.path.getsize(path) // 4 if os.path.exists(path) else 0


def _windows(lengths: NDArray[np.int32], buckets: int) -> Iterator[tuple[int, int]]:
    """Runs of sequences that are few enough, in number and in tokens."""
    most = max(WINDOW_TOKENS, min(RUN_TOKENS * buckets, LARGEST_WINDOW))
    low = 0
    while low < len(lengths):
        ends = np.cumsum(lengths[low : low + WINDOW_SEQUENCES], dtype=np.int64)
        high = low + max(1, int(np.searchsorted(ends, most, side="right")))
        yield low, high
        low = high


class _Writer:
    """Appends to the buckets of one file."""

    def __init__(self, path: str, begins: NDArray[np.int64]) -> None:
        self._path, self._ends = path, begins.copy()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)

    def write(self, buckets: NDArray[Any], edges: NDArray[np.int64], values: NDArray[Any]) -> None:
        """`values[edges[n]:edges[n + 1]]` goes to the end of bucket `buckets[n]`."""
        for number, begin, end in zip(buckets.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            data = values[begin:end].view(np.uint8).data
            at = int(self._ends[number]) * values.itemsize
            self._ends[number] += end - begin
            try:
                while len(data):
                    written = os.pwrite(self._file, data, at)
                    data, at = data[written:], at + written
            except OSError as error:
                raise disk_full(error, self._path, len(data)) from error

    def remove(self) -> None:
        os.remove(self._path)

    def close(self) -> None:
        os.close(self._file)
