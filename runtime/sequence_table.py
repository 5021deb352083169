"""The sequence table of a folder, read in order and checked before a number of it is used to index or count.

A damaged table is an error that names the file, never packs cut at wrong places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from padless.runtime.format import (
    ForeignFileError,
    FormatError,
    Manifest,
    ShardInfo,
    TableInfo,
    sequence_table_schema,
)

WAY_OUT = "copy the folder again, or rebuild it with pack-dataset build --force"
_NOT_NEGATIVE = ("record", "source", "row", "part", "start", "length", "num_targets", "pack", "offset")

OpenFile = Callable[[ShardInfo | TableInfo, Callable[[str], pa.NativeFile]], pa.NativeFile]
"""A listed file of the folder, open by what is given for its path."""


def table_lines(
    manifest: Manifest, open_file: OpenFile, location: str, columns: Sequence[str], *, lines: int, coded: bool
) -> Iterator[pa.Table]:
    """Some columns of the table, at most so many `lines` at a time; `coded`: strings as dictionaries.

    Raises ForeignFileError where a part is not as the format says, a wrong number of lines once they were
    read, and what opening a file raises.
    """
    import pyarrow.parquet as pq

    fields = [sequence_table_schema().field(name) for name in columns]
    strings = [field.name for field in fields if coded and pa.types.is_string(field.type)]
    words = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([f.with_type(words) if f.name in strings else f for f in fields])
    for info in manifest.sequence_tables:
        path = f"{location}/{info.file}"
        found = 0
        with (
            _told(path),
            open_file(info, pa.OSFile) as data,
            pq.ParquetFile(data, pre_buffer=False, read_dictionary=strings) as file,
        ):
            absent = [name for name in columns if name not in file.schema_arrow.names]
            if absent:
                raise KeyError(absent[0])
            for batch in file.iter_batches(min(lines, max(info.lines, 1)), columns=list(columns)):
                batch.validate(full=True)
                found += batch.num_rows
                part = pa.Table.from_batches([batch]).select(list(columns)).cast(schema)
                _check_bounds(part, manifest)
                yield part
        if found != info.lines:
            raise ForeignFileError(f"{path} has {found} lines, the manifest says {info.lines}; {WAY_OUT}")


def _check_bounds(part: pa.Table, manifest: Manifest) -> None:
    """See that numbers which others index and count by are such; raises ValueError."""
    limits = {"pack": manifest.num_packs, "source": len(manifest.sources)}
    for name in set(_NOT_NEGATIVE).intersection(part.schema.names):
        ends = pc.min_max(part.column(name)).as_py()
        low, high = ends["min"], ends["max"]
        if low is not None and (low < 0 or high >= limits.get(name, high + 1)):
            limit = f", of {limits[name]}" if name in limits else ""
            raise ValueError(f"{name} reaches from {low} to {high}{limit}")


@contextmanager
def _told(path: str) -> Iterator[None]:
    """What a file that is no sequence table makes pyarrow raise, as an error of ours."""
    try:
        yield
    except FormatError:  # which names what is wrong already
        raise
    except (pa.ArrowException, OSError, KeyError, ValueError) as problem:
        raise ForeignFileError(f"{path} is no sequence table ({problem}); {WAY_OUT}") from None
