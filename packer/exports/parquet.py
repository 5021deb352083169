"""The packs as they are, in Parquet: for Hub viewers, SQL engines and loaders without Arrow streams."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from padless.packer.arrow_lists import flat_array, list_array
from padless.packer.exports.job import Job
from padless.packer.exports.rows import Rows, offsets_of
from padless.packer.exports.target import Target


def _columns(rows: Rows) -> Mapping[str, pa.Array]:
    ends, sequences = rows.pack_ends, offsets_of(rows.sequences)
    found = {
        "input_ids": list_array(rows.input_ids, ends),
        "labels": list_array(rows.labels, ends),
        "seq_lengths": list_array(rows.seq_lengths.astype("int32"), sequences),
        "sequence_ids": list_array(rows.sequence_ids, sequences),
    }
    for name, values in rows.extras.items():
        level = rows.levels[name]
        if level == "pack":
            found[name] = flat_array(values)
        else:
            found[name] = list_array(values, ends if level == "token" else sequences)
    return found


def _write(job: Job) -> None:
    job.parquet(_columns)


TARGET = Target(
    reader="`datasets.load_dataset`, TRL's SFTTrainer, anything that reads Parquet",
    rows="one row a pack: `input_ids`, `labels` (unshifted), `seq_lengths`, `sequence_ids`, and the folder's "
    "further columns",
    how="""```python
from datasets import load_dataset

dataset = load_dataset("parquet", data_files="{output}/*.parquet", split="train")
```

TRL's SFTTrainer takes these rows with `packing=False, padding_free=True, max_length=None`; elsewhere
`padless.runtime.collate.collate` and `PadlessCollator` make batches of them. litdata streams them after
`litdata.index_parquet_dataset("{output}")`, with `item_loader=ParquetLoader()` and `collate_fn=collate`.""",
    further_columns=True,
    write=_write,
)
