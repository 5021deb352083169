"""Rows for torchtitan, grain and whoever else wants arrays of one length and shifts nothing himself."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from padless.packer.arrow_lists import matrix_array
from padless.packer.exports.job import Job
from padless.packer.exports.padded import shifted
from padless.packer.exports.rows import Rows
from padless.packer.exports.target import Target


def _write(job: Job) -> None:
    width, pad_id = job.width(), job.pad_id()

    def columns(rows: Rows) -> Mapping[str, pa.Array]:
        ids, labels, positions = shifted(rows, width, pad_id)
        segments = matrix_array(rows.padded(rows.segments, width, 0))
        return {"input_ids": ids, "labels": labels, "positions": positions, "segment_ids": segments}

    job.arrow(columns, width=width)


TARGET = Target(
    reader="torchtitan, grain",
    rows="one row a pack, filled to the length: `input_ids`, `labels` (of the next token), `positions` (from "
    "0 in every sequence), `segment_ids` (1, 2, ...; 0 where filled)",
    how="""torchtitan takes the packed folder itself: `PacksDataLoader.Config(dataset_path=...)`, of
`padless.runtime.trainers.torchtitan`, as its `dataloader`. In a loader of your own its sample is
`({"input": input_ids, "positions": positions}, labels)`.

grain: the loaded folder is a random-access source.

```python
import grain
from datasets import load_from_disk

source = load_from_disk("{output}").with_format("numpy")
dataset = grain.MapDataset.source(source).shuffle(seed=0).batch(8)
```""",
    write=_write,
)
