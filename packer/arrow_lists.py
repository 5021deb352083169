"""numpy arrays as Arrow arrays through their buffers: nothing is copied but offsets.

Not pa.array, which imports pandas where that is installed, half a second of every build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def flat_array(values: NDArray[Any]) -> pa.Array:
    """[n] numbers or strings, or [n, K] as lists of K."""
    import pyarrow as pa

    if values.dtype == object:
        texts = [text.encode("utf-8") for text in values]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(texts)))

    numbers = np.ascontiguousarray(values).reshape(-1)
    found = pa.Array.from_buffers(
        pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)]
    )
    return found if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(found, values.shape[1])


def list_array(values: NDArray[Any], offsets: NDArray[np.int64]) -> pa.Array:
    """Lists: values[offsets[i]:offsets[i + 1]] is list i."""
    import pyarrow as pa

    child = flat_array(values)
    ends = pa.py_buffer(offsets.astype(np.int32))
    return pa.Array.from_buffers(
        pa.list_(child.type), len(offsets) - 1, [None, ends], null_count=0, children=[child]
    )


def matrix_array(values: NDArray[Any]) -> pa.Array:
    """[P, W] as P lists of W."""
    return list_array(values.reshape(-1), np.arange(len(values) + 1) * values.shape[1])
