"""A build from one end to the other: sources -> chunks -> token store -> plan -> shards -> manifest.

Everything that does not need the tokenizer happens while it loads. What can go wrong with the input goes
wrong before the output folder is touched; what is finished is kept for the next try where the machine, not
the input, was the reason.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from padless.packer.chunk import ChunkWork, Prepared, Task
from padless.packer.commit import Facts, write_rest, write_shards
from padless.packer.config import PackConfig
from padless.packer.encode import Encoder
from padless.packer.errors import DiskFullError, InputError
from padless.packer.formats import FORMATS, detect
from padless.packer.formats.examples import Chat, Columns, RecordError
from padless.packer.lines import FAULTS, REASONS
from padless.packer.marks import choose_marks, leaves
from padless.packer.output import SPLITS, check_output, retract, sweep
from padless.packer.plan import PackPlan, shuffle_packs
from padless.packer.pool import WorkerLostError, run_chunks
from padless.packer.sources import BadRecord, Chunk, SourceFile, read_chunk, resolve_sources, walk
from padless.packer.strategies import STRATEGIES
from padless.packer.tables import SplitLines, collect, lay_elements
from padless.packer.template import CLASSIC, ChatTemplate, load_template
from padless.packer.token_store import ChunkStore, Entry, WorkFolder
from padless.packer.tokenizer_files import take_loading
from padless.packer.write import Layout, sync_folder, write_bytes
from padless.runtime.format import (
    MANIFEST,
    Manifest,
    SourceInfo,
    SplitInfo,
    SplitsManifest,
    checksum_bytes,
    checksum_file,
    load_manifest,
)

SHADOW_CHARACTERS = 48 * 2**20
"""Rendered text that may be held while the tokenizer loads."""


@dataclass
class BuildResult:
    """What a build gave: the manifest of each split ("" for a folder of one), and how it went."""

    output: str
    manifests: dict[str, Manifest]
    manifest: Manifest | SplitsManifest
    backends: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    """source -> the format it was taken for."""
    seconds: float = 0.0
    profile: dict[str, float] = field(default_factory=dict)
    """stage -> seconds."""
    resumed_chunks: int = 0
    replaced_surrogates: int = 0
    was_finished: bool = False


def pack_dataset(config: PackConfig) -> Manifest | SplitsManifest:
    """Build a packed folder (or a folder of splits); the manifest of what lies there afterwards.

    Raises InputError for wrong use and bad input, DiskFullError where the disk is full.
    """
    return build(config).manifest


def build(config: PackConfig) -> BuildResult:
    """`pack_dataset` with everything that a summary tells."""
    collecting = gc.isenabled()
    gc.disable()  # millions of records and no cycles among them
    try:
        return _Build(config).run()
    finally:
        if collecting:
            gc.enable()


class _Build:
    def __init__(self, config: PackConfig) -> None:
        self.config = config
        self.started = self.mark = time.perf_counter()
        self.profile: dict[str, float] = {}
        self.report = config.progress or (lambda stage, counters: None)
        self.workers = config.workers or len(os.sched_getaffinity(0))
        self.formats: dict[int, str] = {}
        self.taken = 0
        self.splits = SPLITS if config.eval_fraction or config.eval_sources else ("",)

    def _done(self, stage: str) -> None:
        now = time.perf_counter()
        self.profile[stage] = self.profile.get(stage, 0.0) + now - self.mark
        self.mark = now

    # -- the whole ------------------------------------------------------------------------------

    def run(self) -> BuildResult:
        config = self.config
        loading = take_loading(config.tokenizer)
        self.files = resolve_sources(config.sources, eval_specs=config.eval_sources, text_by=config.text_by)
        check_output(config.output)
        import pyarrow.compute  # noqa: F401 (in the shadow of the tokenizer's load)
        import pyarrow.parquet  # noqa: F401

        self.tokenizer = loading.files.result()
        self.template_source = self._template_source()
        self.options = self._options()
        finished = self._finished()
        if finished is not None:
            return finished
        created = not os.path.exists(config.output)
        folder = WorkFolder(config.output)
        try:
            store = ChunkStore(folder.path, self._key())
            try:
                result = self._build(store, loading)
            finally:
                store.close()
        except (DiskFullError, WorkerLostError, KeyboardInterrupt, OSError):
            folder.release()
            raise
        except BaseException:
            folder.remove()
            if created and not os.listdir(config.output):
                os.rmdir(config.output)
            raise
        folder.remove()
        result.seconds = time.perf_counter() - self.started
        return result

    def _build(self, store: ChunkStore, loading: Any) -> BuildResult:
        resumed = len(store.entries)
        replaced = self._tokenize(store, loading)
        self._done("tokenize")
        lines = collect(store, len(self.splits), len(self.files))
        self._check_losses(lines)
        plans = self._plan(lines)
        self._done("plan")
        manifests = self._write(store, lines, plans)
        self._done("write")
        manifest: Manifest | SplitsManifest
        if self.splits == ("",):
            manifest = manifests[""]
        else:
            manifest = self._write_splits(manifests)
        sweep(self.config.output, self._kept(manifests))
        self._done("commit")
        return BuildResult(
            output=self.config.output,
            manifests=manifests,
            manifest=manifest,
            backends={"tokenizer": self.backend, "template": self.engine},
            formats={self.files[number].name: name for number, name in sorted(self.formats.items())},
            profile=self.profile,
            resumed_chunks=resumed,
            replaced_surrogates=replaced,
        )

    # -- what this build is ---------------------------------------------------------------------

    def _template_source(self) -> str | None:
        if self.config.template == CLASSIC:
            return None
        return load_template(self.config.template, self.tokenizer.own_template())

    def _options(self) -> dict[str, Any]:
        """What can change the bytes, as it goes into the manifest (but for what the data decides)."""
        found = self.config.recorded()
        found["eval_files"] = sum(file.eval for file in self.files)
        found["classic_prompts"] = self.config.template == CLASSIC
        self.end_id = self._special_id("eos", "eos_token")
        found["eos_id"] = self.end_id
        return found

    def _special_id(self, option: str, name: str) -> int | None:
        value = getattr(self.config, option)
        if value == "none":
            return None
        text = self.tokenizer.named_tokens().get(name) if value == "auto" else value
        if text is None:
            return None
        found = self.tokenizer.token_id(text)
        if found is None:
            raise InputError(
                f"--{option} {text!r} is no token of the tokenizer in {self.config.tokenizer}; give one that "
                "is, or none"
            )
        return found

    def _template_checksum(self) -> str | None:
        if self.template_source is None:
            return None
        return "sha256:" + hashlib.sha256(self.template_source.encode("utf-8")).hexdigest()

    def _key(self) -> str:
        """Names everything that decides what a chunk becomes."""
        facts: list[Any] = [self.options, self.tokenizer.fingerprint, self._template_checksum()]
        for file in self.files:
            about = os.stat(file.path)
            facts.append([file.name, file.eval, about.st_size, about.st_mtime_ns])
        return checksum_bytes(repr(facts).encode("utf-8"))

    def _finished(self) -> BuildResult | None:
        """The result of an earlier run of this very build, or None; InputError for another build's."""
        output = self.config.output
        if self.config.force or not os.path.exists(os.path.join(output, MANIFEST)):
            return None
        manifest = load_manifest(output)
        if isinstance(manifest, SplitsManifest):
            names = manifest.names
            manifests = {name: load_manifest(os.path.join(output, name)) for name in names}
        else:
            manifests = {"": manifest}
        differences = self._differences(next(iter(manifests.values())), tuple(manifests))
        if differences:
            raise InputError(
                f"{output} holds a finished data set of another build ({'; '.join(differences[:4])}): give "
                "another --output, or --force to replace it"
            )
        found = {name: item for name, item in manifests.items() if isinstance(item, Manifest)}
        return BuildResult(output=output, manifests=found, manifest=manifest, was_finished=True)

    def _differences(self, old: Manifest | SplitsManifest, splits: tuple[str, ...]) -> list[str]:
        if not isinstance(old, Manifest):
            return ["it is a folder of splits within a split"]
        found = [] if splits == self.splits else [f"splits {splits or 'none'}, now {self.splits}"]
        new = _as_json(self.options)
        for name in sorted(new):
            before = old.options.get(name)
            if before != new[name]:
                found.append(f"{name} {before!r}, now {new[name]!r}")
        if old.tokenizer_fingerprint != self.tokenizer.fingerprint:
            found.append("another tokenizer")
        if old.chat_template_checksum != self._template_checksum():
            found.append("another chat template")
        if [source.path for source in old.sources] != [file.name for file in self.files]:
            found.append(f"{len(old.sources)} source files, now others")
        else:
            for source, file in zip(old.sources, self.files, strict=True):
                size = os.path.getsize(file.path)
                if size != source.bytes or checksum_file(file.path) != source.checksum:
                    found.append(f"{file.name} has changed")
        return found

    # -- tokenize -------------------------------------------------------------------------------

    def _tokenize(self, store: ChunkStore, loading: Any) -> int:
        encoder = Encoder(self.tokenizer)
        template = None
        if self.template_source is not None:
            variables = {**self.tokenizer.named_tokens(), **self.config.template_args}
            template = ChatTemplate(
                self.template_source, variables, self.config.template or "of the tokenizer"
            )
        work = ChunkWork(self.config, template, encoder, self.end_id)
        self.vocab_size, self.largest_id = encoder.vocab_size, encoder.largest_id
        self._done("start")
        tasks = self._tasks(store)
        prepared, more = self._in_shadow(work, tasks, loading)
        self.backend = encoder.backend
        if encoder.fast is None:
            self.backend += f" (fastokens: {encoder.why_not_fast})"
        self.engine = "minijinja" if template is not None and template.fast is not None else "jinja2"
        if self.config.bos == "auto":
            work.begin_ids = encoder.begin_ids
        elif (begin := self._special_id("bos", "bos_token")) is not None:
            work.begin_ids = (begin,)
        if more:
            encoder.drop_vocabulary()
            encoder.forget_reference()
            _give_memory_back()
        self._done("load")
        total = sum(os.path.getsize(file.path) for file in self.files)
        counts = {"records": 0.0, "tokens": 0.0, "bytes": 0.0, "total_bytes": float(total)}

        def count(entry: Entry) -> None:
            if not entry.problems:
                store.commit(entry)
            else:
                problems.append(entry)
            counts["records"] += entry.records
            counts["tokens"] += entry.tokens
            counts["bytes"] += entry.size
            self.report("tokenize", counts)

        problems: list[Entry] = []
        for entry in list(store.entries.values()):
            counts["records"] += entry.records
            counts["tokens"] += entry.tokens
            counts["bytes"] += entry.size
        try:
            run_chunks(work, prepared, tasks, more, self.workers, store, count)
        except DiskFullError:
            store.cut_back()
            raise
        if problems:
            raise self._problem(min(problems, key=lambda entry: entry.chunk), store)
        return sum(entry.replaced for entry in store.entries.values())

    def _tasks(self, store: ChunkStore) -> Iterator[Task]:
        """Chunks that are still to do, each with the format of its source."""
        for chunk in walk(self.files, text_by=self.config.text_by):
            file = self.files[chunk.source]
            if chunk.source not in self.formats:
                self.formats[chunk.source] = self._format(chunk, file)
            take = None
            if self.config.limit is not None:
                left = self.config.limit - self.taken
                if left <= 0:
                    continue  # the walk goes on for the checksums of the sources
                take = min(left, len(read_chunk(chunk).rows))
                self.taken += take
            if chunk.index not in store.entries:
                yield Task(chunk, self.formats[chunk.source], file.eval, take)

    def _format(self, chunk: Chunk, file: SourceFile) -> str:
        name = self.config.format
        if name == "auto":
            rows = [row for row in read_chunk(chunk).rows if type(row) is not BadRecord]
            if not rows:
                raise InputError(
                    f"{file.name}: none of its first records can be read, so its format cannot be told; "
                    "name it with --format"
                )
            name = detect(rows[0], Columns(self.config.columns), file.name)
        if self.config.overflow == "split" and name not in ("text", "tokenized"):
            raise InputError(
                f"--overflow split is for text: a fragment of {file.name} ({name}) would begin in "
                "mid-conversation; choose error, drop or truncate"
            )
        return name

    def _in_shadow(
        self, work: ChunkWork, tasks: Iterator[Task], loading: Any
    ) -> tuple[deque[Prepared], bool]:
        """Render while the tokenizer loads; what was rendered, and whether more is to come."""
        prepared: deque[Prepared] = deque()
        first = next(tasks, None)
        sample: list[str] = []
        if first is not None:
            self._warm_template(work, first)
            prepared.append(work.prepare(first))
            for batch in prepared[0].batches:
                bare = batch.marked.translate({ord(mark): None for mark in batch.marks[:2]})
                sample += bare.split(batch.marks[2])[:-1]
        plain = not self.config.allow_special
        chats = first is not None and any(batch.is_chat for batch in prepared[0].batches)
        flags = [False, plain] if chats else [plain, False]
        if len(self.files) == 1 or flags[0] == flags[1]:
            flags = flags[:1]
        work.encoder.rehearse(sample[:: max(1, len(sample) // 256)], flags)
        size = sum(item.size for item in prepared)
        more = first is not None
        while more and not loading.fast.done() and size < SHADOW_CHARACTERS:
            task = next(tasks, None)
            if task is None:
                more = False
            else:
                prepared.append(work.prepare(task))
                size += prepared[-1].size
        work.encoder.prove(loading)
        return prepared, more

    def _warm_template(self, work: ChunkWork, task: Task) -> None:
        """Try the fast template engine on a sample of the first chunk."""
        if work.template is None:
            return
        rows = [row for row in read_chunk(task.chunk).rows[:512] if type(row) is not BadRecord]
        sample: list[Chat] = []
        for row in rows[:: max(1, len(rows) // 64)]:
            try:
                example = FORMATS[task.format].convert(row, work.columns)
            except RecordError:
                continue
            if isinstance(example, Chat):
                sample.append(example)
        texts = [work.template.fixed_text, *(leaf for chat in sample for leaf in leaves(chat))]
        marks = choose_marks(texts)
        if sample and marks is not None:
            work.template.enable_fast(sample, marks)

    def _problem(self, entry: Entry, store: ChunkStore) -> InputError:
        """The first record, in the order of the input, that the policies do not let pass."""
        record, line, message = entry.problems[0]
        before = [store.entries[n] for n in store.entries if n < entry.chunk]
        row = record + sum(other.records for other in before if other.source == entry.source)
        where = f"{self.files[entry.source].name}, record {row:,}"
        if line is not None:
            where += f" (line {line:,})"
        more = len(entry.problems) - 1
        also = f" ({more} more like it close by)" if more else ""
        hint = "" if "--overflow" in message else "; --on-bad-record drop leaves such records out"
        return InputError(f"{where}: {message}{hint}{also}")

    # -- account, plan, write -------------------------------------------------------------------

    def _check_losses(self, lines: list[SplitLines]) -> None:
        total = sum(split.records["in"] for split in lines)
        dropped: dict[str, int] = {}
        for split in lines:
            for reason, count in split.dropped_by_reason.items():
                dropped[reason] = dropped.get(reason, 0) + count
        listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
        if not any(len(split.lengths) for split in lines):
            raise InputError(f"nothing to pack: {total:,} records in, 0 kept ({listed or 'no records'})")
        faults = sum(dropped.get(REASONS[reason], 0) for reason in FAULTS)
        if faults > self.config.max_drop_share * total:
            raise InputError(
                f"{faults:,} of {total:,} records ({faults / total:.1%}) would be dropped for faults "
                f"({listed}), more than max_drop_share {self.config.max_drop_share:.1%}: look at the source, "
                "or allow it with --max-drop-share"
            )
        for name, split in zip(self.splits, lines, strict=True):
            if not len(split.lengths):
                raise InputError(
                    f"the {name} split would be empty ({split.records['in']:,} records): change "
                    "--eval-fraction or --seed"
                )

    def _plan(self, lines: list[SplitLines]) -> list[PackPlan]:
        plans: list[PackPlan] = []
        for name, split in zip(self.splits, lines, strict=True):
            strategy = self.config.strategy if name != SPLITS[1] else self.config.eval_strategy
            plan = STRATEGIES[strategy](
                split.lengths,
                self.config.max_length,
                max_sequences_per_pack=self.config.max_sequences_per_pack,
                seed=self.config.seed,
            )
            if strategy != "none":  # decreasing orders put like with like; `none` keeps the input's order
                plan = shuffle_packs(plan, self.config.seed)
            plans.append(plan)
        return plans

    def _write(
        self, store: ChunkStore, lines: list[SplitLines], plans: list[PackPlan]
    ) -> dict[str, Manifest]:
        output = self.config.output
        if not os.path.exists(os.path.join(output, MANIFEST)):
            sweep(output, set())  # what an interrupted run left
        binary = lay_elements(store)
        facts = self._facts()
        layout = Layout(
            id_type="uint16" if facts.largest_id < 2**16 else "int32",
            labels=self.config.labels == "always" or not all(split.only_starts_masked for split in lines),
            compression=None if self.config.compression == "none" else self.config.compression,
            shard_bytes=self.config.shard_size,
        )
        counts = {"tokens": 0.0, "total_tokens": float(sum(split.tokens for split in lines))}

        def count(tokens: int) -> None:
            counts["tokens"] += tokens
            self.report("write", counts)

        folders = [os.path.join(output, name) if name else output for name in self.splits]
        shards = [
            write_shards(folder, plan, split, binary, layout, self.workers, count)
            for folder, plan, split in zip(folders, plans, lines, strict=True)
        ]
        # From here on an older data set is no more: its new shards are complete.
        retract(output)
        for folder in folders:
            retract(folder)
        return {
            name: write_rest(
                folders[n],
                n,
                len(self.splits),
                name or "train",
                store,
                plans[n],
                lines[n],
                layout,
                shards[n],
                facts,
            )
            for n, name in enumerate(self.splits)
        }

    def _facts(self) -> Facts:
        formats = [self.formats.get(number, self.config.format) for number in range(len(self.files))]
        return Facts(
            options=_as_json({**self.options, "formats": formats}),
            seed=self.config.seed,
            max_length=self.config.max_length,
            cap=self.config.max_sequences_per_pack,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            largest_id=self.largest_id,
            template=self.template_source,
            template_checksum=self._template_checksum(),
            sources=tuple(
                SourceInfo(path=file.name, bytes=file.bytes, checksum=file.checksum, records=0)
                for file in self.files
            ),
        )

    def _write_splits(self, manifests: dict[str, Manifest]) -> SplitsManifest:
        output = self.config.output
        write_bytes(
            output,
            "dataset_dict.json",
            b'{"splits": ["' + b'", "'.join(s.encode() for s in manifests) + b'"]}\n',
        )
        infos: list[SplitInfo] = []
        for name in manifests:
            path = os.path.join(output, name, MANIFEST)
            infos.append(SplitInfo(name=name, bytes=os.path.getsize(path), checksum=checksum_file(path)))
        manifest = SplitsManifest(
            splits=tuple(infos), padless_version=next(iter(manifests.values())).padless_version
        )
        write_bytes(output, MANIFEST, manifest.to_json())
        sync_folder(output)
        return manifest

    def _kept(self, manifests: dict[str, Manifest]) -> set[str]:
        keep = {MANIFEST, "dataset_dict.json"} if self.splits != ("",) else set()
        for name, manifest in manifests.items():
            prefix = f"{name}/" if name else ""
            files: list[str] = [item.file for item in manifest.files]
            keep |= {prefix + file for file in (*files, MANIFEST, "dataset_info.json", "state.json")}
        return keep


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    """As the manifest gives them back: tuples are lists."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}


def _give_memory_back() -> None:
    """Hand freed pages to the system, before workers inherit them."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return
