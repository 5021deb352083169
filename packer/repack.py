"""Packed folders to another packed folder, without tokenizing: another length, strategy or seed.

The folder that comes out is the one a fresh build with these options would give, to the byte, so its
manifest tells nothing of where it came from. Tokens are copied once, from the mapped shards into the new
ones; what a build knows and no folder stores (a chat's turns, what was cut away) is never made up.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.commit import Facts
from padless.packer.config import PackConfig
from padless.packer.errors import InputError
from padless.packer.folder_tokens import (
    Elements,
    FolderGather,
    MadeAnew,
    Segment,
    copied_segments,
    make_anew,
    stored_segments,
)
from padless.packer.lines import LINE, REASONS, STATUSES, WHOLE
from padless.packer.output import check_output
from padless.packer.pipeline import Build, BuildResult
from padless.packer.plan import PackPlan
from padless.packer.recut import Policy, records_of, recut
from padless.packer.repack_identity import RepackIdentity
from padless.packer.strategies import CUTS
from padless.packer.tables import Account, Piece, SplitLines, strings
from padless.packer.token_store import WorkFolder
from padless.packer.tokenizer_files import TokenizerFiles
from padless.packer.write import Gather
from padless.runtime.format import (
    FileInfo,
    Manifest,
    ShardInfo,
    SplitsManifest,
    TableInfo,
    check_file,
    load_manifest,
    read_manifest,
)
from padless.runtime.reader import PackedReader, column_to_numpy

PLANNING = (
    *("max_length", "strategy", "eval_strategy", "overflow", "max_sequences_per_pack", "align"),
    *("packs_multiple", "plan_window", "labels", "shard_size", "compression", "seed"),
)
"""Options of a build that need no tokenizer."""


@dataclass(frozen=True, kw_only=True)
class RepackConfig:
    """What to pack again and how; an option that is None is as the (first) folder was built."""

    folders: tuple[str, ...]
    """Packed folders, or folders of splits with the same splits."""
    output: str
    exclude: str | None = None
    """A file of record numbers to leave out: one a line, or a Parquet file's column `record`."""
    max_length: int | None = None
    strategy: str | None = None
    eval_strategy: str | None = None
    overflow: str | None = None
    max_sequences_per_pack: int | None = None
    align: int | None = None
    packs_multiple: int | None = None
    plan_window: int | None = None
    labels: str | None = None
    shard_size: int | None = None
    compression: str | None = None
    seed: int | None = None
    workers: int | None = None
    force: bool = False
    progress: Callable[[str, Mapping[str, float]], None] | None = None


def repack(config: RepackConfig) -> BuildResult:
    """Write the folder (or folder of splits) that a fresh build with these options would give.

    Raises InputError for wrong use and for what cannot be known without the sources, DiskFullError
    where the disk is full, and what opening a folder raises.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _Repack(config).run_repack()
    finally:
        if collecting:
            gc.enable()


def plan_only(config: RepackConfig, name: str) -> list[Path]:
    """Write `plans/NAME.parquet` into each split of the one folder; the files.

    A plan holds the sequences as they are: none is joined, cut or left out. Raises InputError for wrong
    use, for a sequence over the length, and for a plan that is there unless `force` is set.
    """
    from padless.packer.plan_file import check_name, write_plan

    if len(config.folders) != 1 or config.exclude or config.output:
        raise InputError("--plan-only takes one packed folder, and neither --output nor --exclude")
    folder = config.folders[0]
    check_name(name)
    work = _Repack(replace(config, output=folder))
    readers = [PackedReader(Path(folder) / split) for split in work.splits]
    paths = [reader.path / "plans" / f"{name}.parquet" for reader in readers]
    there = next((path for path in paths if path.exists()), None)
    if there is not None and not config.force:
        raise InputError(f"{there} is there already: give another name, or --force to replace it")
    lengths = [reader.sequence_columns("length")["length"] for reader in readers]
    kept = [np.flatnonzero(column) for column in lengths]
    plans = work.plans_of([column[lines] for column, lines in zip(lengths, kept, strict=True)])
    for reader, path, lines, plan, split in zip(readers, paths, kept, plans, work.splits, strict=True):
        write_plan(path, plan, lines, reader.manifest, work.constraints(split))
    return paths


class _Repack(Build):
    def __init__(self, config: RepackConfig) -> None:
        if not config.folders:
            raise InputError("no packed folder given: name at least one")
        self.folders = [_splits_of(folder) for folder in config.folders]
        self.asked = config
        firsts = [next(iter(splits.values())) for splits in self.folders]
        _check_alike(config, self.folders, firsts)
        options = firsts[0].options
        known = {item.name for item in fields(PackConfig)}
        given = {name: getattr(config, name) for name in PLANNING if getattr(config, name) is not None}
        super().__init__(
            PackConfig(
                **{
                    **{name: value for name, value in options.items() if name in known},
                    **given,
                    "sources": config.folders,
                    "tokenizer": os.path.join(config.folders[0], "tokenizer"),
                    "output": config.output,
                    "workers": config.workers,
                    "force": config.force,
                    "progress": config.progress,
                }
            )
        )
        for strategy in sorted(CUTS & {self.config.strategy, self.config.eval_strategy}):
            raise InputError(
                f"--strategy {strategy} cuts wherever a pack ends, and repack moves whole sequences: build "
                "again, or choose bfd, spread or another that cuts nothing"
            )
        self.excluded = _read_excluded(config.exclude) if config.exclude else None
        self.identity_of_repack = RepackIdentity(
            self.config, self.folders, [*config.folders], firsts, self.excluded
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return self.identity_of_repack.splits

    def plans_of(self, lengths: list[NDArray[np.int32]]) -> list[PackPlan]:
        """Plans from the lengths of each split's sequences alone."""
        self.identity = self.identity_of_repack  # type: ignore[assignment]
        none = np.zeros(0, dtype=np.int32)
        return self._plan([SplitLines(one, none, None, 0, 0, []) for one in lengths])

    def constraints(self, split: str) -> dict[str, Any]:
        """What a split is planned with."""
        names = ("max_length", "max_sequences_per_pack", "align", "packs_multiple", "plan_window", "seed")
        found = {name: getattr(self.config, name) for name in names}
        return {**found, "strategy": self._strategy(split), "epoch": 0}

    def run_repack(self) -> BuildResult:
        """Everything, from the check of the output to its manifest."""
        output = os.path.realpath(self.config.output)
        for folder in map(os.path.realpath, self.asked.folders):
            if output == folder or output.startswith(folder + os.sep) or folder.startswith(output + os.sep):
                raise InputError(
                    f"output {self.config.output} and {folder} lie in each other: give another --output"
                )
        firsts = self.identity_of_repack.firsts
        if self.config.eval_fraction and any(first.seed != self.config.seed for first in firsts):
            raise InputError(
                f"--seed {self.config.seed} would choose another validation split than {firsts[0].seed} did, "
                "by the text of the records, which no packed folder has: leave --seed out, or build again"
            )
        check_output(self.config.output)
        self.identity = self.identity_of_repack  # type: ignore[assignment]
        return self._run_alone(self._repack_in)

    def _repack_in(self, work: WorkFolder) -> BuildResult:
        made = MadeAnew(os.path.join(work.path, "tokens.bin"))
        try:
            with ThreadPoolExecutor(self.workers) as hashing:
                found = [self._split(name, made, hashing) for name in self.identity.splits]
        finally:
            made.close()
        lines, gathers, pieces = ([item[place] for item in found] for place in range(3))
        self._done("read")
        self._check_losses(lines)
        plans = self._plan(lines)
        self._done("plan")
        manifests = self._write(
            lines, plans, gathers, [iter([piece]) for piece in pieces], self._facts_of_repack()
        )
        return BuildResult(
            output=self.config.output,
            manifests=manifests,
            manifest=self._commit(manifests),
            backends={"tokenizer": "tokens as they were", "template": "none"},
            profile=self.profile,
        )

    def _split(self, name: str, made: MadeAnew, hashing: ThreadPoolExecutor) -> tuple[Any, Any, Any]:
        """The new lines of one split over all folders: its account, its tokens and its table."""
        manifests = [splits[name] for splits in self.folders]
        has_labels = any(manifest.has_labels for manifest in manifests)
        id_type = np.dtype("uint16" if self.identity_of_repack.largest_id < 2**16 else "int32")
        pieces: list[Piece] = []
        segments: list[Segment] = []
        records = sources = lines = 0
        for folder, splits in zip(self.asked.folders, self.folders, strict=True):
            manifest = splits[name]
            reader = PackedReader(Path(folder) / name)
            unchanged = [hashing.submit(_check, reader, file) for file in manifest.files]
            piece = _read_table(reader, records, sources)
            cut = recut(piece, self._policy(reader, manifest, sources), self._is_excluded(piece))
            is_copy = manifest.options.get("compression") not in (None, "none")
            is_copy |= manifest.has_labels != has_labels
            is_copy |= next(c for c in manifest.columns if c.name == "input_ids").type != f"list<{id_type}>"
            stored = [
                *(
                    copied_segments(reader, made, id_type, labels=has_labels)
                    if is_copy
                    else stored_segments(reader)
                )
            ]
            for check in unchanged:  # beside the table and the batches; a damaged file is not copied
                check.result()
            new_line = np.full(len(piece.lines), -1, dtype=np.int64)
            known = np.flatnonzero(cut.stored >= 0)
            new_line[cut.stored[known]] = known
            if len(cut.renewed):
                old = Elements.lay(stored, len(piece.lines))
                make_anew(made, old, piece.lines, records_of(piece.lines), cut)
            for segment in [*(s._replace(numbers=new_line[s.numbers]) for s in stored), *made.segments()]:
                numbers = np.where(segment.numbers < 0, -1, segment.numbers + lines)
                segments.append(segment._replace(numbers=numbers))
            pieces.append(cut.piece)
            lines += len(cut.piece.lines)
            records += sum(part.statistics["records"]["in"] for part in splits.values())
            sources += len(manifest.sources)
        empty_replies = sum(manifest.statistics["empty_replies"] for manifest in manifests)
        return _assemble(pieces, segments, sources, empty_replies)

    def _policy(self, reader: PackedReader, manifest: Manifest, sources: int) -> Policy:
        formats = tuple(manifest.options.get("formats", ["?"] * len(manifest.sources)))
        return Policy(
            where=str(reader.path),
            max_length=self.config.max_length,
            overflow=self.config.overflow,
            old_max_length=manifest.statistics["max_length"],
            old_overflow=manifest.options.get("overflow", "error"),
            formats=("",) * sources + formats,
            empty_replies=manifest.statistics["empty_replies"],
        )

    def _is_excluded(self, piece: Piece) -> NDArray[np.bool_] | None:
        if self.excluded is None:
            return None
        return np.isin(piece.record[piece.lines["part"] == 0], self.excluded)

    def _facts_of_repack(self) -> Facts:
        identity = self.identity_of_repack
        first = next(iter(self.folders[0].values()))
        return Facts(
            options=identity.options,
            seed=self.config.seed,
            max_length=self.config.max_length,
            cap=self.config.max_sequences_per_pack,
            align=self.config.align,
            tokenizer=_tokenizer_files(Path(self.asked.folders[0]) / next(iter(self.folders[0])), first),
            vocab_size=first.vocab_size,
            largest_id=identity.largest_id,
            template=None,  # it is among the tokenizer's files
            template_checksum=first.chat_template_checksum,
            sources=identity.sources,
        )


def _check(reader: PackedReader, file: FileInfo | ShardInfo | TableInfo) -> None:
    check_file(reader.path / file.file, file.bytes, file.checksum)


def _splits_of(folder: str) -> dict[str, Manifest]:
    """split -> its manifest; "" for a folder of one."""
    manifest = load_manifest(folder)
    if isinstance(manifest, SplitsManifest):
        found = {name: read_manifest(folder, name) for name in manifest.names}
    else:
        found = {"": manifest}
    for one in found.values():
        if (strategy := one.options.get("packed_with")) in CUTS:
            raise InputError(
                f"{folder} was packed with {strategy}, which cut its sequences where packs ended: build again"
            )
        if one.extras:
            names = ", ".join(column.name for column in one.extras)
            raise InputError(
                f"{folder} has further columns ({names}), which repack cannot carry: build again"
            )
    return found


def _check_alike(config: RepackConfig, folders: list[dict[str, Manifest]], firsts: list[Manifest]) -> None:
    """See that folders can be packed together."""
    for folder, splits, first in zip(config.folders, folders, firsts, strict=True):
        if first.tokenizer_fingerprint != firsts[0].tokenizer_fingerprint:
            raise InputError(
                f"{folder} was tokenized with another tokenizer ({first.tokenizer_fingerprint}) than "
                f"{config.folders[0]} ({firsts[0].tokenizer_fingerprint}): build it with the same one"
            )
        if list(splits) != list(folders[0]):
            names = (", ".join(part).strip() or "none" for part in (splits, folders[0]))
            raise InputError(
                f"{folder} has the splits {next(names)}, {config.folders[0]} has {next(names)}: repack them "
                "one by one"
            )
        for name in PLANNING:
            if getattr(config, name) is None and first.options.get(name) != firsts[0].options.get(name):
                raise InputError(
                    f"{folder} was built with {name} {first.options.get(name)!r}, {config.folders[0]} with "
                    f"{firsts[0].options.get(name)!r}: say which with --{name.replace('_', '-')}"
                )


def _read_table(reader: PackedReader, records: int, sources: int) -> Piece:
    """A folder's table, its records and sources numbered behind those of the folders before it."""
    import pyarrow.compute as pc

    names = ("record", "source", "row", "part", "start", "length", "num_targets", "cut")
    table = reader.sequence_table((*names, "status", "reason"))
    columns = {name: column_to_numpy(table.column(name)) for name in names}
    lines = np.zeros(table.num_rows, dtype=LINE)
    for name in ("part", "start", "length", "cut"):
        lines[name] = columns[name]
    lines["targets"] = columns["num_targets"]
    for name, words in (("status", STATUSES), ("reason", REASONS)):
        codes = pc.index_in(table.column(name), value_set=strings(words))
        if pc.any(pc.and_(codes.is_null(), table.column(name).is_valid())).as_py():
            raise InputError(
                f"{reader.path} has a {name} that this padless does not know: upgrade padless, or build again"
            )
        lines[name] = column_to_numpy(pc.fill_null(codes, 0))
    lines["reason"][lines["status"] == WHOLE] = 0
    return Piece(
        columns["record"] + records, columns["row"], (columns["source"] + sources).astype(np.int32), lines
    )


def _assemble(
    pieces: list[Piece], segments: list[Segment], sources: int, empty_replies: int
) -> tuple[SplitLines, Gather, Piece]:
    piece = Piece(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    lines = piece.lines
    kept = lines["length"] > 0
    lengths = np.ascontiguousarray(lines["length"][kept])
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    ids = None if kept.all() else np.flatnonzero(kept)
    segments = [s._replace(numbers=np.where(s.numbers < 0, -1, number[s.numbers])) for s in segments]
    elements = Elements.lay(segments, len(lengths))
    found = SplitLines(lengths, elements.elements, ids, len(lines), 0, [])
    account = Account(sources)
    account.add(lines, piece.source)
    account.empty_replies = empty_replies  # none of them was dropped: that is refused
    account.enter(found)
    return found, FolderGather(elements, lengths, ids, lines["targets"][kept]), piece


def _tokenizer_files(folder: Path, manifest: Manifest) -> TokenizerFiles:
    contents = {
        file.file.removeprefix("tokenizer/"): (folder / file.file).read_bytes()
        for file in manifest.tokenizer_files
    }
    if "tokenizer.json" not in contents:
        raise InputError(f"{folder} has no tokenizer/tokenizer.json: build again")
    return TokenizerFiles(folder=str(folder / "tokenizer"), contents=contents, spec={}, config={})


def _read_excluded(path: str) -> NDArray[np.int64]:
    """Record numbers, ascending; InputError where the file cannot be read as such."""
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet as pq

            found = column_to_numpy(pq.read_table(path, columns=["record"]).column("record"))
        else:
            with open(path, encoding="utf-8") as file:
                found = np.array([int(line) for line in file if line.strip()], dtype=np.int64)
    except (ValueError, KeyError, OSError) as problem:
        raise InputError(
            f"--exclude {path}: {problem}; give record numbers (as in sequences.parquet), one a line, or a "
            "Parquet file with a column `record`"
        ) from None
    return np.unique(found.astype(np.int64))
