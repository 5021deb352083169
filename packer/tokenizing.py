"""The first half of a build: all chunks of all sources tokenized into the store.

Everything that does not need the tokenizer happens while it loads: the first chunks are read and rendered,
the template's fast engine and the sample for the tokenizer's check are made ready.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from padless.packer.chunk import ChunkWork
from padless.packer.encode import Encoder
from padless.packer.engine import Engine
from padless.packer.errors import CutError, DiskFullError, InputError, RecordError
from padless.packer.formats import MIXED, detect
from padless.packer.formats.examples import Chat, Columns
from padless.packer.identity import Identity
from padless.packer.image_rule import ImageRule, rule_of
from padless.packer.marks import choose_marks, leaves
from padless.packer.prepared import Prepared, Task
from padless.packer.recut_policy import refuse_cuts
from padless.packer.several import examples_of
from padless.packer.sources import BadRecord, Chunk, SourceFile, read_chunk, walk
from padless.packer.template import ChatTemplate
from padless.packer.token_store import ChunkStore, Entry
from padless.packer.tokenizer_files import Loading

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers for these options of mallopt."""
SAMPLE_TEXTS, SAMPLE_CHARACTERS, LEAST_TEXTS = 256, 2**18, 16
"""Texts of the first chunk that the tokenizer's backends are compared on."""
SHADOW_BYTES = 48 * 2**20
"""Rendered text that may be held while the tokenizer loads; inputs below that are done in threads."""


class Tokenizing:
    """`run` fills the store; afterwards the facts about how it went are there."""

    def __init__(
        self,
        identity: Identity,
        store: ChunkStore,
        engine: Engine,
        report: Callable[[str, Mapping[str, float]], None],
        done: Callable[[str], None],
    ) -> None:
        self.identity = identity
        self.config = identity.config
        self.files = identity.files
        self.store = store
        self.engine = engine
        self.report = report
        self.done = done
        self.formats: dict[int, str] = {}
        """Source -> the format of its records."""
        self.columns: dict[int, tuple[str, ...]] = {}
        """Source -> the columns of its first record, where its format was told by them."""
        self.backends: dict[str, str] = {}
        self.vocab_size = self.largest_id = 0
        self._size = sum(file.size for file in self.files)
        self._shadow = SHADOW_BYTES if engine.is_here else 0
        self.is_small = self._size < self._shadow
        """Whether all of it may be rendered while the tokenizer loads."""
        self._taken = 0
        self._first: Task | None = None
        """The first chunk of all, done or not: the sample comes from it in every run."""
        self._problems: list[Entry] = []
        self._counts = {"records": 0.0, "tokens": 0.0, "bytes": 0.0, "total_bytes": float(self._size)}

    def run(self, loading: Loading) -> None:
        """Tokenize what the store does not hold yet. InputError for a record that must not pass."""
        work = self._work()
        encoder, template = work.encoder, work.renderer.template
        self.vocab_size, self.largest_id = encoder.vocab_size, encoder.largest_id
        self.done("start")
        for entry in self.store.entries.values():
            self._count(entry)
        tasks = self._tasks()
        try:
            prepared = self._in_shadow(work, tasks, loading)
        except CutError:
            tasks = self._again(exact_cuts=True)
            prepared = self._in_shadow(work, tasks, loading)
        if self.config.bos != "auto":
            begin = self.identity.special_id("bos", "bos_token")
            work.begin_ids = () if begin is None else (begin,)
        elif not self._only_chats(prepared):
            work.begin_ids = encoder.begin_ids
        if not self.is_small:
            encoder.drop_vocabulary()
            give_memory_back()
        self.done("load")
        try:
            try:
                self._run_chunks(work, prepared, tasks)
            except CutError:
                self._run_chunks(work, deque(), self._again(exact_cuts=True))
            if not encoder.was_right():
                self._run_chunks(work, deque(), self._again(exact_cuts=self.store.exact_cuts))
        except DiskFullError:
            self.store.cut_back()
            raise
        tokenizer = encoder.backend
        if encoder.fast is None:
            tokenizer += f" (fastokens: {encoder.why_not_fast})"
        fast = template is not None and template.fast is not None
        engine = "none" if template is None else "minijinja" if fast else "jinja2"
        self.backends = {"tokenizer": tokenizer, "template": engine}
        if self._problems:
            raise self._problem(min(self._problems, key=lambda entry: entry.chunk))
        if not self.is_small:
            encoder.fast = None
            loading.release()
            give_memory_back()
        self.done("tokenize")

    def _work(self) -> ChunkWork:
        encoder = Encoder(self.identity.tokenizer)
        template = None
        if self.identity.template is not None:
            variables = {**self.identity.tokenizer.named_tokens(), **self.config.template_args}
            name = self.config.template or "of the tokenizer"
            template = ChatTemplate(self.identity.template, variables, name)
        return ChunkWork(self.config, template, encoder, self.identity.end_id, self.identity.fim)

    def _again(self, *, exact_cuts: bool) -> Iterator[Task]:
        """All tasks from the first, where something that was taken on trust has proved wrong."""
        self.store.clear(exact_cuts=exact_cuts)
        self._problems.clear()
        self._taken = 0
        self._counts.update(records=0.0, tokens=0.0, bytes=0.0)
        return self._tasks()

    def _run_chunks(self, work: ChunkWork, prepared: deque[Prepared], tasks: Iterator[Task]) -> None:
        def finished(entry: Entry) -> None:
            if entry.problems:
                self._problems.append(entry)
            else:
                self.store.commit(entry)
            self._count(entry)
            self.report("tokenize", self._counts)

        self.engine.run_chunks(work, prepared, tasks, self.store, finished, small=self.is_small)

    def _count(self, entry: Entry) -> None:
        self._counts["records"] += entry.records
        self._counts["tokens"] += entry.tokens
        self._counts["bytes"] += entry.size

    def _tasks(self) -> Iterator[Task]:
        """Chunks that are still to do, each with the format of its source."""
        # With a limit nobody reads what lies behind it.
        exact = self.store.exact_cuts or self.config.limit is not None
        images = isinstance(rule_of(self.identity.tokenizer), ImageRule)
        for chunk in walk(self.files, text_by=self.config.text_by, exact_cuts=exact, images=images):
            file = self.files[chunk.source]
            if chunk.source not in self.formats:
                self.formats[chunk.source] = self._format(chunk, file)
            take = None
            if self.config.limit is not None:
                left = self.config.limit - self._taken
                if left <= 0:
                    if all(later.checksum for later in self.files[chunk.source :]):
                        return  # nothing more is fetched from the Hub
                    continue  # the walk goes on for the checksums of the sources
                take = min(left, len(read_chunk(chunk).rows))
                self._taken += take
            task = Task(chunk, self.formats[chunk.source], self.identity.split_of(file), take, file.name)
            if self._first is None:
                self._first = task
            if chunk.index not in self.store.entries:
                yield task

    def _format(self, chunk: Chunk, file: SourceFile) -> str:
        name = self.config.format
        if name == "auto":
            records = read_chunk(chunk).rows
            rows = [row for row in records if type(row) is not BadRecord]
            if not rows:
                line, message = records[0].line, records[0].message
                where = f"{file.name}, record 0" + (f" (line {line:,})" if line is not None else "")
                raise InputError(
                    f"{where}: {message}; none of the first {len(records):,} records can be read, so what "
                    "they are cannot be told"
                )
            try:
                name = detect(rows[0], Columns(self.config.columns), file.name)
            except RecordError as error:
                raise InputError(f"{file.name}, record 0: {error}") from None
            if isinstance(rows[0], dict):
                self.columns[chunk.source] = tuple(map(str, rows[0]))
        refuse_cuts(self.config, file.name, name)
        if self.config.fim_rate and name != "text":
            raise InputError(
                f"--fim-rate {self.config.fim_rate:g} is for text: {file.name} ({name}) has no middle to be "
                "filled in; leave it out, or build texts apart"
            )
        if self.config.expand_turns and name == "preference":
            raise InputError(
                f"expand_turns would tear the chosen and rejected answers of {file.name} apart; leave it "
                "out, or name another format"
            )
        return name

    def _in_shadow(self, work: ChunkWork, tasks: Iterator[Task], loading: Loading) -> deque[Prepared]:
        """Render while the tokenizer loads; what was rendered."""
        todo = next(tasks, None)
        assert self._first is not None, "a source without a chunk is refused by the walk"
        self._warm_template(work, self._first)
        first = work.prepare(self._first)
        sample = [text[:SAMPLE_CHARACTERS] for batch in first.batches for text in batch.parts.texts]
        prepared: deque[Prepared] = deque()
        if todo is not None:
            prepared.append(first if todo is self._first else work.prepare(todo))
        plain = not self.config.allow_special
        chats = any(batch.is_chat for batch in first.batches)
        flags = [False, plain] if chats else [plain, False]
        if len(self.files) == 1 or flags[0] == flags[1]:
            flags = flags[:1]
        sample = sample[:: max(1, len(sample) // SAMPLE_TEXTS)]
        while len(sample) > LEAST_TEXTS and sum(map(len, sample)) > SAMPLE_CHARACTERS:
            sample = sample[::2]  # long texts: the reference would be what a small build waits for
        work.encoder.prepare_check(loading, sample, flags, at_once=not self.is_small)
        size = sum(item.size for item in prepared)
        while todo is not None and size < self._shadow and not loading.fast.done():
            task = next(tasks, None)
            if task is None:
                break
            prepared.append(work.prepare(task))
            size += prepared[-1].size
        work.encoder.take_fast(loading)
        return prepared

    def _only_chats(self, prepared: deque[Prepared]) -> bool:
        """Whether every record is a chat, which begins as its template says."""
        chats = all(batch.is_chat for item in prepared for batch in item.batches)
        return len(self.files) == 1 and chats and self.formats.get(0) not in MIXED

    def _warm_template(self, work: ChunkWork, task: Task) -> None:
        """Try the fast template engine on a sample of the first chunk."""
        if work.renderer.template is None:
            return
        rows = [row for row in read_chunk(task.chunk).rows[:512] if type(row) is not BadRecord]
        sample: list[Chat] = []
        convert = work.renderer.converter(task.format, rows)
        for row in rows[:: max(1, len(rows) // 64)]:
            try:
                example = convert(row, work.renderer.columns)
            except RecordError:
                continue
            sample += [one for one, _ in examples_of(example, self.config) if isinstance(one, Chat)]
        texts = [work.renderer.template.fixed_text, *(leaf for chat in sample for leaf in leaves(chat))]
        marks = choose_marks(texts)
        if sample and marks is not None:
            work.renderer.template.enable_fast(sample, marks)

    def _problem(self, entry: Entry) -> InputError:
        """The first record, in the order of the input, that the policies do not let pass."""
        record, line, message = entry.problems[0]
        before = [self.store.entries[n] for n in self.store.entries if n < entry.chunk]
        row = record + sum(other.records for other in before if other.source == entry.source)
        where = f"{self.files[entry.source].name}, record {row:,}"
        if line is not None:
            where += f" (line {line:,})"
        more = len(entry.problems) - 1
        also = f" ({more} more close by)" if more else ""
        hint = "" if "--overflow" in message else "; --on-bad-record drop leaves such records out"
        return InputError(f"{where}: {message}{hint}{also}")


def give_memory_back() -> None:
    """Hand freed pages to the system: before workers inherit them, and before shards are written.

    From then on large arrays go back when they are freed; glibc would keep more and more of them.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 4 * 2**20)
        libc.mallopt(M_TRIM_THRESHOLD, 32 * 2**20)
        libc.malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return
