"""The files by which `datasets.load_from_disk` knows a folder of Arrow streams: packed ones and exports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Where Arrow's name of a type is not the one that `datasets` knows."""


def dataset_info(types: Mapping[str, pa.DataType]) -> bytes:
    """dataset_info.json, for datasets 2 to 5: lists are spelled `Sequence`, which all of them read."""
    return _json(
        {
            "citation": "",
            "description": "",
            "features": {name: _feature(kind) for name, kind in types.items()},
            "homepage": "",
            "license": "",
        }
    )


def state(files: Iterable[str], hashed: str, split: str) -> bytes:
    """state.json: the files in their order, and a hash of what they hold as the fingerprint."""
    return _json(
        {
            "_data_files": [{"filename": file} for file in files],
            "_fingerprint": hashed.removeprefix("xxh3:"),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
    )


def _feature(kind: pa.DataType) -> dict[str, Any]:
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return {"feature": _feature(kind.value_type), "length": kind.list_size, "_type": "Sequence"}
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "Sequence"}
    return {"dtype": _DTYPES.get(str(kind), str(kind)), "_type": "Value"}


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode("utf-8") + b"\n"
