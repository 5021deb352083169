"""A shard's share of a gather, for who sees the files of tokens but shares no memory.

What is mapped here cannot travel, so a part has the places of its sequences instead: their first bytes in the
token store, or the buckets of the shard's record batches where a large store went through buckets
(packer/buckets.py). Sequences are numbered anew from 0, in their old order, on which buckets rely.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.buckets import BucketGather, Buckets
from padless.packer.gather import Gather, StoreGather
from padless.packer.plan import PackPlan

Batches = list[tuple[int, int]]
"""Packs [start, stop) of each record batch of a shard."""


@dataclass(frozen=True, kw_only=True)
class GatherPart:
    """The sequences of one shard, [sequences] each; `gather` opens the files."""

    lengths: NDArray[np.int32]
    ids: NDArray[np.int64]
    extras: Mapping[str, NDArray[Any]]
    cut: bool
    kind: np.dtype[Any]
    begins: NDArray[np.int64] | None
    """The first byte of each in the file of tokens; None: they lie in buckets."""
    is_weighted: bool
    """Whether there are weights (or more, of `kind`) at the same places of a file of their own."""
    tokens: Buckets | None
    weights: Buckets | None

    def gather(self, work: str) -> Gather:
        """The gather of these sequences, from the files in the work folder."""
        if self.tokens is not None:
            return BucketGather(
                whole=replace(self._over(None, None), elements=np.zeros(0, np.int32)),
                stored=_moved(self.tokens, work),
                weights=None if self.weights is None else _moved(self.weights, work),
            )
        assert self.begins is not None
        # Two edges a sequence, since neighbours here are none in the store; the elements between are unused.
        ends = self.begins + 4 * self.lengths.astype(np.int64)
        edges = np.append(np.stack([self.begins, ends], axis=1).reshape(-1), ends.max())
        tokens = _laid(os.path.join(work, "tokens.bin"), edges)
        if not self.is_weighted:
            return self._over(tokens, None)
        return self._over(tokens, _laid(os.path.join(work, "weights.bin"), edges // 4 * self.kind.itemsize))

    def _over(self, tokens: Any, weights: Any) -> StoreGather:
        return StoreGather(
            tokens,
            np.arange(0, 2 * len(self.lengths), 2, dtype=np.int32),
            self.lengths,
            self.ids,
            weights,
            self.extras,
            cut=self.cut,
            kind=self.kind,
        )


def part_of(gather: Gather, plan: PackPlan, batches: Batches) -> tuple[GatherPart, PackPlan, Batches]:
    """A shard's part, with its packs and its record batches, all of them numbered from 0."""
    assert isinstance(gather, StoreGather | BucketGather)  # folders are repacked on one machine
    whole = gather if isinstance(gather, StoreGather) else gather.whole
    first, last = batches[0][0], batches[-1][1]
    offsets = plan.offsets[first : last + 1]
    order = plan.order[offsets[0] : offsets[-1]]
    sequences = np.sort(order)
    begins = None
    if isinstance(gather, StoreGather):
        edges = np.frombuffer(gather.binary.buffers()[1], dtype=np.int64)
        begins = edges[gather.elements[sequences]]

    def chosen(buckets: Buckets | None) -> Buckets | None:
        if buckets is None:
            return None
        return replace(buckets, places={start - first: buckets.places[start] for start, _ in batches})

    part = GatherPart(
        lengths=whole.lengths[sequences],
        ids=(sequences if whole.ids is None else whole.ids[sequences]).astype(np.int64),
        extras={name: whole.extra(name, sequences) for name in whole.extras},
        cut=whole.cut,
        kind=whole.kind,
        begins=begins,
        is_weighted=whole.weights is not None,
        tokens=None if isinstance(gather, StoreGather) else chosen(gather.stored),
        weights=None if isinstance(gather, StoreGather) else chosen(gather.weights),
    )
    numbered = PackPlan(np.searchsorted(sequences, order).astype(np.int32), offsets - offsets[0])
    return part, numbered, [(start - first, stop - first) for start, stop in batches]


def _moved(buckets: Buckets, work: str) -> Buckets:
    return replace(buckets, path=os.path.join(work, os.path.basename(buckets.path)))


def _laid(path: str, edges: NDArray[np.int64]) -> Any:
    import pyarrow as pa

    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return pa.Array.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(mapped)]
    )
