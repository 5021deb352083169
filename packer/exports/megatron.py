"""Megatron's indexed data set: .bin with the ids, .idx with lengths and places; one document a sequence.

The form has no place for a loss mask, so data with masked tokens is refused: it would train on prompts.
"""

from __future__ import annotations

import struct

import numpy as np

from padless.packer.errors import InputError
from padless.packer.exports.job import Job
from padless.packer.exports.target import Target

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_CODES = {"uint16": 8, "int32": 4}
"""What the header says for each type of id."""


def _write(job: Job) -> None:
    statistics = job.reader.manifest.statistics
    starts = int(statistics["sequences"])
    masked = int(statistics["masked_tokens"]) - starts
    if masked > 0:
        raise InputError(
            f"{job.reader.path} has {masked:,} masked tokens, and Megatron's .bin has no place for a loss "
            "mask: they would be trained. Build with --train-on all, or export to nemo, which keeps the mask"
        )
    lengths: list[np.ndarray] = []
    with job.raw("packed_text_document.bin") as file:
        for rows in job.rows(flat=True):
            file.add(rows.input_ids)
            lengths.append(rows.seq_lengths.astype(np.int32))
    sizes = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int32)
    pointers = np.zeros(len(sizes), dtype=np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
    header = _MAGIC + struct.pack("<QBQQ", _VERSION, _CODES[job.id_dtype.name], len(sizes), len(sizes) + 1)
    with job.raw("packed_text_document.idx") as index:
        index.add(np.frombuffer(header, dtype=np.uint8))
        index.add(sizes)
        index.add(pointers * job.id_dtype.itemsize)
        index.add(np.arange(len(sizes) + 1, dtype=np.int64))


TARGET = Target(
    reader="Megatron-LM, NeMo (pretraining)",
    rows="`packed_text_document.bin` and `.idx`, one document a sequence",
    how="""```
--data-path "{output}/packed_text_document" --reset-position-ids --reset-attention-mask --eod-mask-loss
```

Megatron concatenates and cuts the documents by itself; the three flags keep them apart.""",
    write=_write,
)
