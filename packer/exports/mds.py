"""MosaicML streaming's shards, by its own writer: one sample a pack."""

from __future__ import annotations

import os

import numpy as np

from padless.packer.errors import InputError
from padless.packer.exports.job import Job
from padless.packer.exports.target import Target
from padless.runtime.format import FileInfo, checksum_file


def _write(job: Job) -> None:
    try:
        from streaming import MDSWriter
    except ImportError:
        raise InputError(
            "export --to mds needs mosaicml-streaming: pip install mosaicml-streaming (best into an "
            "environment of its own, it asks for old versions of much), or take --to parquet"
        ) from None
    kinds = {
        "input_ids": f"ndarray:{job.id_dtype.name}",
        "labels": "ndarray:int32",
        "seq_lengths": "ndarray:int32",
        "sequence_ids": "ndarray:int64",
    }
    # It makes its folder anew; the export's own is the one that is locked.
    made = os.path.join(job.folder, "mds")
    with MDSWriter(out=made, columns=kinds, size_limit=job.shard_bytes) as writer:
        for rows in job.rows():
            ends, first = rows.pack_ends.tolist(), 0
            lengths = rows.seq_lengths.astype(np.int32)
            for pack, count in enumerate(rows.sequences.tolist()):
                begin, end = ends[pack], ends[pack + 1]
                writer.write(
                    {
                        "input_ids": rows.input_ids[begin:end],
                        "labels": rows.labels[begin:end],
                        "seq_lengths": lengths[first : first + count],
                        "sequence_ids": rows.sequence_ids[first : first + count],
                    }
                )
                first += count
    for name in sorted(os.listdir(made)):
        path = os.path.join(job.folder, name)
        os.rename(os.path.join(made, name), path)
        job.files.append(FileInfo(file=name, bytes=os.path.getsize(path), checksum=checksum_file(path)))
    os.rmdir(made)


TARGET = Target(
    reader="MosaicML streaming",
    rows="one sample a pack: `input_ids`, `labels` (unshifted), `seq_lengths`, `sequence_ids`, as arrays",
    how="""```python
from streaming import StreamingDataset
from padless.runtime.collate import collate

dataset = StreamingDataset(local="{output}", shuffle=True, batch_size=1)
loader = DataLoader(dataset, batch_size=1, collate_fn=collate)
```""",
    write=_write,
)
