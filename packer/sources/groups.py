"""Row groups of Parquet and record batches of Arrow: counted by metadata alone, read one by one.

What `columnar` reads from one end to the other, taken from anywhere; the price is that all of a group is
decoded for a few of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from padless.packer.errors import InputError
from padless.packer.sources.chunks import Chunk
from padless.packer.sources.columnar import (
    ARROW_FILE_MAGIC,
    PARQUET_MAGIC,
    arrow_batches,
    checked,
    in_ipc,
    read,
    readable,
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of a file that are read together: a row group of Parquet, a record batch of Arrow."""

    path: str
    index: int
    rows: int
    bytes: int


def groups_of(path: str) -> list[Group]:
    """The groups of a local file, by its metadata alone. Raises InputError where it is broken."""
    import pyarrow as pa

    try:
        with open(path, "rb") as file:
            head = file.read(len(ARROW_FILE_MAGIC))
        if head.startswith(PARQUET_MAGIC):
            import pyarrow.parquet as pq

            found = pq.read_metadata(path)
            groups = [found.row_group(index) for index in range(found.num_row_groups)]
            sizes = [(group.num_rows, group.total_byte_size) for group in groups]
        else:
            sizes = [(batch.num_rows, batch.nbytes) for batch in arrow_batches(path, head)]
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, error) from error
    return [
        Group(path=path, index=index, rows=rows, bytes=size)
        for index, (rows, size) in enumerate(sizes)
        if rows
    ]


def rows_of_group(group: Group, places: Any) -> list[Any]:
    """The rows of a group at these `places` (ascending), as `read` gives them."""
    import pyarrow as pa

    if not len(places):
        return []
    try:
        with open(group.path, "rb") as file:
            head = file.read(len(ARROW_FILE_MAGIC))
        if head.startswith(PARQUET_MAGIC):
            import pyarrow.parquet as pq

            with pq.ParquetFile(group.path) as table:
                whole = table.read_row_group(group.index)
        else:
            batch = next(islice(arrow_batches(group.path, head), group.index, None))
            whole = pa.Table.from_batches([checked(batch)])
        (batch,) = whole.take(places).combine_chunks().to_batches()
    except (pa.ArrowException, OSError) as error:
        raise _broken(group.path, error) from error
    batch, args = readable(batch, group.path)
    return read(
        Chunk(index=0, source=0, reader="parquet", path=group.path, payload=in_ipc(batch), args=args)
    ).rows


def _broken(path: str, error: Exception) -> InputError:
    return InputError(
        f"{path} cannot be read as a table ({error}): it is broken or cut short; fetch or write it again"
    )
