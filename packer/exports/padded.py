"""Columns of trainers whose rows all have one length: packs filled up on the right."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from padless.packer.arrow_lists import list_array, matrix_array
from padless.packer.exports.rows import Array, Rows, offsets_of
from padless.runtime.format import IGNORE_INDEX


def shifted(rows: Rows, width: int, pad_id: int) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Tokens, labels of the token after each (int64, -100 at sequence ends), positions; [P, width] each.

    The filling is one more segment: positions from 0, nothing trained.
    """
    positions = rows.padded(rows.positions.astype(np.int64), width, 0)
    filled = np.diff(rows.pack_ends)
    places = np.arange(width) - filled[:, None]
    np.copyto(positions, places, where=places >= 0)
    return (
        matrix_array(rows.padded(rows.input_ids.astype(np.int64), width, pad_id)),
        matrix_array(rows.padded(rows.next_labels.astype(np.int64), width, IGNORE_INDEX)),
        matrix_array(positions),
    )


def with_filling(rows: Rows, width: int, *, own_segment: bool) -> tuple[Array, Array]:
    """Lengths that sum to `width` in every pack, and where each pack's begin: [n], [P + 1].

    The filling is a segment of its own, or makes the last sequence longer.
    """
    filling = width - np.diff(rows.pack_ends)
    ends = offsets_of(rows.sequences)
    if not own_segment:
        lengths = rows.seq_lengths.copy()
        lengths[ends[1:] - 1] += filling
        return lengths, ends
    filled = filling > 0
    at = ends[1:][filled]
    return np.insert(rows.seq_lengths, at, filling[filled]), offsets_of(rows.sequences + filled)


def lists_of(lengths: Array, ends: Array) -> pa.Array:
    """Lengths of each pack's sequences as int64 lists."""
    return list_array(lengths.astype(np.int64), ends)
