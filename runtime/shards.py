"""The shards of a split, mapped at their first touch, and their record batches, opened at theirs.

Nothing is believed before it was compared with the manifest: a shard's schema, a message before it is
parsed, a batch's columns before a value is handed out. What is a view of a local file stays open;
decompressed copies, and the shards of a URL, are few at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.ipc

from padless.runtime.batch import PackBatch, open_batch
from padless.runtime.blocks import MappedShard
from padless.runtime.format import (
    BatchError,
    ChecksumError,
    ForeignFileError,
    Manifest,
    ShardInfo,
    TableInfo,
    TruncatedFileError,
    check_file,
    parse_type,
)
from padless.runtime.sequence_table import WAY_OUT
from padless.runtime.shard_order import WINDOW_SHARDS

if TYPE_CHECKING:
    from padless.runtime.remote import RemoteFolder

# Decompressed batches live in memory (32 MiB of tokens and as much again of labels); mapped ones
# are the operating system's, and are all kept.
_KEPT_COPIES = 4
# Of a URL two windows of shards stay open.
_KEPT_SHARDS = 2 * WINDOW_SHARDS
_HASHED_AT_A_TIME = 8 << 20


class Shards:
    """The files of one split. May be shared by threads."""

    def __init__(
        self, folder: Path, manifest: Manifest, remote: RemoteFolder | None, *, keeps_all: bool
    ) -> None:
        """`keeps_all`: shards of a URL stay open too, for whoever asks for all of them over and over."""
        self.folder, self.manifest, self.remote = folder, manifest, remote
        self._keeps_all = keeps_all or remote is None
        self.batches = [
            (shard, offset, packs)
            for shard, info in enumerate(manifest.shards)
            for offset, packs in info.batches
        ]
        """(shard, offset, packs) of each record batch."""
        self.mapped: dict[int, PackBatch] = {}
        """Batches that are open and views of their file, by number; those of a local one stay for good."""
        self._copies: OrderedDict[int, PackBatch] = OrderedDict()
        self._shards: dict[int, tuple[MappedShard, pa.Schema]] = {}
        self._compared: set[str] = set()
        """The tables that were compared with their checksums."""
        self._lock = Lock()

    @property
    def location(self) -> str:
        """The folder or the URL, for messages."""
        return str(self.folder) if self.remote is None else self.remote.url

    def open_file(self, info: ShardInfo | TableInfo, opened: Callable[[str], pa.NativeFile]) -> pa.NativeFile:
        """A listed file, open: of its size, and what is read whole or comes from a URL of its checksum."""
        if self.remote is not None:
            whole = isinstance(info, TableInfo)
            return self.remote.open_file(info, lambda path: opened(str(path)), whole=whole)
        is_new = isinstance(info, TableInfo) and info.file not in self._compared
        check_file(self.folder / info.file, info.bytes, info.checksum if is_new else None)
        self._compared.add(info.file)
        return opened(str(self.folder / info.file))

    def batch(self, which: int) -> PackBatch:
        """Record batch `which` over all shards; its tokens may still have to be checked.

        Raises BatchError, ChecksumError, and what opening a shard raises.
        """
        with self._lock:
            found = self.mapped.get(which) or self._copies.get(which)
            if found is None:
                found, is_mapped = self._read(which)
                (self.mapped if is_mapped else self._copies)[which] = found
            if which in self._copies:
                self._copies.move_to_end(which)
                while len(self._copies) > _KEPT_COPIES:
                    self._copies.popitem(last=False)
            return found

    def damaged(self, which: int, problem: Exception) -> BatchError:
        """What to raise where record batch `which` is not as it should be."""
        shard, offset, _ = self.batches[which]
        path = f"{self.location}/{self.manifest.shards[shard].file}"
        return BatchError(f"{path}, record batch at byte {offset}: {problem}; {WAY_OUT}")

    def compare_whole(self, shard: int, found: str | None = None) -> None:
        """Compare all of a shard with its checksum; raises ChecksumError, and what `open` raises.

        `found`: its checksum, where somebody has worked it out just now.
        """
        import xxhash

        info = self.manifest.shards[shard]
        file, _ = self.open(shard)
        if found is None:
            data = memoryview(file.data)
            digest = xxhash.xxh3_128()
            for start in range(0, len(data), _HASHED_AT_A_TIME):
                digest.update(data[start : start + _HASHED_AT_A_TIME])
            found = f"xxh3:{digest.hexdigest()}"
        if found != info.checksum:
            raise ChecksumError(
                f"{self.location}/{info.file} is {found}, the manifest says {info.checksum}; {WAY_OUT}"
            )
        file.trust()

    def open(self, shard: int) -> tuple[MappedShard, pa.Schema]:
        """A shard's mapped bytes and its schema, which has been compared with the manifest's.

        Raises MissingFileError, TruncatedFileError, ForeignFileError or ChecksumError; of a URL RemoteError.
        """
        if shard in self._shards:
            return self._shards[shard]
        info = self.manifest.shards[shard]
        path = f"{self.location}/{info.file}"
        with self.open_file(info, pa.memory_map) as file:
            data = file.read_buffer(info.bytes)
        if data.size != info.bytes:
            raise TruncatedFileError(f"{path} has {data.size} bytes, not {info.bytes}; {WAY_OUT}")
        found = MappedShard(data, self.manifest.shards, shard, path=path, way_out=self._way_out(info))
        if self.remote is not None and info.checksum in self.remote.cache.compared:
            found.trust()
        found.compare_head(0)
        try:
            schema = pa.ipc.open_stream(data).schema
        except (pa.ArrowException, OSError) as problem:
            raise ForeignFileError(f"{path} is no Arrow stream ({problem}); {WAY_OUT}") from None
        for column in self.manifest.columns:
            places = schema.get_all_field_indices(column.name)
            wanted = parse_type(column.type)
            if len(places) != 1 or schema.field(places[0]).type != wanted:
                types = ", ".join(str(schema.field(place).type) for place in places) or "nothing"
                raise ForeignFileError(
                    f"{path} has {types} for column {column.name}, the manifest says "
                    f"{column.type}: it belongs to another folder; {WAY_OUT}"
                )
        self._shards[shard] = (found, schema)
        if not self._keeps_all and len(self._shards) > _KEPT_SHARDS:
            self._close(next(iter(self._shards)))
        return found, schema

    def _read(self, which: int) -> tuple[PackBatch, bool]:
        """Record batch `which`, and whether it is a view of the mapped file."""
        shard, offset, packs = self.batches[which]
        file, schema = self.open(shard)
        file.compare_head(offset)
        try:
            # The shard's buffer is bounds for everything the message claims about its own sizes.
            message = pa.ipc.read_message(pa.BufferReader(file.data.slice(offset)))
            if message.type != "record batch":
                raise BatchError(f"there is a {message.type} message instead")
            end = offset if message.body is None else file.place(message.body) + message.body.size
            if self.manifest.options.get("compression") not in (None, "none"):
                file.compare(offset, end)  # before it is decompressed
            batch = pa.ipc.read_record_batch(message, schema)
            opened = open_batch(
                batch,
                self.manifest.columns,
                num_packs=packs,
                largest_id=self.manifest.largest_id,
                file=file,
                place=(offset, end),
            )
        except (pa.ArrowException, OSError, EOFError, BatchError) as problem:
            raise self.damaged(which, problem) from None
        return opened, file.holds(batch.column("input_ids").values.buffers()[1])

    def _way_out(self, info: ShardInfo) -> str:
        """What to do about a shard that is not as it was written."""
        if self.remote is None:
            return WAY_OUT
        return f"remove {self.remote.cache.path_of(info.checksum)}, it is fetched again"

    def _close(self, shard: int) -> None:
        """Let a shard go, so that its file can leave the cache; packs that are still held keep it open."""
        del self._shards[shard]
        for which in [which for which in self.mapped if self.batches[which][0] == shard]:
            del self.mapped[which]
