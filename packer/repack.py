"""Packed folders to another packed folder, without tokenizing: another length, strategy or seed.

The folder that comes out is the one a fresh build with these options would give, to the byte, so its
manifest tells nothing of where it came from. Tokens are copied once, from the mapped shards into the new
ones; what a build knows and no folder stores (a chat's turns, what was cut away) is never made up.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer import early_checksums
from padless.packer.build_result import BuildResult
from padless.packer.commit import Facts
from padless.packer.config import PackConfig
from padless.packer.durable import prepare_blocks
from padless.packer.errors import InputError
from padless.packer.extra_columns import GROUP, GROUPS, VERDICTS, group_column, has_value
from padless.packer.folder_tokens import Elements, Segment, full_segments, renumbered, stored_segments
from padless.packer.gather import Gather
from padless.packer.made_anew import MadeAnew, make_anew
from padless.packer.output import check_output
from padless.packer.pipeline import Build
from padless.packer.planning import check_losses, plan_splits, strategy_of
from padless.packer.recut import recut
from padless.packer.recut_copies import check_draw, copies_apart, copies_together
from padless.packer.recut_policy import Policy, records_of, refuse_cuts
from padless.packer.repack_config import (
    PLANNING,
    RepackConfig,
    check_alike,
    extras_of,
    read_excluded,
    splits_of,
)
from padless.packer.repack_identity import RepackIdentity
from padless.packer.repack_tables import (
    Table,
    assemble,
    cut_again,
    held_table,
    in_one,
    read_settled,
    read_table,
    sequence_columns,
)
from padless.packer.sources.splits import is_for_evaluation
from padless.packer.strategies import CUTS
from padless.packer.table_writer import Piece
from padless.packer.tables import Account, SplitLines
from padless.packer.tokenizer_files import TokenizerFiles
from padless.packer.work_folder import WorkFolder
from padless.runtime.format import (
    ColumnInfo,
    FileInfo,
    Manifest,
    check_file,
)
from padless.runtime.reader import PackedReader

WORTH_PREPARING = 2**28
"""Bytes of shards from which on the blocks to write them from are all used."""


def repack(config: RepackConfig) -> BuildResult:
    """Write the folder (or folder of splits) that a fresh build with these options would give.

    Raises InputError for wrong use and for what cannot be known without the sources, DiskFullError
    where the disk is full, and what opening a folder raises.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Repack(config).run_repack()
    finally:
        if collecting:
            gc.enable()


class Repack(Build):
    """One run over some folders."""

    def __init__(self, config: RepackConfig) -> None:
        if not config.folders:
            raise InputError("no packed folder given: name at least one")
        self.folders = [splits_of(folder) for folder in config.folders]
        self.asked = config
        self.extras = extras_of(config.folders, self.folders)
        firsts = [next(iter(splits.values())) for splits in self.folders]
        check_alike(config, self.folders, firsts)
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
        for first in firsts:
            for source, name in zip(first.sources, first.options.get("formats", ()), strict=False):
                if name != "auto":  # of a source without a record
                    refuse_cuts(self.config, source.path, name)
        excluded = read_excluded(config.exclude) if config.exclude else None
        # Who leaves out nothing gets what nobody left anything out of.
        self.excluded = excluded if excluded is not None and len(excluded) else None
        self._unchanged: list[tuple[Future[None], Callable[[], None]]] = []
        """Files that are being compared with their checksums, and what does it."""
        self.identity_of_repack = RepackIdentity(
            self.config, self.folders, [*config.folders], firsts, self.excluded
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return self.identity_of_repack.splits

    def constraints(self, split: str) -> dict[str, Any]:
        """What a split is planned with."""
        names = ("max_sequences_per_pack", "align", "packs_multiple", "plan_window", "seed")
        found = {"max_length": self.config.longest, **{name: getattr(self.config, name) for name in names}}
        grouped = group_column(column.name for column in self.extras)
        return {
            **found,
            "strategy": strategy_of(self.config, split),
            "epoch": 0,
            **({"grouped_by": grouped} if grouped else {}),
        }

    def run_repack(self) -> BuildResult:
        """Everything, from the check of the output to its manifest."""
        output = os.path.realpath(self.config.output)
        for folder in map(os.path.realpath, self.asked.folders):
            if output == folder or output.startswith(folder + os.sep) or folder.startswith(output + os.sep):
                raise InputError(
                    f"output {self.config.output} and {folder} lie in each other: give another --output"
                )
        firsts = self.identity_of_repack.firsts
        if self.config.fim_rate and any(first.seed != self.config.seed for first in firsts):
            raise InputError(
                f"--seed {self.config.seed} would rearrange other texts for filling in the middle than "
                f"{firsts[0].seed} did, and no packed folder has them as they were: leave --seed out, or "
                "build again"
            )
        if self.config.eval_fraction and any(first.seed != self.config.seed for first in firsts):
            raise InputError(
                f"--seed {self.config.seed} would choose another validation split than {firsts[0].seed} did, "
                "by the text of the records, which no packed folder has: leave --seed out, or build again"
            )
        if any(first.options.get("mix") and first.seed != self.config.seed for first in firsts):
            raise InputError(
                f"--seed {self.config.seed} would draw another mix than {firsts[0].seed} did, and what was "
                "not drawn is in no packed folder: leave --seed out, or build again"
            )
        check_output(self.config.output)
        self.identity = self.identity_of_repack  # type: ignore[assignment]
        return self._run_alone(self._repack_in)

    def _repack_in(self, work: WorkFolder) -> BuildResult:
        made = MadeAnew(os.path.join(work.path, "tokens.bin"))
        # What this thread does is what all wait for, so a core is left to it.
        with ThreadPoolExecutor(max(self.workers - 1, 1)) as hashing:
            try:
                found = [self._split(name, made, hashing) for name in self.identity.splits]
                shards = [
                    shard for splits in self.folders for part in splits.values() for shard in part.shards
                ]
                if sum(shard.bytes for shard in shards) > WORTH_PREPARING:
                    hashing.submit(prepare_blocks, min(self.workers + 1, len(shards)))
                lines, gathers, tables = ([item[place] for item in found] for place in range(3))
                self._done("read")
                check_losses(self.config, self.identity.splits, lines)
                plans = plan_splits(
                    self.config, self.identity.splits, lines, lambda n: [in_one(tables[n]).lines]
                )
                for number, split in enumerate(lines):
                    if split.fragments is not None:
                        gathers[number], tables[number] = cut_again(gathers[number], tables[number], split)
            except KeyboardInterrupt:
                self._forget_checks()
                raise
            finally:
                made.close()
                # Beside all of that; a damaged file is not copied, and is the reason of what else is wrong.
                self._end_checks()
        self._done("plan")
        manifests = self._write(
            lines,
            plans,
            gathers,
            [table.pieces() for table in tables],
            self._facts_of_repack(),
            self.identity_of_repack.key(),
        )
        return BuildResult(
            output=self.config.output,
            manifests=manifests,
            manifest=self._commit(manifests),
            backends={"tokenizer": "tokens as they were", "template": "none"},
            profile=self.profile,
        )

    def _end_checks(self) -> None:
        """See all files compared; those that nobody has begun with are compared here."""
        try:
            for future, check in self._unchanged:
                if future.cancel():
                    check()
            for future, _ in self._unchanged:
                if not future.cancelled():
                    future.result()
        except BaseException:  # interrupted, or damaged: nobody waits for the rest
            self._forget_checks()
            raise

    def _forget_checks(self) -> None:
        """Begin with no further file."""
        for future, _ in self._unchanged:
            future.cancel()
        self._unchanged.clear()

    def _split(self, name: str, made: MadeAnew, hashing: ThreadPoolExecutor) -> tuple[Any, Any, Any]:
        """The new lines of one split over all folders: its account, its tokens and its table."""
        manifests = [splits[name] for splits in self.folders]
        has_labels = any(manifest.has_labels for manifest in manifests)
        id_type = np.dtype("uint16" if self.identity_of_repack.largest_id < 2**16 else "int32")
        names = ["input_ids", *(["labels"] if has_labels else [])]
        names += [column.name for column in self.extras if column.level == "token"]
        tables: list[Table] = []
        segments: list[Segment] = []
        beside: list[dict[str, NDArray[Any]]] = []
        account = Account(sum(len(manifest.sources) for manifest in manifests))
        records = sources = lines = 0
        for folder, splits in zip(self.asked.folders, self.folders, strict=True):
            manifest = splits[name]
            reader = PackedReader(Path(folder) / name)
            # The reader compares the sequence table itself.
            checks = [partial(_check, reader, file) for file in manifest.tokenizer_files]
            checks += [partial(_check_shard, reader, n) for n in range(len(manifest.shards))]
            self._unchanged += [(hashing.submit(check), check) for check in checks]
            types = {column.name: column.type for column in manifest.columns}
            is_mapped = (
                manifest.options.get("compression") in (None, "none")
                and names == [column for column in types if column in {*names, "labels"}]
                and types["input_ids"] == f"list<{id_type}>"
            )
            is_mix = manifest.options.get("mix") is not None and not is_for_evaluation(name)
            table = None
            if self.excluded is None and not is_mix and not self._needs_lines(name):
                table = read_settled(reader, records, sources, self.config.longest, account)
            if table is not None:
                columns = sequence_columns(reader, self.extras, len(table.lengths), records)
                stored = _stored(reader, names, id_type, made, is_mapped)
            else:
                piece = read_table(reader, records, sources)
                if is_mix:
                    piece = copies_apart(piece)
                columns = sequence_columns(reader, self.extras, len(piece.lines), records)
                policy = self._policy(name, reader, sources, columns)
                if is_mix:
                    check_draw(piece, policy, manifest.options["mix"]["by"])
                cut = recut(piece, policy, self._is_excluded(piece))
                stored = _stored(reader, names, id_type, made, is_mapped)
                if len(cut.renewed):
                    old = Elements.lay(stored, len(piece.lines))
                    make_anew(made, old, piece.lines, records_of(piece.lines), cut)
                if cut.stored is not None:
                    new_line = np.full(len(piece.lines), -1, dtype=np.int64)
                    known = np.flatnonzero(cut.stored >= 0)
                    new_line[cut.stored[known]] = known
                    stored = renumbered(stored, new_line)
                    columns = {column: values[cut.origin] for column, values in columns.items()}
                stored += made.segments()
                left = copies_together(piece, cut, str(reader.path)) if is_mix else cut.piece
                table = held_table(left, account)
            segments += renumbered(stored, lines + np.arange(len(table.lengths))) if lines else stored
            tables.append(table)
            beside.append(columns)
            lines += len(table.lengths)
            records += sum(part.statistics["records"]["in"] for part in splits.values())
            sources += len(manifest.sources)
        empty_replies = sum(manifest.statistics["empty_replies"] for manifest in manifests)
        together = {column: np.concatenate([one[column] for one in beside]) for column in beside[0]}
        split, gather, whole = assemble(tables, segments, together, account, empty_replies)
        if self.config.homogeneous:
            arguments = np.array(self.identity_of_repack.source_arguments, dtype=np.int32)
            split.sources = arguments[in_one(whole).source[whole.lengths > 0]]
        return split, gather, whole

    def _needs_lines(self, name: str) -> bool:
        """Whether planning looks at more of the lines than their lengths."""
        return self.config.homogeneous or strategy_of(self.config, name) in CUTS

    def _policy(
        self, name: str, reader: PackedReader, sources: int, columns: Mapping[str, NDArray[Any]]
    ) -> Policy:
        manifest = reader.manifest
        formats = tuple(manifest.options.get("formats", ["?"] * len(manifest.sources)))
        return Policy(
            where=str(reader.path),
            max_length=self.config.longest,
            overflow=self.config.overflow,
            old_max_length=manifest.statistics["max_length"],
            old_overflow=manifest.options.get("overflow", "error"),
            formats=("",) * sources + formats,
            empty_replies=manifest.statistics["empty_replies"],
            by_turn=bool(manifest.options.get("expand_turns", False)),
            align=self.config.align,
            old_align=manifest.options.get("align", 1),
            was_cut=manifest.options.get("packed_with") in CUTS,
            joins=strategy_of(self.config, name) in CUTS,
            is_paired=columns[GROUP] >= 0 if GROUP in columns else None,
        )

    def _is_excluded(self, piece: Piece) -> NDArray[np.bool_] | None:
        if self.excluded is None:
            return None
        return np.isin(piece.record[piece.lines["part"] == 0], self.excluded)

    def _extras(self, lines: list[SplitLines], gathers: list[Gather]) -> tuple[ColumnInfo, ...]:
        # A build has a column where a sequence has a value of it.
        absent = {
            name
            for name in (*VERDICTS, *GROUPS)
            if not any(has_value(name, split.extras[name]) for split in lines if name in split.extras)
        }
        for split in lines:
            for name in absent:
                split.extras.pop(name, None)
        return tuple(column for column in self.extras if column.name not in absent)

    def _facts_of_repack(self) -> Facts:
        identity = self.identity_of_repack
        first = next(iter(self.folders[0].values()))
        return Facts(
            options=identity.options,
            seed=self.config.seed,
            max_length=self.config.longest,
            cap=self.config.max_sequences_per_pack,
            align=self.config.align,
            tokenizer=_tokenizer_files(Path(self.asked.folders[0]) / next(iter(self.folders[0])), first),
            vocab_size=first.vocab_size,
            largest_id=identity.largest_id,
            template=None,  # it is among the tokenizer's files
            template_checksum=first.chat_template_checksum,
            sources=identity.sources,
        )


def _check(reader: PackedReader, file: FileInfo) -> None:
    check_file(reader.path / file.file, file.bytes, file.checksum)


def _check_shard(reader: PackedReader, shard: int) -> None:
    reader.check_shard(shard, early_checksums.take(reader.path / reader.manifest.shards[shard].file))


def _stored(
    reader: PackedReader, names: list[str], id_type: np.dtype[Any], made: MadeAnew, is_mapped: bool
) -> list[Segment]:
    """A folder's tokens: as they are mapped, or what they are made into."""
    if is_mapped:
        return [*stored_segments(reader, names)]
    for segment in full_segments(reader, names, id_type):
        made.add(segment)
    return [*made.segments()]


def _tokenizer_files(folder: Path, manifest: Manifest) -> TokenizerFiles:
    contents = {
        file.file.removeprefix("tokenizer/"): (folder / file.file).read_bytes()
        for file in manifest.tokenizer_files
    }
    if "tokenizer.json" not in contents:
        raise InputError(f"{folder} has no tokenizer/tokenizer.json: build again")
    return TokenizerFiles(folder=str(folder / "tokenizer"), contents=contents, spec={}, config={})
