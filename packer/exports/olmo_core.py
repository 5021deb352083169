"""OLMo-core's token files: headerless arrays of ids, a mask of what is trained, document boundaries.

OLMo-core shifts labels over the whole row, across documents: the mask of each sequence's first token is
False here, as its label is, so that no document's end is trained to foretell the next one's beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from padless.packer.exports.boundary_lines import boundary_lines, stored_gzip
from padless.packer.exports.job import Job
from padless.packer.exports.rows import Array, Rows
from padless.packer.exports.target import Target
from padless.runtime.format import IGNORE_INDEX


def _write(job: Job) -> None:
    wide = np.dtype(np.uint16 if job.id_dtype == np.uint16 else np.uint32)
    rows = job.rows(flat=True)
    part = 0
    while (first := next(rows, None)) is not None:
        _write_part(job, f"part_{part:05d}", chain([first], rows), wide)
        part += 1
    job.notes.append(
        f"ids are {wide.name}; sequences that a cut ended carry no end token, and by default OLMo-core finds "
        "documents by that token, which would join them to the next: `use_array_if_local=False`."
    )


def _write_part(job: Job, part: str, source: Iterator[Rows], wide: np.dtype[Any]) -> None:
    """One file of each kind, of about shard_bytes."""
    bounds: list[Array] = []  # where sequences end, in tokens of this part
    trained = np.empty(0, dtype=np.bool_)
    size = 0
    with job.raw(f"token_ids_{part}.npy") as ids, job.raw(f"labels_mask_{part}.npy") as mask:
        for rows in source:
            ids.add(rows.input_ids.view(wide))  # no id is negative
            if len(trained) < len(rows.labels):  # one buffer: new pages cost more than the comparison
                trained = np.empty(len(rows.labels), dtype=np.bool_)
            mask.add(np.not_equal(rows.labels, IGNORE_INDEX, out=trained[: len(rows.labels)]))
            bounds.append(rows.ends[1:] + size)
            size += len(rows.input_ids)
            if ids.size >= job.shard_bytes:
                break
    name = f"token_ids_{part}.csv.gz"
    with job.open(name, direct=True) as file:
        for piece in stored_gzip(boundary_lines(np.concatenate(bounds))):
            file.write(piece)
        job.keep(file, name)


TARGET = Target(
    reader="OLMo-core",
    rows="documents one after the other in `token_ids_part_*.npy` (raw numbers), `labels_mask_part_*.npy` ("
    "raw booleans), `token_ids_part_*.csv.gz` (start, end)",
    how="""```python
NumpyPackedFSLDatasetConfig(
    tokenizer=...,
    paths=["{output}/token_ids_part_*.npy"],
    label_mask_paths=["{output}/labels_mask_part_*.npy"],
    expand_glob=True,
    sequence_length=...,  # of the longest sequence, or more: longer ones are cut
    use_array_if_local=False,  # boundaries are read from the .csv.gz files, not looked for
    generate_doc_lengths=True,  # without them documents see each other
)
```

OLMo-core packs the documents again by itself.""",
    write=_write,
)
