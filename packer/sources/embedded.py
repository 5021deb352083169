"""Images that lie in a table itself, as `datasets` keeps them: sizes go to the workers, and no bytes.

    struct<bytes: binary, path: string>  ->  struct<height: int32, width: int32, path: string>

A picture is a hundred times its record, so the parent reads each one's header as the rows go by. Height is
UNREADABLE for bytes that are no image, and OUTSIDE where there are none and the path is all there is.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.packer.arrow_lists import flat_array
from padless.packer.errors import RecordError
from padless.packer.image_rule import image_size

if TYPE_CHECKING:
    import pyarrow as pa

UNREADABLE, OUTSIDE = 0, -1
FIELDS = ("height", "width", "path")


def measured(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, frozenset[str]]:
    """The record batch with sizes in place of images, and the columns that have them.

    Those are columns of images or of lists of images. Raises InputError without Pillow.
    """
    import pyarrow as pa

    columns = {
        field.name: batch.column(n) for n, field in enumerate(batch.schema) if _holds_images(field.type)
    }
    if not columns:
        return batch, frozenset()
    arrays = [
        _sizes(columns[field.name]) if field.name in columns else column
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names), frozenset(columns)


def _holds_images(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if not pa.types.is_struct(kind):
        return False
    types = {field.name: field.type for field in kind}
    held = types.get("bytes")
    return set(types) == {"bytes", "path"} and (pa.types.is_binary(held) or pa.types.is_large_binary(held))


def _sizes(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    if not pa.types.is_struct(column.type):
        values = _sizes(column.values)
        make = pa.large_list if pa.types.is_large_list(column.type) else pa.list_
        buffers = column.buffers()[:2]
        return pa.Array.from_buffers(
            make(values.type), len(column), buffers, offset=column.offset, children=[values]
        )
    held = column.field("bytes")
    found = np.array([*_each(held)], dtype=np.int32).reshape(len(held), 2)
    arrays = [flat_array(found[:, 0]), flat_array(found[:, 1]), column.field("path")]
    return pa.StructArray.from_arrays(arrays, names=[*FIELDS], mask=column.is_null())


def _each(held: Any) -> Iterator[tuple[int, int]]:
    for one in held:
        if not one.is_valid:
            yield OUTSIDE, OUTSIDE
            continue
        try:
            yield image_size(io.BytesIO(one.as_buffer()))
        except RecordError:
            yield UNREADABLE, UNREADABLE
