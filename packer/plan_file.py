"""A plan as a file: `plans/NAME.parquet`, a few bytes a sequence beside the tokens it is about."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.arrow_lists import list_array
from padless.packer.durable import DurableFile, sync_folder
from padless.packer.errors import InputError
from padless.packer.plan import PackPlan
from padless.runtime.format import Manifest
from padless.runtime.reader import PLAN_METADATA, columns_hash, tables_hash

PACKS_PER_GROUP = 2**16


def check_name(name: str) -> None:
    """See that it can be a plan's name. Raises InputError."""
    if not re.fullmatch(r"[\w][\w.-]{0,99}", name):
        raise InputError(
            f"--plan-only {name[:110]!r} is no name: take up to 100 letters, digits, _ . and -, but "
            "neither . nor - first"
        )


def write_plan(
    path: Path, plan: PackPlan, lines: NDArray[np.int64], manifest: Manifest, constraints: dict[str, Any]
) -> None:
    """Write a plan whole; `lines`, [sequences]: each one's line of the table.

    Raises DiskFullError where there is no room.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sequences = lines[plan.order].astype(np.int64)
    facts = {
        **constraints,
        "sequence_table": tables_hash(manifest),
        "plan_hash": columns_hash(sequences, plan.offsets, plan.starts, plan.lengths),
    }
    parts = pa.list_(pa.int32())
    schema = pa.schema(
        [("sequences", pa.list_(pa.int64())), ("starts", parts), ("lengths", parts)],
        metadata={PLAN_METADATA: json.dumps(facts, sort_keys=True).encode()},
    )
    path.parent.mkdir(exist_ok=True)
    # Two runs may write one plan: each does so under a name of its own, and the later one stays.
    with DurableFile(str(path.parent), f"{path.stem}-{secrets.token_hex(4)}.parquet") as file:
        with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema) as writer:
            for first in range(0, len(plan), PACKS_PER_GROUP):
                offsets = plan.offsets[first : first + PACKS_PER_GROUP + 1]
                ends = (offsets - offsets[0]).astype(np.int32)
                entries = slice(int(offsets[0]), int(offsets[-1]))
                columns = [list_array(np.ascontiguousarray(sequences[entries]), ends)]
                for part in (plan.starts, plan.lengths):
                    values = None if part is None else part[entries].astype(np.int32)
                    columns.append(
                        pa.nulls(len(ends) - 1, parts) if values is None else list_array(values, ends)
                    )
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        file.commit(lambda checksum: path.name)
    sync_folder(str(path.parent))
