"""Rows that are single sequences: for trainers that pad or pack by themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from padless.packer.arrow_lists import flat_array, list_array
from padless.packer.exports.job import Job
from padless.packer.exports.rows import Rows
from padless.packer.exports.target import Target


def columns(rows: Rows) -> Mapping[str, pa.Array]:
    """One row a sequence; a mask of ones is harmless where there is nobody else in the row."""
    ends = rows.ends
    found = {
        "input_ids": list_array(rows.input_ids, ends),
        "attention_mask": list_array(np.ones(len(rows.input_ids), dtype=np.int8), ends),
        "labels": list_array(rows.labels, ends),
    }
    for name, values in rows.extras.items():
        if rows.levels[name] == "token":
            found[name] = list_array(values, ends)
        elif rows.levels[name] == "sequence":
            found[name] = flat_array(values)
        else:
            found[name] = flat_array(np.repeat(values, rows.sequences))
    return found


def _write(job: Job) -> None:
    job.arrow(columns)


TARGET = Target(
    reader="anything that takes tokenized rows from `datasets`",
    rows="one row a sequence: `input_ids`, `attention_mask` (ones), `labels` (unshifted, -100 where masked), "
    "and the folder's further columns",
    how="""```python
from datasets import load_from_disk

dataset = load_from_disk("{output}")
```

The rows come in the order of the packs; shuffle them before you train.""",
    further_columns=True,
    write=_write,
)
