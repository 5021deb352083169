"""Columns that are made while Arrow writes them are those that it would have written from memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from padless.packer.arrow_lists import flat_array, list_array
from padless.packer.durable import DurableFile
from padless.packer.late_columns import LateFile


def batch_of(lists: NDArray[Any], numbers: NDArray[Any], offsets: NDArray[np.int64]) -> pa.RecordBatch:
    columns = [list_array(lists, offsets), flat_array(numbers)]
    return pa.RecordBatch.from_arrays(columns, names=["lists", "numbers"])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    batches=st.integers(1, 3),
    cut=st.integers(1, 50),
    wide=st.sampled_from([(), (3,)]),
    dtype=st.sampled_from(["uint16", "int32", "float32"]),
)
def test_a_file_has_the_bytes_that_arrow_writes_from_memory(
    lengths: list[int], batches: int, cut: int, wide: tuple[int, ...], dtype: str
) -> None:
    offsets = np.cumsum([0, *lengths])
    shape = (sum(lengths), *wide)
    values = (np.arange(np.prod(shape)) % 251).astype(dtype).reshape(shape)
    numbers = np.arange(len(lengths), dtype=np.int32)
    whole = batch_of(values, numbers, offsets)
    expected = pa.BufferOutputStream()
    with pa.ipc.new_stream(expected, whole.schema) as stream:
        for _ in range(batches):
            stream.write_batch(whole)

    def slices() -> Iterator[NDArray[Any]]:
        return (values[start : start + cut] for start in range(0, len(values), cut))

    with (
        tempfile.TemporaryDirectory(dir=ROOT) as folder,
        DurableFile(folder, "data", direct=True) as file,
    ):
        late = LateFile(file)
        with pa.ipc.new_stream(pa.PythonFile(late, mode="w"), whole.schema) as stream:
            for _ in range(batches):
                stream.write_batch(batch_of(late.column(shape, np.dtype(dtype), slices), numbers, offsets))
                late.check()
        file.commit(lambda checksum: "data")
        assert (Path(folder) / "data").read_bytes() == expected.getvalue().to_pybytes()


def test_a_column_of_another_size_than_said_is_no_file(tmp_path: Path) -> None:
    with DurableFile(str(tmp_path), "data") as file:
        late = LateFile(file)
        column = late.column((4,), np.dtype("int32"), lambda: iter([np.zeros(3, np.int32)]))
        with pytest.raises(RuntimeError, match="a column of 16 bytes got 12"):
            late.write(pa.py_buffer(column))


def test_a_column_that_was_not_written_is_noticed(tmp_path: Path) -> None:
    """As it would be if Arrow copied the reserved memory, which holds nothing, and wrote that."""
    with DurableFile(str(tmp_path), "data") as file:
        late = LateFile(file)
        column = late.column((4,), np.dtype("int32"), lambda: iter([np.ones(4, np.int32)]))
        late.write(column.tobytes())
        with pytest.raises(RuntimeError, match="1 columns were not written"):
            late.check()
