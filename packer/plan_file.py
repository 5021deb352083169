"""A plan as a file: `plans/NAME.parquet`, a few bytes a sequence beside the tokens it is about."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.durable import DurableFile, sync_folder
from padless.packer.errors import InputError
from padless.packer.plan import PackPlan
from padless.runtime.format import Manifest
from padless.runtime.reader import PLAN_METADATA, columns_hash, tables_hash

PACKS_PER_GROUP = 2**16


def check_name(name: str) -> None:
    """See that it can be a plan's name. Raises InputError."""
    if not re.fullmatch(r"[\w][\w.-]{0,99}", name):
        raise InputError(f"--plan-only {name!r} is no name: take letters, digits, _ . and -")


def write_plan(
    path: Path, plan: PackPlan, lines: NDArray[np.int64], manifest: Manifest, constraints: dict[str, Any]
) -> None:
    """Write a plan of whole sequences whole; `lines`, [sequences]: each one's line of the table.

    Raises DiskFullError where there is no room.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sequences = lines[plan.order].astype(np.int64)
    facts = {
        **constraints,
        "sequence_table": tables_hash(manifest),
        "plan_hash": columns_hash(sequences, plan.offsets),
    }
    parts = pa.list_(pa.int32())
    schema = pa.schema(
        [("sequences", pa.list_(pa.int64())), ("starts", parts), ("lengths", parts)],
        metadata={PLAN_METADATA: json.dumps(facts, sort_keys=True).encode()},
    )
    path.parent.mkdir(exist_ok=True)
    with DurableFile(str(path.parent), path.name) as file:
        with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema) as writer:
            for first in range(0, len(plan), PACKS_PER_GROUP):
                offsets = plan.offsets[first : first + PACKS_PER_GROUP + 1]
                values = pa.Array.from_buffers(
                    pa.int64(),
                    int(offsets[-1] - offsets[0]),
                    [None, pa.py_buffer(np.ascontiguousarray(sequences[offsets[0] : offsets[-1]]))],
                )
                ends = pa.py_buffer((offsets - offsets[0]).astype(np.int32))
                packs = len(offsets) - 1
                lists = pa.Array.from_buffers(schema.types[0], packs, [None, ends], children=[values])
                nulls = pa.nulls(packs, parts)
                writer.write_batch(pa.RecordBatch.from_arrays([lists, nulls, nulls], schema=schema))
        file.commit(lambda checksum: path.name)
    sync_folder(str(path.parent))
