"""A build from one end to the other: sources -> chunks -> token store -> plan -> shards -> manifest.

What can go wrong with the input goes wrong before the output's data are touched; what is finished is kept
for the next try where the machine, not the input, was the reason.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from padless.packer import teacher
from padless.packer.buckets import remove_buckets
from padless.packer.build_result import BuildResult
from padless.packer.commit import (
    Beside,
    Facts,
    near_shards,
    write_beside,
    write_rest,
    write_shards,
    write_splits,
)
from padless.packer.config import PackConfig
from padless.packer.elements import gather_of, lay_elements, lay_images
from padless.packer.engine import Engine, engine_of
from padless.packer.errors import ClusterError, DiskFullError, WorkerLostError, disk_full
from padless.packer.extra_columns import extra_columns
from padless.packer.fragments import lines_of_split
from padless.packer.gather import Gather
from padless.packer.identity import Identity, version_of
from padless.packer.kept_shards import KeptShards
from padless.packer.output import check_output, first_missing, remember_splits, remove_empty, retract, sweep
from padless.packer.plan import PackPlan
from padless.packer.planning import (
    check_losses,
    draw_mix,
    enter_rollouts,
    enter_sources,
    plan_splits,
    strategy_of,
)
from padless.packer.publish import Publishing
from padless.packer.published import check_writable, is_held
from padless.packer.room import needed_for_shards, needed_from_chunks, with_room
from padless.packer.sources import Choice, resolve_sources
from padless.packer.table_writer import ColumnPiece, Piece, pieces_of
from padless.packer.tables import SplitLines, collect
from padless.packer.token_store import ChunkStore
from padless.packer.tokenizer_files import Loading, take_loading, tokenizer_folder
from padless.packer.work_folder import WorkFolder
from padless.packer.write import Layout
from padless.runtime.format import (
    MANIFEST,
    WORK_FOLDER,
    ColumnInfo,
    Manifest,
    PadlessError,
    ShardInfo,
    SourceInfo,
    SplitsManifest,
    checksum_bytes,
)
from padless.runtime.storage import cache_folder, is_url

if TYPE_CHECKING:
    from padless.packer.tokenizing import Tokenizing

RESUMABLE = (DiskFullError, WorkerLostError, ClusterError, KeyboardInterrupt, OSError)
"""The machine was the reason, or the user: what is finished is kept for the same command."""

_LEAST_ROOM = 2**16
"""Bytes to ask for where a library does not say how many it could not write."""


def pack_dataset(config: PackConfig) -> Manifest | SplitsManifest:
    """Build a packed folder (or a folder of splits); the manifest of what lies there afterwards.

    Raises InputError for wrong use and bad input, DiskFullError where the disk is full.
    """
    return build(config).manifest


def build(config: PackConfig) -> BuildResult:
    """`pack_dataset` with everything that a summary tells."""
    collecting = gc.isenabled()
    gc.disable()  # millions of records and no cycles among them
    loading = take_loading(tokenizer_folder(config.tokenizer))
    try:
        building = Build(config)
        try:
            return building.run(loading)
        finally:
            building.engine.stop()
    finally:
        loading.stop()
        if collecting:
            gc.enable()


class Build:
    """One run; `packer/repack.py` shares all but where the tokens come from."""

    def __init__(self, config: PackConfig) -> None:
        self.config = config
        self.started = self.mark = time.perf_counter()
        self.profile: dict[str, float] = {}
        self.report = config.progress or (lambda stage, counters: None)
        self.workers = config.workers or len(os.sched_getaffinity(0))
        self.engine: Engine = engine_of(config, self.workers)

    def _done(self, stage: str) -> None:
        now = time.perf_counter()
        self.profile[stage] = self.profile.get(stage, 0.0) + now - self.mark
        self.mark = now

    def run(self, loading: Loading) -> BuildResult:
        config, output = self.config, self.config.output
        self.files = resolve_sources(
            config.sources,
            eval_specs=config.eval_sources,
            text_by=config.text_by,
            choice=Choice(split=config.split, subset=config.subset, revision=config.revision),
        )
        if not self.engine.is_here:  # other machines work in other folders
            for file in self.files:
                if file.data is None and not is_url(file.path):
                    file.path = os.path.abspath(file.path)
        check_output(output)
        import pyarrow.compute  # noqa: F401 (in the shadow of the tokenizer's load)
        import pyarrow.parquet  # noqa: F401

        self.identity = Identity(config, self.files, loading.files)
        return self._run_alone(lambda folder: self._build_in(folder, loading))

    def _run_alone(self, work: Callable[[WorkFolder], BuildResult]) -> BuildResult:
        """Do the work in a locked folder, unless it is done; clean up by how it ended."""
        output = self.config.output
        if is_url(output):
            return self._run_for_url(output, work)
        found = self._finished()
        if found is not None and not os.path.exists(os.path.join(output, WORK_FOLDER)):
            found.seconds = time.perf_counter() - self.started
            return found
        self.engine.start()
        made = first_missing(output)
        try:
            folder = WorkFolder(output)
        except OSError as error:
            remove_empty(output, made)
            raise disk_full(error, output, _LEAST_ROOM) from error
        try:
            remember_splits(output, self.identity.splits)
            # Once more, now that no other build can be about to commit.
            found = self._finished()
            if found is not None:  # an earlier run was stopped between its commit and its sweep
                sweep(output, self._kept(found.manifests))
            result = found or work(folder)
        except RESUMABLE as error:
            folder.release()
            if isinstance(error, OSError) and not isinstance(error, DiskFullError):  # from a library's writer
                raise disk_full(error, str(error.filename or output), _LEAST_ROOM) from error
            raise
        except BaseException:
            folder.remove()
            remove_empty(output, made)
            raise
        folder.remove()
        result.seconds = time.perf_counter() - self.started
        return result

    def _run_for_url(self, url: str, work: Callable[[WorkFolder], BuildResult]) -> BuildResult:
        """Do the work in a folder on this machine, and upload it."""
        check_writable(url)
        found = self._finished()
        if found is None or is_held(url):
            try:
                found = self._publish(url, work)
            except OSError as error:
                if isinstance(error, PadlessError):
                    raise
                raise disk_full(error, str(error.filename or cache_folder()), _LEAST_ROOM) from error
        found.seconds = time.perf_counter() - self.started
        return found

    def _publish(self, url: str, work: Callable[[WorkFolder], BuildResult]) -> BuildResult:
        """The same, where it is to do or somebody is at it."""
        key, splits = self.identity.key(), self.identity.splits
        with Publishing(url, key, splits, force=self.config.force, report=self.report) as target:
            found = self._finished()
            if found is not None:  # an earlier run was stopped between its commit and its sweep
                target.sweep(self._kept(found.manifests))
                return found
            self.config = replace(self.config, output=target.folder, force=False)
            self.identity.config = self.config
            found = self._run_alone(work)
            self.mark = time.perf_counter()
            target.publish(found.manifests)
            self._done("upload")
            found.output, found.profile, found.was_finished = url, self.profile, False
        return found

    def _finished(self) -> BuildResult | None:
        """The result of an earlier run of this very build; None where there is none."""
        found = self.identity.finished()
        if found is None:
            return None
        manifest, manifests = found
        return BuildResult(
            output=self.config.output, manifests=manifests, manifest=manifest, was_finished=True
        )

    def _build_in(self, folder: WorkFolder, loading: Loading) -> BuildResult:
        store = ChunkStore(folder.path, self.identity.key())
        try:
            return self._build(store, loading)
        finally:
            store.close()

    def _build(self, store: ChunkStore, loading: Loading) -> BuildResult:
        from padless.packer.tokenizing import Tokenizing, give_memory_back  # for a build alone

        resumed = len(store.entries)
        if not resumed and not os.path.exists(os.path.join(self.config.output, MANIFEST)):
            sweep(self.config.output, set())  # another build's shards need no room
        stage = Tokenizing(self.identity, store, self.engine, self.report, self._done)
        try:
            stage.run(loading)
        except DiskFullError as error:
            raise with_room(error, needed_from_chunks(self.identity, store), self.config.output) from error
        lines = collect(store, len(self.identity.splits), len(self.files))
        check_losses(self.config, self.identity.splits, lines)
        count = len(lines)
        if "rollout" in stage.formats.values():
            enter_rollouts(store, stage.formats, lines, self.files, is_mixed=self.identity.mix is not None)
        else:
            teacher.enter(store, lines, self.files)
        if self.identity.mix is not None:
            draw_mix(self.identity.mix, self.identity.splits, store, lines, self.files)
        if self.config.homogeneous:
            enter_sources(store, lines, self.files)
        plans = plan_splits(
            self.config,
            self.identity.splits,
            lines,
            lambda n: (block for _, block in lines_of_split(store, n, count, lines[n].times, None)),
        )
        if not stage.is_small:
            give_memory_back()  # planning's arrays, before those that tell where sequences lie
        self._done("plan")
        tokens, weights = lay_elements(store)
        images = lay_images(store)
        gathers: list[Gather] = [gather_of(tokens, weights, split, store.let_go, images) for split in lines]
        # Who needs the store no more holds nothing of it.
        del tokens, weights
        for split in lines:
            split.elements = split.elements[:0].copy()
        pieces = [pieces_of(store, n, len(lines), split) for n, split in enumerate(lines)]
        key = self.identity.key()
        manifests = self._write(lines, plans, gathers, pieces, self._facts(stage), key)
        manifest = self._commit(manifests)
        return BuildResult(
            output=self.config.output,
            manifests=manifests,
            manifest=manifest,
            backends=stage.backends,
            formats={self.files[number].name: name for number, name in sorted(stage.formats.items())},
            columns={self.files[number].name: names for number, names in sorted(stage.columns.items())},
            profile=self.profile,
            chunks=len(store.entries),
            resumed_chunks=resumed,
            replaced_surrogates=sum(entry.replaced for entry in store.entries.values()),
        )

    def _commit(self, manifests: dict[str, Manifest]) -> Manifest | SplitsManifest:
        """The manifest over all splits, once each has its own; nothing else is left then."""
        self._done("write")
        manifest: Manifest | SplitsManifest
        if self.identity.splits == ("",):
            manifest = manifests[""]
        else:
            manifest = write_splits(self.config.output, manifests)
        sweep(self.config.output, self._kept(manifests))
        self._done("commit")
        return manifest

    def _write(
        self,
        lines: list[SplitLines],
        plans: list[PackPlan],
        gathers: list[Gather],
        pieces: Sequence[Iterator[Piece | ColumnPiece]],
        facts: Facts,
        key: str,
    ) -> dict[str, Manifest]:
        """`key` names all that decides the sequences and their plan."""
        output = self.config.output
        fresh = not os.path.exists(os.path.join(output, MANIFEST))
        layout = Layout(
            id_type="uint16" if facts.largest_id < 2**16 else "int32",
            labels=self.config.labels == "always" or not all(split.only_starts_masked for split in lines),
            compression=None if self.config.compression == "none" else self.config.compression,
            shard_bytes=self.config.shard_size,
            extras=self._extras(lines, gathers),
        )
        names = self.identity.splits
        folders = [os.path.join(output, name) if name else output for name in names]
        strategies = [strategy_of(self.config, name) for name in names]
        key = checksum_bytes(repr([key, layout, version_of("pyarrow")]).encode("utf-8"))
        kept = KeptShards(os.path.join(output, WORK_FOLDER), output, key)
        if fresh:
            sweep(output, kept.files)  # what else an interrupted run left

        def beside() -> list[Beside]:
            return [
                write_beside(folders[n], pieces[n], plans[n], lines[n], facts, strategies[n])
                for n in range(len(names))
            ]

        try:
            remove_buckets(output)
            for n, name in enumerate(names):  # before the sequence table, which has places in memory
                gathers[n] = near_shards(output, name, plans[n], lines[n], gathers[n], layout, kept)
            with ThreadPoolExecutor(1) as other:
                # A data set that is there is left whole until the new one's shards are complete.
                early = other.submit(beside) if fresh else None
                shards = self._write_shards(plans, lines, gathers, layout, kept)
            if not fresh:
                retract(output)
                for folder in folders:
                    retract(folder)
            late = early.result() if early is not None else beside()
            return {
                name: write_rest(
                    folders[n],
                    name or "train",
                    lines[n],
                    layout,
                    shards[n],
                    late[n],
                    facts,
                    strategies[n],
                )
                for n, name in enumerate(names)
            }
        except BaseException as error:
            if not isinstance(error, RESUMABLE):
                kept.drop()
            if not os.path.exists(os.path.join(output, MANIFEST)):
                sweep(output, kept.files)  # half a data set is none
            if isinstance(error, DiskFullError):
                needed = needed_for_shards(facts.tokenizer, layout, plans, lines, kept.bytes)
                raise with_room(error, needed, output) from error
            raise

    def _extras(self, lines: list[SplitLines], gathers: list[Gather]) -> tuple[ColumnInfo, ...]:
        weighted = any(g.is_weighted for g in gathers) and lines[0].is_weighted
        return extra_columns(lines, weighted=weighted)

    def _write_shards(
        self,
        plans: list[PackPlan],
        lines: list[SplitLines],
        gathers: list[Gather],
        layout: Layout,
        kept: KeptShards,
    ) -> list[tuple[ShardInfo, ...]]:
        counts = {"tokens": 0.0, "total_tokens": float(sum(split.tokens for split in lines))}

        def count(tokens: int) -> None:
            counts["tokens"] += tokens
            self.report("write", counts)

        return [
            write_shards(self.config.output, name, plan, split, gather, layout, self.engine, count, kept)
            for name, plan, split, gather in zip(self.identity.splits, plans, lines, gathers, strict=True)
        ]

    def _facts(self, stage: Tokenizing) -> Facts:
        formats = [stage.formats.get(number, self.config.format) for number in range(len(self.files))]
        return Facts(
            options={**self.identity.options, "formats": formats},
            seed=self.config.seed,
            max_length=self.config.longest,
            cap=self.config.max_sequences_per_pack,
            align=self.config.align,
            tokenizer=self.identity.tokenizer,
            vocab_size=stage.vocab_size,
            largest_id=stage.largest_id,
            template=self.identity.template,
            template_checksum=self.identity.template_checksum,
            sources=tuple(
                SourceInfo(
                    path=file.name,
                    bytes=file.bytes,
                    checksum=file.checksum,
                    records=0,
                    revision=file.revision,
                )
                for file in self.files
            ),
        )

    def _kept(self, manifests: dict[str, Manifest]) -> set[str]:
        keep = {MANIFEST, "dataset_dict.json"} if self.identity.splits != ("",) else set()
        for name, manifest in manifests.items():
            prefix = f"{name}/" if name else ""
            files: list[str] = [item.file for item in manifest.files]
            keep |= {prefix + file for file in (*files, MANIFEST, "dataset_info.json", "state.json")}
        return keep
