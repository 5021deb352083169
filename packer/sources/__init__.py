"""Source files in, chunks of records out.

The parent resolves what was asked for and walks the files, cutting them into chunks; workers read a
chunk into records. A new kind of file is one module with `cut` and `read`, and one line in
`READERS`.
"""

from __future__ import annotations

from padless.packer.sources.chunks import BadRecord, Chunk, Reader, Records, SourceFile
from padless.packer.sources.objects import stamp
from padless.packer.sources.resolve import Choice, resolve_sources
from padless.packer.sources.walk import READERS, digest, read_chunk, walk

__all__ = [
    "READERS",
    "BadRecord",
    "Choice",
    "Chunk",
    "Reader",
    "Records",
    "SourceFile",
    "digest",
    "read_chunk",
    "resolve_sources",
    "stamp",
    "walk",
]
