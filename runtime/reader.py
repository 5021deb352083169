"""Packs of a packed folder by number: memory-mapped, checked, with numpy and pyarrow alone.

    reader = PackedReader("packed")
    reader[0].input_ids, len(reader), reader.manifest.statistics["packs"]

Opening reads the manifest and looks at every shard's size; a shard is mapped at its first touch
and a record batch is checked at its own, its tokens when packs near them are asked for. Those passes are the
price of never reading through a bad offset (which would end the process); what comes after are slices of
the mapped file. Where the manifest has checksums of blocks (`blocks.py`), those that are used are compared
first, and no others are read.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from padless.runtime.arrays import Array, column_to_numpy
from padless.runtime.batch import Pack, PackBatch, open_batch
from padless.runtime.blocks import MappedShard
from padless.runtime.buckets import Bucket
from padless.runtime.format import (
    BatchError,
    ChecksumError,
    ForeignFileError,
    Manifest,
    ShardInfo,
    TableInfo,
    TruncatedFileError,
    check_file,
    open_folder,
    parse_type,
    sequence_table_schema,
)
from padless.runtime.order import attention_costs, predicted_idle
from padless.runtime.plans import (
    PLAN_METADATA,
    Plan,
    PlannedPacks,
    columns_hash,
    fresh_plan,
    read_plan,
    remote_plan,
    tables_hash,
)
from padless.runtime.sequence_table import WAY_OUT, table_lines
from padless.runtime.shard_order import WINDOW_SHARDS
from padless.runtime.storage import Storage, is_url

if TYPE_CHECKING:
    from padless.runtime.remote import RemoteFolder

__all__ = [
    "PLAN_METADATA",
    "Array",
    "Pack",
    "PackBatch",
    "PackedReader",
    "Plan",
    "attention_costs",
    "column_to_numpy",
    "columns_hash",
    "predicted_idle",
    "tables_hash",
]

# Decompressed batches live in memory (32 MiB of tokens and as much again of labels); mapped ones
# are the operating system's, and are all kept.
_KEPT_COPIES = 4
# Of a URL two windows of shards stay open.
_KEPT_SHARDS = 2 * WINDOW_SHARDS
_HASHED_AT_A_TIME = 8 << 20


class PackedReader:
    """The packs of one split, as stored or by another plan. May be shared by threads, and pickled."""

    def __init__(
        self,
        path: str | Path,
        *,
        plan: str | None = None,
        split: str | None = None,
        verify: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a folder; `verify` reads every file and compares checksums.

        `storage_options` are for fsspec's file system where the path is a URL, on top of what the environment
        and fsspec's own configuration say.

        Raises NotPackedError, VersionError, ManifestError, SplitError, PlanError,
        MissingFileError, TruncatedFileError or ChecksumError; of a URL RemoteError, and what is wrong
        with a shard when it is read.
        """
        if is_url(path):
            from padless.runtime.remote import RemoteFolder

            remote, manifest = RemoteFolder(Storage(str(path), storage_options)).open(split)
            found = None if plan is None else remote_plan(remote.storage, manifest, plan)
            for file in manifest.files if verify else ():
                remote.fetch(file, whole=True)
            self._open(remote.cache.folder, manifest, found, remote)
            return
        folder, manifest = open_folder(Path(path).absolute(), split)
        found = None if plan is None else read_plan(folder, manifest, plan)
        for file in manifest.files if verify else manifest.shards:
            check_file(folder / file.file, file.bytes, file.checksum if verify else None)
        self._open(folder, manifest, found)

    def _open(
        self, folder: Path, manifest: Manifest, plan: Plan | None, remote: RemoteFolder | None = None
    ) -> None:
        self.path = folder
        """The folder; of a URL the one where its files come to lie."""
        self.remote = remote
        self.plan = plan
        self._planned: PlannedPacks | None = None
        self.manifest = manifest
        self._batches = [
            (shard, offset, packs)
            for shard, info in enumerate(manifest.shards)
            for offset, packs in info.batches
        ]
        # A list: numpy's search of one number costs ten times that of bisect.
        self._ends = list(accumulate(packs for *_, packs in self._batches))
        self._shards: dict[int, tuple[MappedShard, pa.Schema]] = {}
        self._compared: set[str] = set()
        """The tables that were compared with their checksums."""
        self._mapped: dict[int, PackBatch] = {}
        self._copies: OrderedDict[int, PackBatch] = OrderedDict()
        self._lock = Lock()

    def replanned(self, strategy: str, *, seed: int, epoch: int) -> PackedReader:
        """The same sequences in the packs of a fresh plan for an epoch, the files being open already.

        Raises PlanError for a strategy that cannot be used so, and what reading the sequence table raises.
        """
        lengths = self.sequence_columns("length")["length"]
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        found.plan = fresh_plan(self.manifest, lengths, strategy, seed=seed, epoch=epoch)
        found._planned = None
        return found

    def __getstate__(self) -> dict[str, Any]:
        kept = {"path": self.path, "manifest": self.manifest, "plan": self.plan, "remote": self.remote}
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(state["path"], state["manifest"], state["plan"], state["remote"])

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The packs of each length, as they are numbered: the shortest first; mostly there is one length."""
        return self.manifest.buckets if self.plan is None else self.plan.buckets

    def __len__(self) -> int:
        if self.plan is not None:
            return len(self.plan)
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: SupportsIndex) -> Pack:
        """Pack number `index`; negative ones count from the end.

        Raises IndexError, BatchError, ForeignFileError, and what opening a shard raises.
        """
        number, count = operator.index(index), len(self)
        if not -count <= number < count:
            raise IndexError(f"pack {number} of {count}: give {-count} to {count - 1}")
        number %= count
        return self._stored(number) if self.plan is None else self._by_plan(self.plan)[number]

    def _stored(self, number: int) -> Pack:
        batch, row = self.place(number)
        return batch[row]

    def place(self, number: int) -> tuple[PackBatch, int]:
        """The record batch that holds a stored pack (one of plan zero), and its row there.

        For whoever takes columns of many packs at once; raises what indexing raises.
        """
        which = bisect_right(self._ends, number)
        batch = self._mapped.get(which) or self._opened(which)
        row = number - self._ends[which] + batch.num_packs
        if not batch.is_checked[row // batch.block]:
            try:
                batch.check(row)
            except BatchError as problem:
                raise self._damaged(which, problem) from None
        return batch, row

    @property
    def batch_ends(self) -> list[int]:
        """How many packs there are up to the end of each record batch, over all shards."""
        return self._ends

    def mapped_batch(self, which: int) -> PackBatch | None:
        """Record batch `which`, where it is open and a view of its file: a local one stays for good."""
        return self._mapped.get(which)

    @property
    def location(self) -> str:
        """The folder or the URL, for messages."""
        return str(self.path) if self.remote is None else self.remote.url

    def read_ahead(self, shards: Sequence[int]) -> None:
        """Fetch shards of a URL in the background, in this order; nothing of a local folder."""
        if self.remote is not None:
            self.remote.read_ahead([self.manifest.shards[shard] for shard in shards])

    def _open_file(
        self, info: ShardInfo | TableInfo, opened: Callable[[str], pa.NativeFile]
    ) -> pa.NativeFile:
        """A listed file, open: of its size, and what is read whole or comes from a URL of its checksum."""
        if self.remote is not None:
            whole = isinstance(info, TableInfo)
            return self.remote.open_file(info, lambda path: opened(str(path)), whole=whole)
        is_new = isinstance(info, TableInfo) and info.file not in self._compared
        check_file(self.path / info.file, info.bytes, info.checksum if is_new else None)
        self._compared.add(info.file)
        return opened(str(self.path / info.file))

    def _by_plan(self, plan: Plan) -> PlannedPacks:
        if self._planned is None:
            table = self.sequence_table(("pack", "offset", "length"))
            self._planned = PlannedPacks(plan, table, self._stored)
        return self._planned

    def pack_sizes(self) -> tuple[Array, Array]:
        """The pack, [N], and the length, [N], of each packed sequence or part, in the table's order."""
        if self.plan is not None:
            packs = np.repeat(np.arange(len(self.plan)), np.diff(self.plan.offsets))
            in_order = np.argsort(self.plan.sequences, kind="stable")
            return packs[in_order], self._by_plan(self.plan).lengths[in_order]
        columns = self.sequence_columns("pack", "length")
        kept = columns["pack"] >= 0
        return columns["pack"][kept], columns["length"][kept]

    def __iter__(self) -> Iterator[Pack]:
        if self.plan is not None:
            yield from (self[number] for number in range(len(self)))
            return
        for batch in self.batches():
            for row in range(batch.num_packs):
                yield batch[row]

    def batches(self, *, checked: bool = True) -> Iterator[PackBatch]:
        """The record batches as they are stored, for whoever wants whole columns.

        Their tokens are looked through, unless they need not be `checked`.
        """
        of = self.batch if checked else self._opened
        return (of(which) for which in range(len(self._batches)))

    def blocks(self) -> Iterator[tuple[PackBatch, slice]]:
        """The same in pieces that fit a core's own cache, checked just before they come: batch and rows."""
        for which in range(len(self._batches)):
            batch = self._opened(which)
            try:
                for rows in batch.blocks():
                    yield batch, rows
            except BatchError as problem:
                raise self._damaged(which, problem) from None

    def batch(self, which: int) -> PackBatch:
        """Record batch number `which` over all shards, checked to the last token."""
        found = self._opened(which)
        try:
            found.check_all()
        except BatchError as problem:
            raise self._damaged(which, problem) from None
        return found

    def _opened(self, which: int) -> PackBatch:
        """Record batch `which`, whose tokens may still have to be checked."""
        with self._lock:
            found = self._mapped.get(which) or self._copies.get(which)
            if found is None:
                found, is_mapped = self._read(which)
                (self._mapped if is_mapped else self._copies)[which] = found
            if which in self._copies:
                self._copies.move_to_end(which)
                while len(self._copies) > _KEPT_COPIES:
                    self._copies.popitem(last=False)
            return found

    def sequence_table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The sequence table, whole or some columns: one line a sequence id.

        Raises ForeignFileError where a part is not as the format says, and what a bad file raises.
        """
        schema = sequence_table_schema()
        names = list(columns) if columns is not None else schema.names
        parts = list(self.sequence_lines(names, lines=2**30))
        schema = pa.schema([schema.field(name) for name in names])
        return pa.concat_tables(parts) if parts else schema.empty_table()

    def sequence_lines(
        self, columns: Sequence[str], *, lines: int = 2**18, coded: bool = False
    ) -> Iterator[pa.Table]:
        """The sequence table in order, at most so many `lines` at a time: for tables larger than memory.

        `coded`: strings come as dictionaries. Raises as `sequence_table` does, a wrong number of lines once
        they were read.
        """
        return table_lines(self.manifest, self._open_file, self.location, columns, lines=lines, coded=coded)

    def sequence_columns(self, *names: str) -> dict[str, Array]:
        """Columns of the sequence table as arrays: numbers (-1 for null) or strings (None)."""
        table = self.sequence_table(names)
        return {name: column_to_numpy(table.column(name)) for name in names}

    def check_shard(self, shard: int) -> None:
        """Compare a shard's checksum, and open all its record batches.

        The file is read through the mapping, so that it is in the page tables for what comes after.
        Raises ChecksumError, and what opening a shard or a batch raises.
        """
        import xxhash

        info = self.manifest.shards[shard]
        file, _ = self._shard(shard)
        data = memoryview(file.data)
        digest = xxhash.xxh3_128()
        for start in range(0, len(data), _HASHED_AT_A_TIME):
            digest.update(data[start : start + _HASHED_AT_A_TIME])
        if (found := f"xxh3:{digest.hexdigest()}") != info.checksum:
            raise ChecksumError(
                f"{self.location}/{info.file} is {found}, the manifest says {info.checksum}; {WAY_OUT}"
            )
        file.trust()
        first = sum(len(before.batches) for before in self.manifest.shards[:shard])
        for which in range(first, first + len(info.batches)):
            self.batch(which)

    def _read(self, which: int) -> tuple[PackBatch, bool]:
        """Record batch `which`, and whether it is a view of the mapped file."""
        shard, offset, packs = self._batches[which]
        file, schema = self._shard(shard)
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
            raise self._damaged(which, problem) from None
        return opened, file.holds(batch.column("input_ids").values.buffers()[1])

    def _damaged(self, which: int, problem: Exception) -> BatchError:
        """What to raise where record batch `which` is not as it should be."""
        shard, offset, _ = self._batches[which]
        path = f"{self.location}/{self.manifest.shards[shard].file}"
        return BatchError(f"{path}, record batch at byte {offset}: {problem}; {WAY_OUT}")

    def _shard(self, shard: int) -> tuple[MappedShard, pa.Schema]:
        """A shard's mapped bytes and its schema, which has been compared with the manifest's."""
        if shard in self._shards:
            return self._shards[shard]
        info = self.manifest.shards[shard]
        path = f"{self.location}/{info.file}"
        with self._open_file(info, pa.memory_map) as file:
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
        # A plan asks for all of them over and over.
        if self.remote is not None and self.plan is None and len(self._shards) > _KEPT_SHARDS:
            self._close(next(iter(self._shards)))
        return found, schema

    def _way_out(self, info: ShardInfo) -> str:
        """What to do about a shard that is not as it was written."""
        if self.remote is None:
            return WAY_OUT
        return f"remove {self.remote.cache.path_of(info.checksum)}, it is fetched again"

    def _close(self, shard: int) -> None:
        """Let a shard go, so that its file can leave the cache; packs that are still held keep it open."""
        del self._shards[shard]
        for which in [which for which in self._mapped if self._batches[which][0] == shard]:
            del self._mapped[which]
