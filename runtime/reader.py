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
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa

from padless.runtime.arrays import Array, column_to_numpy
from padless.runtime.batch import Pack, PackBatch
from padless.runtime.buckets import Bucket
from padless.runtime.format import (
    BatchError,
    Manifest,
    check_file,
    open_folder,
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
from padless.runtime.sequence_table import table_lines
from padless.runtime.shards import Shards
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
        self._shards = Shards(folder, manifest, remote, keeps_all=plan is not None)
        self._mapped = self._shards.mapped
        # A list: numpy's search of one number costs ten times that of bisect.
        self._ends = list(accumulate(packs for *_, packs in self._shards.batches))

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

        Raises IndexError, TypeError for what is no whole number, BatchError, ForeignFileError, and what
        opening a shard raises.
        """
        try:
            number, count = operator.index(index), len(self)
        except TypeError:
            raise TypeError(
                f"packs are taken by one whole number, not by {index!r}: [packs[n] for n in range(...)] "
                "gives several, torch.utils.data.Subset a part"
            ) from None
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
        batch = self._mapped.get(which) or self._shards.batch(which)
        row = number - self._ends[which] + batch.num_packs
        if not batch.is_checked[row // batch.block]:
            try:
                batch.check(row)
            except BatchError as problem:
                raise self._shards.damaged(which, problem) from None
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
        return self._shards.location

    def read_ahead(self, shards: Sequence[int]) -> None:
        """Fetch shards of a URL in the background, in this order; nothing of a local folder."""
        if self.remote is not None:
            self.remote.read_ahead([self.manifest.shards[shard] for shard in shards])

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
        of = self.batch if checked else self._shards.batch
        return (of(which) for which in range(len(self._shards.batches)))

    def blocks(self) -> Iterator[tuple[PackBatch, slice]]:
        """The same in pieces that fit a core's own cache, checked just before they come: batch and rows."""
        for which in range(len(self._shards.batches)):
            batch = self._shards.batch(which)
            try:
                for rows in batch.blocks():
                    yield batch, rows
            except BatchError as problem:
                raise self._shards.damaged(which, problem) from None

    def batch(self, which: int) -> PackBatch:
        """Record batch number `which` over all shards, checked to the last token."""
        found = self._shards.batch(which)
        try:
            found.check_all()
        except BatchError as problem:
            raise self._shards.damaged(which, problem) from None
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
        opened = self._shards.open_file
        return table_lines(self.manifest, opened, self.location, columns, lines=lines, coded=coded)

    def sequence_columns(self, *names: str) -> dict[str, Array]:
        """Columns of the sequence table as arrays: numbers (-1 for null) or strings (None)."""
        table = self.sequence_table(names)
        return {name: column_to_numpy(table.column(name)) for name in names}

    def check_shard(self, shard: int, found: str | None = None) -> None:
        """Compare a shard's checksum, and open all its record batches.

        `found`: the checksum, where somebody has worked it out just now; otherwise the file is read through
        the mapping, so that it is in the page tables for what comes after. Raises ChecksumError, and what
        opening a shard or a batch raises.
        """
        self._shards.compare_whole(shard, found)
        first = sum(len(before.batches) for before in self.manifest.shards[:shard])
        for which in range(first, first + len(self.manifest.shards[shard].batches)):
            self.batch(which)
