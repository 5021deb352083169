"""LLaMA-Factory's `tokenized_path`: neat packing's rows, whose attention mask numbers the sequences."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from padless.packer.arrow_lists import matrix_array
from padless.packer.exports.job import Job
from padless.packer.exports.rows import Rows
from padless.packer.exports.target import Target
from padless.runtime.format import IGNORE_INDEX


def _write(job: Job) -> None:
    width, pad_id = job.width(), job.pad_id()

    def columns(rows: Rows) -> Mapping[str, pa.Array]:
        return {
            "input_ids": matrix_array(rows.padded(rows.input_ids.astype(np.int64), width, pad_id)),
            "attention_mask": matrix_array(rows.padded(rows.segments, width, 0)),
            "position_ids": matrix_array(rows.padded(rows.positions, width, 0)),
            "labels": matrix_array(rows.padded(rows.labels, width, IGNORE_INDEX)),
        }

    job.arrow(columns, width=width)


TARGET = Target(
    reader="LLaMA-Factory",
    rows="one row a pack, filled to the length: `input_ids`, `attention_mask` (1, 2, ... by sequence, 0 "
    "where filled), `position_ids`, `labels` (unshifted)",
    how="""```yaml
tokenized_path: "{output}"
neat_packing: true
per_device_train_batch_size: 1
flash_attn: fa2
```

Without `neat_packing` its collator would take the numbers for a mask of ones.""",
    write=_write,
)
