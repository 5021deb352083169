"""NeMo's packed Parquet as one row a sequence.

A row there holds segments that begin at `seq_start_id`; its `loss_mask` stands on the token that predicts.
Here every segment is a row, and the mask stands on the token that is predicted, as `tokenized` has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.packer.errors import InputError

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")


def is_nemo(schema: Any) -> bool:
    """Whether the columns are those of a packed Parquet."""
    return all(name in schema.names for name in COLUMNS)


def sequences(batch: Any, path: str) -> Any:
    """P packs -> N rows of `input_ids` and `loss_mask`; InputError where a pack contradicts itself."""
    import pyarrow as pa

    try:
        ids, mask, starts = (batch.column(name) for name in COLUMNS)
        sizes, mask_sizes, counts = (np.asarray(c.value_lengths().to_numpy()) for c in (ids, mask, starts))
        values, trained, begins = (c.flatten() for c in (ids, mask, starts))
        if trained.null_count:
            raise pa.ArrowInvalid("loss_mask has nulls")
        trained, begins = trained.to_numpy(zero_copy_only=False), begins.to_numpy().astype(np.int64)
    except (AttributeError, pa.ArrowException) as error:  # no lists, or nulls in them
        raise InputError(f"{path}: {', '.join(COLUMNS)} are no lists of numbers ({error})") from None
    firsts = np.cumsum(counts) - counts
    if not np.array_equal(sizes, mask_sizes) or not (counts > 0).all():
        raise InputError(f"{path}: a pack's loss_mask is not as long as its input_ids, or it has no segment")
    ends = np.append(begins[1:], 0)
    ends[firsts + counts - 1] = sizes
    if begins[firsts].any() or not (begins < ends).all():
        raise InputError(f"{path}: a pack's seq_start_id does not go up from 0 to the end of its input_ids")
    offsets = np.append(0, np.cumsum(ends - begins)).astype(np.int32)
    moved = np.empty(len(trained), dtype=np.int8)
    moved[1:] = trained[:-1] != 0
    moved[offsets[:-1]] = 0  # nothing predicts a segment's first token
    lists = [pa.ListArray.from_arrays(pa.array(offsets), column) for column in (values, pa.array(moved))]
    return pa.RecordBatch.from_arrays(lists, names=["input_ids", "loss_mask"])
