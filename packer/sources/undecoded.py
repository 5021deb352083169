"""Columns of images, sound and other files, as `datasets` types them: refused only where they are read.

A data set may carry them beside the text, so they are only left out of what goes to the workers: their
values are null there, and the rows know why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from padless.packer.errors import RecordError

DECODED = frozenset({"Image", "Audio", "Video", "Pdf", "Nifti", "Mesh"})
"""Types of `datasets` whose values are files to be decoded."""


class Row(dict[str, Any]):
    """A record some of whose columns cannot be read."""

    def __init__(self, values: Mapping[str, Any], undecoded: Mapping[str, str]) -> None:
        super().__init__(values)
        self._undecoded = undecoded

    def __getitem__(self, name: str) -> Any:
        kind = self._undecoded.get(name)
        if kind is not None:
            raise RecordError(
                f"column {name!r} holds {kind} data, which padless does not read; leave it out "
                f"(.remove_columns({name!r})), or name another column with --column"
            )
        return super().__getitem__(name)


def undecoded_columns(features: Mapping[str, Any]) -> dict[str, str]:
    """Column -> the type that would have to be decoded; of features as `datasets` spells them in JSON."""
    kinds = {name: _decoded(feature) for name, feature in features.items()}
    return {name: kind for name, kind in kinds.items() if kind}


def undecoded_of_schema(schema: Any) -> dict[str, str]:
    """The same of an Arrow schema in whose metadata `datasets` left its features."""
    try:
        content = json.loads((schema.metadata or {})[b"huggingface"])
        return undecoded_columns(content["info"]["features"])
    except (KeyError, ValueError, TypeError, AttributeError):  # none, or somebody else's
        return {}


def without(batch: Any, undecoded: Mapping[str, str]) -> Any:
    """The record batch with nulls in these columns."""
    import pyarrow as pa

    arrays = [
        pa.nulls(batch.num_rows) if field.name in undecoded else column
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _decoded(feature: Any) -> str | None:
    if isinstance(feature, Mapping):
        if feature.get("_type") in DECODED:
            return str(feature["_type"])
        return next((kind for item in feature.values() if (kind := _decoded(item))), None)
    if isinstance(feature, Sequence) and not isinstance(feature, str):
        return next((kind for item in feature if (kind := _decoded(item))), None)
    return None
