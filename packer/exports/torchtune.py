"""torchtune's packed items: labels already shifted, lengths that sum to the row with its filling."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from padless.packer.exports.job import Job
from padless.packer.exports.padded import lists_of, shifted, with_filling
from padless.packer.exports.rows import Rows
from padless.packer.exports.target import Target


def _write(job: Job) -> None:
    width, pad_id = job.width(), job.pad_id()

    def columns(rows: Rows) -> Mapping[str, pa.Array]:
        ids, labels, positions = shifted(rows, width, pad_id)
        lengths = lists_of(*with_filling(rows, width, own_segment=True))
        return {"tokens": ids, "labels": labels, "input_pos": positions, "seq_lens": lengths}

    job.arrow(columns, width=width)


TARGET = Target(
    reader="torchtune",
    rows="one row a pack, filled to the length: `tokens`, `labels` (of the next token), `input_pos`, "
    "`seq_lens` (with the filling)",
    how="""```yaml
dataset:
  _component_: padless.runtime.trainers.torchtune.PackedFolder
  source: "{output}"
  packed: True
```

The stored labels are of the next token; the component gives them as the installed torchtune wants them, whose
recipes up to 0.6 shift labels themselves.""",
    write=_write,
)
