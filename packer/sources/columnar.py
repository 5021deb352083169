"""Parquet and Arrow tables, handed out as small record batches.

A worker cannot read some rows of a Parquet row group without decoding all of it, and row groups of
a million rows are common. So the parent decodes once, in a stream, and a chunk carries its rows in
the Arrow IPC format: the parent's cost is the decoding, about 1 GB/s of uncompressed text.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from typing import Any

from padless.packer.errors import InputError, SourceLostError
from padless.packer.hub import lost, open_random
from padless.packer.sources.chunks import Chunk, CutOptions, Piece, Records, chunk_data
from padless.packer.sources.embedded import measured
from padless.packer.sources.nemo_rows import is_nemo, sequences
from padless.packer.sources.objects import RowStream
from padless.packer.sources.stream import ByteStream
from padless.packer.sources.undecoded import Row, undecoded_of_schema, without

MAX_ROWS = 4096
ARROW_FILE_MAGIC = b"ARROW1"
PARQUET_MAGIC = b"PAR1"
TEMPORAL = (datetime.date, datetime.time)  # a datetime is a date


def cut(stream: ByteStream | RowStream, options: CutOptions) -> Iterator[Piece]:
    """Pieces of at most 4,096 rows and about `chunk_bytes` of Arrow data.

    Raises InputError where the file is broken.
    """
    import pyarrow as pa

    row = 0
    try:
        for batch in _batches(stream, options.chunk_bytes):
            undecoded = stream.undecoded if isinstance(stream, RowStream) else None
            batch, args = readable(batch, stream.path, undecoded, images=options.images)
            bytes_per_row = max(1, batch.nbytes // max(1, batch.num_rows))
            step = max(1, min(MAX_ROWS, options.chunk_bytes // bytes_per_row))
            for begin in range(0, batch.num_rows, step):
                part = batch.slice(begin, step)
                yield Piece(start=row, stop=row + part.num_rows, payload=in_ipc(part), args=args)
                row += part.num_rows
    except (SourceLostError, InputError):
        raise
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{stream.path} cannot be read as a table after row {row:,} ({error}): it is broken or "
            "cut short; fetch or write it again"
        ) from error


def readable(
    batch: Any, path: str, undecoded: dict[str, str] | None = None, *, images: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """A batch without what nobody decodes (`undecoded`; None: as its schema says), and the reader's args.

    `images`: those in it are measured.
    """
    if undecoded is None:
        undecoded = undecoded_of_schema(batch.schema)
    if images:
        batch, known = measured(batch)
        undecoded = {name: kind for name, kind in undecoded.items() if name not in known}
    if undecoded:
        batch = without(batch, undecoded)
    if is_nemo(batch.schema):
        batch = sequences(batch, path)
    return batch, tuple(word for item in undecoded.items() for word in item)


def in_ipc(batch: Any) -> bytes:
    """A batch as the payload of a chunk."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def arrow_batches(source: Any, head: bytes) -> Iterator[Any]:
    """Record batches of an Arrow file or stream, mapped and not yet checked; `source`: path or open file."""
    import pyarrow as pa

    with pa.memory_map(source) if isinstance(source, str) else pa.PythonFile(source, mode="r") as opened:
        if head == ARROW_FILE_MAGIC:
            table = pa.ipc.open_file(opened)
            for index in range(table.num_record_batches):
                yield table.get_batch(index)
        else:
            yield from pa.ipc.open_stream(opened)


def read(chunk: Chunk) -> Records:
    """Rows as dicts; missing values stay None, dates and times are ISO strings.

    A struct has the keys of all rows; inside of another one, those without a value are left out, or one
    record's tools would show up in the next one's.
    """
    import pyarrow as pa

    table = pa.ipc.open_stream(chunk_data(chunk)).read_all()
    schema = pa.schema([field.with_type(_no_nanoseconds(field.type)) for field in table.schema])
    # Python knows no nanoseconds: pyarrow would need pandas for them, or refuse.
    rows = (table if schema == table.schema else table.cast(schema, safe=False)).to_pylist()
    if not all(_is_plain(field.type) for field in schema):
        rows = [_as_json(row) for row in rows]
    deep = [field.name for field in schema if _is_deep(field.type, inside=False)]
    for row in rows if deep else ():
        row.update((name, _without_nulls(row[name], inside=False)) for name in deep)
    if chunk.args:
        undecoded = dict(zip(chunk.args[::2], chunk.args[1::2], strict=True))
        rows = [Row(row, undecoded) for row in rows]
    return Records(rows=rows, lines=None)


def _batches(stream: ByteStream | RowStream, chunk_bytes: int) -> Iterator[Any]:

    if isinstance(stream, RowStream):
        yield from stream.batches()
        return
    remote = _RemoteReads(stream.path) if stream.is_on_hub else None
    head = remote.head(len(ARROW_FILE_MAGIC)) if remote else stream.peek(len(ARROW_FILE_MAGIC))
    if head.startswith(PARQUET_MAGIC):
        import pyarrow.parquet as pq

        # Buffered and without prefetching, memory stays at some pages a column. From the Hub a row group
        # is fetched at once, in a few large requests.
        how = {"pre_buffer": True} if remote else {"pre_buffer": False, "buffer_size": 1 << 20}
        with pq.ParquetFile(remote or stream.seekable_path(), **how) as table:
            groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            rows = table.metadata.num_rows * chunk_bytes // max(1, size)
            yield from table.iter_batches(batch_size=max(1, min(MAX_ROWS, rows)))
        return
    yield from map(checked, arrow_batches(remote or stream.seekable_path(), head))


class _RemoteReads:
    """A file on the Hub as pyarrow reads one: seek and read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.closed = False
        self._file = open_random(url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, place: int, whence: int = 0) -> int:
        return int(self._file.seek(place, whence))

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:  # of the HTTP library's many kinds
            raise lost(self.url, error) from error

    def head(self, size: int) -> bytes:
        """The first bytes, which stay to be read."""
        data = self.read(size)
        self.seek(0)
        return data

    def close(self) -> None:
        self.closed = True
        self._file.close()


def checked(batch: Any) -> Any:
    """Offsets come from the file, and pyarrow ends the process on bad ones."""
    batch.validate(full=True)
    return batch


def _no_nanoseconds(kind: Any) -> Any:
    """The type with every nanosecond unit, nested ones too, as microseconds."""
    import pyarrow as pa

    if getattr(kind, "unit", None) == "ns":
        if pa.types.is_timestamp(kind):
            return pa.timestamp("us", tz=kind.tz)
        return pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_no_nanoseconds(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_no_nanoseconds(kind.value_type)))
    return kind


def _is_plain(kind: Any) -> bool:
    """Whether `to_pylist` gives nothing but strings, numbers, booleans, None, lists and dicts."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _is_deep(kind: Any, *, inside: bool) -> bool:
    """Whether there is a struct inside of a struct."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return inside or any(_is_deep(field.type, inside=True) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_deep(kind.value_type, inside=inside)
    return False


def _without_nulls(value: Any, *, inside: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_nulls(item, inside=True)
            for key, item in value.items()
            if item is not None or not inside
        }
    if isinstance(value, list):
        return [_without_nulls(item, inside=inside) for item in value]
    return value


def _as_json(value: Any) -> Any:
    """The value with dates and times as ISO strings, durations and decimals as strings."""
    if isinstance(value, TEMPORAL):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal):
        return str(value)
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
