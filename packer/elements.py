"""Where the sequences of a token store lie: one binary array over its mapped files, an element a sequence.

An element is an address, so nothing is copied before a shard is written; fragments of cut sequences are
elements of an array of their own over the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from padless.packer.gather import StoreGather
from padless.packer.token_store import ChunkStore

if TYPE_CHECKING:
    import pyarrow as pa

    from padless.packer.tables import SplitLines


def lay_elements(store: ChunkStore) -> tuple[pa.Array, pa.Array | None]:
    """The token file, and that of the weights where there is one, as binary arrays, an element a sequence."""
    import pyarrow as pa

    # Of each chunk at most a gap before it and its sequences: filled in place, it is the largest array here.
    offsets = np.zeros(1 + sum(1 + entry.lines for entry in store.entries.values()), dtype=np.int64)
    position, filled, is_pictured = 0, 1, store.is_pictured
    for entry in sorted(store.entries.values(), key=lambda e: (e.tokens_at, e.chunk)):
        if not entry.tokens:
            continue
        if entry.tokens_at > position or is_pictured:
            offsets[filled] = entry.tokens_at * 4
            filled += 1
        lengths = store.lines_of(entry)["length"]
        lengths = lengths[lengths > 0]
        ends = offsets[filled : filled + len(lengths)]
        np.cumsum(lengths, out=ends)
        ends += entry.tokens_at
        ends *= 4
        filled += len(lengths)
        position = entry.tokens_at + entry.tokens
    offsets = offsets[:filled]
    mapped = store.map_tokens()
    data = pa.py_buffer(mapped) if mapped is not None else pa.py_buffer(b"")

    def laid(data: pa.Buffer, size: int) -> pa.Array:
        ends = pa.py_buffer(offsets if size == 4 else offsets // 4 * size)
        return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, ends, data])

    beside = laid(pa.py_buffer(store.map_weights()), store.weight_bytes) if store.is_weighted else None
    return laid(data, 4), beside


def lay_images(store: ChunkStore) -> pa.Array | None:
    """What is told of the images of each sequence, in elements like those of the tokens; None: of none."""
    import pyarrow as pa

    mapped = store.map_tokens()
    if mapped is None or not store.is_pictured:
        return None
    pieces: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    for entry in sorted(store.entries.values(), key=lambda e: (e.tokens_at, e.chunk)):
        if entry.tokens:
            lines = store.lines_of(entry)
            sizes = lines["images"][lines["length"] > 0]
            pieces.append((entry.tokens_at + entry.tokens) * 4 + np.cumsum([0, *sizes], dtype=np.int64))
    offsets = np.concatenate(pieces)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(mapped)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def gather_of(
    binary: pa.Array,
    weights: pa.Array | None,
    lines: SplitLines,
    let_go: Callable[[], None] = lambda: None,
    images: pa.Array | None = None,
) -> StoreGather:
    """A split's sequences over what `lay_elements` gave; `let_go` and `images` as of `StoreGather`."""
    if lines.fragments is None:
        return StoreGather(
            binary,
            lines.elements,
            lines.lengths,
            lines.ids,
            weights,
            lines.extras,
            kind=lines.kind,
            images=images,
            let_go=let_go,
        )
    import pyarrow as pa

    _, offsets, data = binary.buffers()
    begins = np.frombuffer(offsets, dtype=np.int64)[lines.elements] + 4 * lines.fragments.starts.astype("i8")
    ends = begins + 4 * lines.lengths.astype(np.int64)
    if lines.times is None:
        edges = np.union1d(begins, ends)
        elements = np.searchsorted(edges, begins).astype(np.int32)
    else:  # copies are cut at different tokens, so each fragment has its own two edges
        edges = np.append(np.stack([begins, ends], axis=1).reshape(-1), ends.max())
        elements = np.arange(0, 2 * len(begins), 2, dtype=np.int32)
    fragments = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), data])
    if weights is not None:  # laid like the tokens, in a file of their own
        buffers = [None, pa.py_buffer(edges // 4 * lines.kind.itemsize), weights.buffers()[2]]
        weights = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
    return StoreGather(
        fragments, elements, lines.lengths, lines.ids, weights, kind=lines.kind, cut=True, let_go=let_go
    )
