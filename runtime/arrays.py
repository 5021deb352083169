"""Arrow arrays as numpy arrays, through their buffers.

pyarrow's own `to_numpy` imports pandas, half a second at the start of every loader and command;
the buffers are right there. Nothing is copied but booleans and strings, which Arrow packs into
bits and end to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]
# Where Arrow's name of a type is not numpy's.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def to_numpy(array: pa.Array) -> Array:
    """The values of an array without nulls, read-only: [n], or [n, K] for lists of K."""
    kind, count = array.type, len(array)
    if pa.types.is_fixed_size_list(kind):
        return to_numpy(array.flatten()).reshape(-1, kind.list_size)
    if pa.types.is_string(kind):
        return _strings(array)
    values = array.buffers()[1]
    if pa.types.is_boolean(kind):
        return _bits(values, array.offset, count).astype(np.bool_)
    dtype = np.dtype(_DTYPES.get(str(kind), str(kind)))
    start = array.offset * dtype.itemsize
    numbers = np.frombuffer(values or b"", dtype=dtype, count=count, offset=start)
    # Decompressed buffers are writable, and shared by everybody who asks for the same pack.
    numbers.flags.writeable = False
    return numbers


def column_to_numpy(column: pa.ChunkedArray) -> Array:
    """A table's column: numbers with -1 for null, or strings (shared objects) with None."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_string(array.type) or array.null_count == 0:
        return to_numpy(array)
    known = _bits(array.buffers()[0], array.offset, len(array)).astype(np.bool_)
    return np.where(known, to_numpy(array), -1)


def has_nulls(array: pa.Array) -> bool:
    """Whether there is a null in the array or in the lists it holds."""
    while array.null_count == 0:
        if not (pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type)):
            return False
        array = array.values
    return True


def _strings(array: pa.Array) -> Array:
    coded = pc.dictionary_encode(array, null_encoding="encode")
    if not len(coded):
        return np.empty(0, dtype=object)
    names = np.empty(len(coded.dictionary), dtype=object)
    for code, name in enumerate(coded.dictionary):
        names[code] = name.as_py()
    strings: Array = names[to_numpy(coded.indices)]
    return strings


def _bits(buffer: pa.Buffer | None, start: int, count: int) -> Array:
    bits = np.frombuffer(buffer or b"", dtype=np.uint8)
    return np.unpackbits(bits, count=start + count, bitorder="little")[start:]
