"""Axolotl: sequences as rows, which it packs by itself, or packs through padless' plugin."""

from __future__ import annotations

from padless.packer.exports.job import Job
from padless.packer.exports.target import Target
from padless.packer.exports.unpacked import columns


def _write(job: Job) -> None:
    job.refuse_what_is_lost()  # the further columns are for those who load the rows by themselves
    longest = max((int(pack.max_seqlen) for pack in job.reader), default=0)
    job.arrow(columns)
    job.text(
        "axolotl.yaml",
        "# Merge this into your configuration.\n"
        "datasets:\n  - path: .\n    ds_type: arrow\n    type:\n"
        f"sequence_len: {max(longest, job.max_length)}\n"
        "sample_packing: true\n",
    )


TARGET = Target(
    reader="Axolotl",
    rows="one row a sequence: `input_ids`, `attention_mask`, `labels` (unshifted), and the folder's "
    "further columns; `axolotl.yaml`",
    how="""```yaml
datasets:
  - path: "{output}"
    type:            # empty: the rows are tokenized
sequence_len: ...    # in axolotl.yaml
sample_packing: true
```

Axolotl packs the sequences by itself. To train on the packs as they are, no export is needed:

```yaml
plugins:
  - padless.runtime.trainers.axolotl.PacksPlugin
datasets:
  - path: packed     # the folder that pack-dataset wrote
    type:
remove_unused_columns: false
```""",
    further_columns=True,
    write=_write,
)
