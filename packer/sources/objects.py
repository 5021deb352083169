"""Data sets of the `datasets` library that a program hands over as they are, in memory or mapped.

Rows come as Arrow tables through the library's own `with_format("arrow").iter`, which honours selections,
shuffles and pending maps; they are hashed as they go by, since there is no file to take a checksum of.
`datasets` is not imported here: whoever has such an object has imported it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import xxhash

from padless.packer.errors import InputError
from padless.packer.sources.chunks import SourceFile
from padless.packer.sources.splits import choose_splits
from padless.packer.sources.undecoded import undecoded_columns

ROWS = 1000
UNKNOWN_BYTES = 2**30
"""Taken for the size of a stream, so that it is worked on as a large source."""


def is_dataset(value: Any) -> bool:
    """Whether it is a Dataset or IterableDataset of the `datasets` library, or a dict of splits."""
    if type(value) is dict:
        return bool(value) and all(isinstance(k, str) and is_dataset(v) for k, v in value.items())
    kinds = [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(value).__mro__]
    return any(
        f"datasets.{name}" in kinds
        for name in ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    )


def object_files(value: Any, number: int, split: str | None, *, is_eval: bool) -> Iterator[SourceFile]:
    """The sources that an object is: one, or one a split.

    Raises InputError for an unknown split.
    """
    name = f"datasets object {number}"
    if isinstance(value, dict):
        for chosen in choose_splits(value, split, name, is_eval):
            yield _file(value[chosen], f"{name}, {chosen}", chosen)
    elif split:
        raise InputError(f"{name} is one split already, so split {split!r} does not apply to it")
    else:
        yield _file(value, name, "")


def _file(value: Any, name: str, split: str) -> SourceFile:
    data = getattr(value, "data", None)
    size = UNKNOWN_BYTES if data is None else int(data.nbytes)
    return SourceFile(path=name, name=name, kind="object", split=split, data=value, size=size)


def stamp(value: Any) -> str:
    """Names the rows for an interrupted build that goes on; rows of unknown origin never do."""
    return str(getattr(value, "_fingerprint", None) or os.urandom(8).hex())


class RowStream:
    """The rows of an object in one pass, with the size and checksum of what went by."""

    def __init__(self, path: str, data: Any) -> None:
        self.path = path
        self._data = data
        self._hash = xxhash.xxh3_128()
        self._size = 0
        features = data.features.to_dict() if data.features is not None else {}
        self.undecoded = undecoded_columns(features)
        """Columns that hold files, with their types."""

    def __enter__(self) -> RowStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def batches(self) -> Iterator[Any]:
        """Record batches without metadata, which would tell of the object's past."""
        import pyarrow as pa

        for table in self._data.with_format("arrow").iter(batch_size=ROWS):
            table = table.replace_schema_metadata(None).combine_chunks()
            for batch in table.to_batches():
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                payload = sink.getvalue()
                self._hash.update(payload)
                self._size += payload.size
                yield batch

    def finish(self) -> tuple[int, str]:
        """Bytes and checksum of the rows, in Arrow's stream format, a thousand at a time."""
        return self._size, f"xxh3:{self._hash.hexdigest()}"
