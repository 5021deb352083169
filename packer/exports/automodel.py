"""NeMo Automodel's prepacked rows: labels already shifted, true and padded lengths side by side."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from padless.packer.exports.job import Job
from padless.packer.exports.padded import lists_of, shifted, with_filling
from padless.packer.exports.rows import Rows, offsets_of
from padless.packer.exports.target import Target


def _write(job: Job) -> None:
    width, pad_id = job.width(), job.pad_id()

    def columns(rows: Rows) -> Mapping[str, pa.Array]:
        ids, labels, positions = shifted(rows, width, pad_id)
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "seq_lens": lists_of(rows.seq_lengths, offsets_of(rows.sequences)),
            "seq_lens_padded": lists_of(*with_filling(rows, width, own_segment=False)),
        }

    job.arrow(columns, width=width)


TARGET = Target(
    reader="NeMo Automodel",
    rows="one row a pack, filled to the length: `input_ids`, `labels` (of the next token), `position_ids`, "
    "`seq_lens`, `seq_lens_padded`",
    how="""```yaml
packed_sequence:
  prepacked: true
dataloader:
  collate_fn: nemo_automodel.components.datasets.utils.packed_sequence_thd_collater
```

with a dataset that is `datasets.load_from_disk("{output}")`.""",
    write=_write,
)
