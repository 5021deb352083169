"""The tensors of a batch from arrays whose boundaries are known to be right, in numpy.

At 2,048 tokens a batch the calls cost more than the bytes, so every array is written by one numpy
call, and the tensors are views of these arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.varlen_batch import VarlenBatch

MAX_TOKENS = 2**31 - 1
"""Tokens of a batch: int32 boundaries end there."""
BLOCK = 1 << 14
"""Memory of a batch is asked for in multiples of so many int64: sizes that come again, otherwise the
allocator gives it back to the system with every batch, and new pages cost several times what it takes
to fill them (8 packs of 8,192 tokens: 190 page faults and 1 ms, now none)."""
_count_up: dict[type, Array] = {kind: np.arange(4096, dtype=kind) for kind in (np.int64, np.int32)}


def assemble(
    *,
    ids: Sequence[Array],
    labels: Sequence[Array],
    lengths: Array,
    sequence_ids: Sequence[Array],
    longest: int,
    num_targets: int,
) -> VarlenBatch:
    """The batch of packs whose boundaries are right; no labels are the ids but for the starts."""
    sequences = len(lengths)
    boundaries = np.zeros(sequences + 1, dtype=np.int64)
    np.add.accumulate(lengths, out=boundaries[1:])
    starts, tokens = boundaries[:-1], boundaries.item(sequences)
    block = np.empty(-(-3 * tokens // BLOCK) * BLOCK, dtype=np.int64)
    input_ids, all_labels = block[:tokens], block[tokens : 2 * tokens]
    position_ids = block[2 * tokens : 3 * tokens]
    _fill(input_ids, ids)
    _fill(all_labels, labels or [input_ids])
    all_labels[starts] = IGNORE_INDEX
    np.subtract(_counting(tokens), starts.repeat(lengths), out=position_ids)
    seq_idx = _counting(sequences, np.int32).repeat(lengths)
    cu_seq_lens = torch.from_numpy(boundaries.astype(np.int32))
    return VarlenBatch(
        input_ids=torch.from_numpy(input_ids[None]),
        labels=torch.from_numpy(all_labels[None]),
        position_ids=torch.from_numpy(position_ids[None]),
        cu_seq_lens_q=cu_seq_lens,
        cu_seq_lens_k=cu_seq_lens,
        max_length_q=longest,
        max_length_k=longest,
        seq_idx=torch.from_numpy(seq_idx[None]),
        sequence_ids=torch.from_numpy(join(sequence_ids)),
        num_targets=num_targets,
    )


def _fill(row: Array, arrays: Sequence[Array]) -> None:
    """Write arrays behind each other into a row of int64 that is as long as all of them."""
    if len(arrays) == 1:
        row[:] = arrays[0]
    else:
        np.concatenate(arrays, out=row)


def _counting(count: int, kind: type = np.int64) -> Array:
    """0, 1, 2, ..., read-only: kept from batch to batch, since making it costs a pass."""
    known = _count_up[kind]
    if len(known) < count:
        _count_up[kind] = known = np.arange(2 * count, dtype=kind)
        known.flags.writeable = False
    return known[:count]


def join(arrays: Sequence[Array]) -> Array:
    """Arrays behind each other as int64, in memory of their own."""
    return arrays[0].astype(np.int64) if len(arrays) == 1 else np.concatenate(arrays, dtype=np.int64)
