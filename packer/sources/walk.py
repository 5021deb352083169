"""The parent's walk: over all files once, chunk after chunk, in an order that is always the same.

The cuts depend on the bytes and on the options alone, never on who reads the chunks, so any
number of workers sees the same ones. Only the block that is being cut is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from padless.packer.errors import InputError
from padless.packer.sources import columnar, csv_table, json_array, jsonl, text, token_files
from padless.packer.sources.chunks import Chunk, CutOptions, Reader, Records, SourceFile
from padless.packer.sources.json_text import sniff
from padless.packer.sources.objects import RowStream
from padless.packer.sources.stream import ByteStream
from padless.packer.sources.token_files import TokenStream
from padless.packer.sources.urls import check_unchanged

READERS: dict[str, Reader] = {
    "json_array": Reader(cut=json_array.cut, read=json_array.read),
    "jsonl": Reader(cut=jsonl.cut, read=jsonl.read),
    "parquet": Reader(cut=columnar.cut, read=columnar.read),
    "object": Reader(cut=columnar.cut, read=columnar.read),
    "csv": Reader(cut=csv_table.cut, read=csv_table.read),
    "text": Reader(cut=text.cut, read=text.read),
    "tokens": Reader(cut=token_files.cut, read=token_files.read),
}


def walk(
    files: list[SourceFile],
    *,
    chunk_bytes: int = 512 * 1024,
    text_by: str = "line",
    exact_cuts: bool = True,
    images: bool = False,
) -> Iterator[Chunk]:
    """Cut every file into chunks of about `chunk_bytes`; a file's facts are filled in behind it.

    `images`: those that lie in tables are measured, otherwise they are left out.
    Without `exact_cuts` whoever reads the chunks finds out whether a JSON array was cut rightly (CutError).
    Raises InputError for a file that is malformed as a whole or holds no record.
    """
    options = CutOptions(chunk_bytes=chunk_bytes, text_by=text_by, exact_cuts=exact_cuts, images=images)
    index = 0
    for number, file in enumerate(files):
        first = index
        with _open(file) as stream:
            reader = file.kind
            if isinstance(stream, ByteStream) and file.kind != "parquet":
                stream.skip_mark()
                reader = sniff(stream) if file.kind == "json" else file.kind
            for piece in READERS[reader].cut(stream, options):
                yield Chunk(
                    index=index,
                    source=number,
                    reader=reader,
                    path=file.path,
                    start=piece.start,
                    stop=piece.stop,
                    line=piece.line,
                    payload=piece.payload,
                    args=piece.args,
                )
                index += 1
            if not file.is_on_hub:
                file.bytes, file.checksum = stream.finish()
                if file.stamp is not None:
                    check_unchanged(file)
            elif isinstance(stream, ByteStream) and file.kind != "parquet":
                stream.check_size(file.bytes)
        file.chunks = index - first
        if not file.chunks:
            raise InputError(
                f"{file.path} has no records ({file.bytes:,} bytes); "
                "leave the file out, or see whether it was written to the end"
            )


def _open(file: SourceFile) -> ByteStream | RowStream | TokenStream:
    if file.data is not None:
        return RowStream(file.path, file.data)
    if file.kind == "tokens":
        return TokenStream(file.path)
    return ByteStream(file.path, file.compression)


def digest(file: SourceFile) -> tuple[int, str]:
    """Bytes and checksum of a source as it is now, as the walk gives them."""
    if file.is_on_hub:
        return file.bytes, file.checksum
    with _open(file) as stream:
        if isinstance(stream, RowStream):
            for _ in stream.batches():
                pass
        return stream.finish()


def read_chunk(chunk: Chunk) -> Records:
    """The records of a chunk, in their order."""
    return READERS[chunk.reader].read(chunk)
