"""OLMo-core's token files: headerless arrays of ids, a mask of what is trained, document boundaries.

OLMo-core shifts labels over the whole row, across documents: the mask of each sequence's first token is
False here, as its label is, so that no document's end is trained to foretell the next one's beginning.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from padless.packer.arrow_lists import flat_array
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
    bounds: list[Array] = []
    trained = np.empty(0, dtype=np.bool_)
    size = 0
    with job.raw(f"token_ids_{part}.npy") as ids, job.raw(f"labels_mask_{part}.npy") as mask:
        for rows in source:
            ids.add(rows.input_ids.view(wide))  # no id is negative
            if len(trained) < len(rows.labels):  # one buffer: new pages cost more than the comparison
                trained = np.empty(len(rows.labels), dtype=np.bool_)
            mask.add(np.not_equal(rows.labels, IGNORE_INDEX, out=trained[: len(rows.labels)]))
            bounds.append(rows.ends + size)
            size += len(rows.input_ids)
            if ids.size >= job.shard_bytes:
                break
    starts, ends = (np.concatenate([b[cut] for b in bounds]) for cut in (slice(-1), slice(1, None)))
    text = pa.BufferOutputStream()
    table = pa.table([flat_array(starts), flat_array(ends)], names=["start", "end"])
    pa.csv.write_csv(table, text, pa.csv.WriteOptions(include_header=False))
    name = f"token_ids_{part}.csv.gz"
    with job.open(name) as file:
        # Stored, not squeezed: that would take as long as all the tokens, to save 3 % of their bytes.
        file.write(gzip.compress(text.getvalue(), compresslevel=0, mtime=0))
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
