"""Megatron-Bridge's packed Parquet.

It makes n - 1 pairs of n stored tokens by itself, and wants the loss mask on the token that predicts:
our mask of labels, moved left by one. So a pack_size of max_length - 1 is never too small.
Whatever the mask says, its collator trains nothing where the token that predicts is the tokenizer's end
token (its padding is made of that); such targets stand in the mask all the same, and are counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from padless.packer.arrow_lists import list_array
from padless.packer.exports.job import Job
from padless.packer.exports.rows import Rows, offsets_of
from padless.packer.exports.target import Target
from padless.runtime.format import IGNORE_INDEX


def _write(job: Job) -> None:
    most, longest, packs, sequences, tokens, targets, dropped = 0, 0, 0, 0, 0, 0, 0
    eos = job.tokenizer().named_token_id("eos_token")

    def columns(rows: Rows) -> Mapping[str, pa.Array]:
        nonlocal most, longest, packs, sequences, tokens, targets, dropped
        starts = rows.ends[:-1] - np.repeat(rows.pack_ends[:-1], rows.sequences)
        most = max(most, int(rows.sequences.max()))
        longest = max(longest, int(rows.seq_lengths.max()))
        packs += len(rows.sequences)
        sequences += len(rows.seq_lengths)
        tokens += len(rows.input_ids)
        trained = rows.next_labels != IGNORE_INDEX
        targets += int(trained.sum())
        if eos is not None:
            dropped += int((trained & (rows.input_ids == eos)).sum())
        return {
            "input_ids": list_array(rows.input_ids.astype(np.int32, copy=False), rows.pack_ends),
            "loss_mask": list_array(trained.astype(np.int8), rows.pack_ends),
            "seq_start_id": list_array(starts.astype(np.int32), offsets_of(rows.sequences)),
        }

    job.parquet(columns, "packed-{:05d}.idx.parquet")
    size = job.max_length
    metadata = [
        {
            "dataset_max_seqlen": longest,
            "max_samples_per_bin": most,
            "packing_factor": round(sequences / packs, 2),
            "packing_efficiency": round(tokens / (packs * size) * 100, 2),
            "pack_size": size,
            "min_packed_seqlen": min(size, longest),
        }
    ]
    job.text("metadata.json", json.dumps(metadata, indent=2) + "\n")
    job.notes.append(
        f"pack_size {size} holds every pack; sequences of one token give no pair there, and train nothing."
    )
    if dropped:
        job.notes.append(
            f"{dropped:,} of {targets:,} trained tokens stand right behind an end token (id {eos}) inside "
            "their sequence: Megatron-Bridge leaves those out of the loss."
        )


TARGET = Target(
    reader="NeMo's Megatron-Bridge",
    rows="one row a pack: `input_ids`, `loss_mask` (moved left by one), `seq_start_id`; `metadata.json`",
    how="""The recipe's data set, with a micro batch size of 1:

```python
dataset = GPTSFTDatasetConfig(
    dataset_root="{output}",  # asked for, and read only where there are no packs
    seq_length=SIZE,  # pack_size in metadata.json
    enable_offline_packing=True,
    offline_packing_specs=PackedSequenceSpecs(
        packed_train_data_path="{output}",
        packed_metadata_path="{output}/metadata.json",
        packed_sequence_size=SIZE,
    ),
    do_validation=False,  # or packed_val_data_path: an export of the validation split
    do_test=False,
)
```""",
    write=_write,
)
