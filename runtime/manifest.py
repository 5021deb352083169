"""The manifest: what a packed folder says about itself, and the moment it is finished.

Whatever stands in one may have been written by anybody, so `from_json` checks types, counts and
names once, where they enter; the rest of padless trusts a `Manifest`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from padless.runtime.buckets import Bucket, buckets_of
from padless.runtime.fields import Fields, dump, load
from padless.runtime.schema import OWN_COLUMNS, ColumnInfo, column_problem

BLOCK_BYTES = 1 << 20
"""Bytes of a shard that have a checksum together; the last block of a file may be shorter."""
BLOCK_DIGITS = 16
"""Hex digits of a block's checksum: XXH3 with 64 bits."""
_SHARD_NUMBER = re.compile(r"shard-([0-9]{5,18})-")


def count_blocks(size: int) -> int:
    """How many blocks a file of so many bytes has."""
    return -(-size // BLOCK_BYTES)


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A file below the folder."""

    file: str
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """An Arrow file of packs."""

    file: str
    packs: int
    sequences: int
    tokens: int
    bytes: int
    checksum: str
    batches: tuple[tuple[int, int], ...]
    """(byte offset of the record batch's message in the file, packs in it), in the file's order."""
    block_checksums: str | None = None
    """The checksums of the file's blocks, one after the other; None: it is read without."""


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    """A part of the sequence table."""

    file: str
    lines: int
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """A file (or URL and revision) that records came from."""

    path: str
    bytes: int
    checksum: str
    records: int
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a packed folder holds: one split."""

    shards: tuple[ShardInfo, ...]
    sequence_tables: tuple[TableInfo, ...]
    tokenizer_files: tuple[FileInfo, ...]
    tokenizer_fingerprint: str | None
    """SHA-256 of the tokenizer's bytes; None for ready-made tokens without a tokenizer."""
    vocab_size: int
    largest_id: int
    chat_template_checksum: str | None
    columns: tuple[ColumnInfo, ...]
    options: dict[str, Any]
    sources: tuple[SourceInfo, ...]
    seed: int
    statistics: dict[str, Any]
    plan_hash: str
    padless_version: str
    pyarrow_version: str
    kind: str = "packs"

    @property
    def files(self) -> tuple[FileInfo | ShardInfo | TableInfo, ...]:
        """Every file the manifest vouches for."""
        return (*self.shards, *self.sequence_tables, *self.tokenizer_files)

    @property
    def num_packs(self) -> int:
        return sum(shard.packs for shard in self.shards)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The packs of each length, as they stand: the shortest first; one bucket where all are of one."""
        return buckets_of(self.statistics, self.num_packs)

    @property
    def has_labels(self) -> bool:
        return any(column.name == "labels" for column in self.columns)

    @property
    def extras(self) -> tuple[ColumnInfo, ...]:
        """The columns beyond the format's own."""
        return tuple(column for column in self.columns if column.name not in OWN_COLUMNS)

    def to_json(self) -> bytes:
        """The manifest's file; the same manifest gives the same bytes."""
        return dump(
            {
                "kind": self.kind,
                "shards": [_without_none(asdict(shard)) for shard in self.shards],
                "sequence_tables": [asdict(table) for table in self.sequence_tables],
                "tokenizer": {
                    "files": [asdict(file) for file in self.tokenizer_files],
                    "fingerprint": self.tokenizer_fingerprint,
                    "vocab_size": self.vocab_size,
                    "largest_id": self.largest_id,
                },
                "chat_template": {"checksum": self.chat_template_checksum},
                "columns": [asdict(column) for column in self.columns],
                "options": self.options,
                "sources": [asdict(source) for source in self.sources],
                "seed": self.seed,
                "plan_hash": self.plan_hash,
                "statistics": self.statistics,
                "padless": self.padless_version,
                "pyarrow": self.pyarrow_version,
            }
        )

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Parse and check; `where` names the file in messages.

        Raises VersionError for a later format and ManifestError for anything else that is wrong.
        """
        fields = load(data, where, "packs")
        tokenizer = fields.object("tokenizer")
        manifest = cls(
            shards=fields.each("shards", _shard),
            sequence_tables=fields.each("sequence_tables", _table),
            tokenizer_files=tokenizer.each("files", _tokenizer_file),
            tokenizer_fingerprint=tokenizer.optional_text("fingerprint"),
            vocab_size=tokenizer.count("vocab_size"),
            largest_id=tokenizer.count("largest_id"),
            chat_template_checksum=fields.object("chat_template").optional_text("checksum"),
            columns=fields.each("columns", _column),
            options=fields.object("options").data,
            sources=fields.each("sources", _source),
            seed=fields.integer("seed"),
            statistics=_statistics(fields.object("statistics")),
            plan_hash=fields.text("plan_hash"),
            padless_version=fields.text("padless"),
            pyarrow_version=fields.text("pyarrow"),
        )
        fields.refuse_twice([file.file for file in manifest.files])
        names = [column.name for column in manifest.columns]
        fields.refuse_twice(names)
        try:
            _ = manifest.buckets
        except ValueError as problem:
            raise fields.object("statistics").error("buckets", str(problem)) from None
        if missing := [name for name in OWN_COLUMNS if name not in names and name != "labels"]:
            raise fields.error("columns", f"has no {missing[0]}")
        _refuse_other_shards(fields, manifest)
        return manifest


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """A packed folder below a folder of splits; size and checksum are those of its manifest."""

    name: str
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class SplitsManifest:
    """The commit point of a folder of splits."""

    splits: tuple[SplitInfo, ...]
    padless_version: str
    kind: str = "splits"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(split.name for split in self.splits)

    def to_json(self) -> bytes:
        """The manifest's file; the same splits give the same bytes."""
        splits = [asdict(split) for split in self.splits]
        return dump({"kind": self.kind, "splits": splits, "padless": self.padless_version})

    @classmethod
    def from_json(cls, data: bytes, where: str) -> SplitsManifest:
        """Parse and check, as `Manifest.from_json`."""
        fields = load(data, where, "splits")
        splits = fields.each("splits", _split)
        fields.refuse_twice([split.name for split in splits])
        return cls(splits=splits, padless_version=fields.text("padless"))


def _refuse_other_shards(fields: Fields, manifest: Manifest) -> None:
    """Raise where whole shards were taken out of the list, added or exchanged: packs are numbered by it."""
    for key in ("packs", "sequences", "tokens"):
        said = manifest.statistics[key]
        if said != (listed := sum(getattr(shard, key) for shard in manifest.shards)):
            raise fields.object("statistics").error(key, f"is {said}, and the shards listed hold {listed}")
    for place, shard in enumerate(manifest.shards):
        named = _SHARD_NUMBER.match(shard.file)
        if named is not None and int(named[1]) != place:
            raise fields.error(f"shards[{place}]", f"is {shard.file}, which belongs elsewhere in the list")


def _shard(fields: Fields) -> ShardInfo:
    shard = ShardInfo(
        file=fields.name("file"),
        packs=fields.count("packs", 1),
        sequences=fields.count("sequences", 1),
        tokens=fields.count("tokens", 1),
        bytes=fields.count("bytes", 1),
        checksum=fields.checksum("checksum"),
        batches=fields.pairs("batches"),
        block_checksums=_block_checksums(fields),
    )
    packs = [packs for _, packs in shard.batches]
    if min(packs, default=0) < 1 or sum(packs) != shard.packs:
        raise fields.error("batches", f"do not hold the shard's {shard.packs} packs")
    ends = [*(offset for offset, _ in shard.batches), shard.bytes]
    if ends[0] < 0 or any(here >= after for here, after in pairwise(ends)):
        raise fields.error("batches", "do not lie one after the other inside the file")
    return shard


def _block_checksums(fields: Fields) -> str | None:
    if "block_checksums" not in fields.data:
        return None
    digits = BLOCK_DIGITS * count_blocks(fields.count("bytes", 1))
    return fields.hex("block_checksums", digits, f"for each of {fields.text('file')}'s blocks")


def _without_none(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry without the keys that may be left out, where they are."""
    return {key: value for key, value in entry.items() if value is not None}


def _table(fields: Fields) -> TableInfo:
    return TableInfo(
        file=fields.name("file"),
        lines=fields.count("lines"),
        bytes=fields.count("bytes", 1),
        checksum=fields.checksum("checksum"),
    )


def _tokenizer_file(fields: Fields) -> FileInfo:
    return FileInfo(
        file=fields.name("file", "tokenizer/"),
        bytes=fields.count("bytes"),
        checksum=fields.checksum("checksum"),
    )


def _column(fields: Fields) -> ColumnInfo:
    column = ColumnInfo(name=fields.text("name"), level=fields.text("level"), type=fields.text("type"))
    if problem := column_problem(column):
        raise fields.error("type", f"is refused: {problem}")
    return column


def _source(fields: Fields) -> SourceInfo:
    return SourceInfo(
        path=fields.text("path"),
        bytes=fields.count("bytes"),
        checksum=fields.text("checksum"),
        records=fields.count("records"),
        revision=fields.optional_text("revision"),
    )


def _split(fields: Fields) -> SplitInfo:
    return SplitInfo(
        name=fields.name("name"),
        bytes=fields.count("bytes", 1),
        checksum=fields.checksum("checksum"),
    )


def _statistics(fields: Fields) -> dict[str, Any]:
    for key in (
        *("max_length", "sequences", "packs", "bound_packs", "tokens"),
        *("trained_tokens", "masked_tokens", "cut_tokens", "empty_replies"),
    ):
        fields.count(key)
    records = fields.object("records")
    for key in ("in", "whole", "truncated", "split", "dropped"):
        records.count(key)
    for key in ("dropped_by_reason", "cut_by_reason"):
        reasons = fields.object(key)
        for reason in reasons.data:
            reasons.count(reason)
    return fields.data
