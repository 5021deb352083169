"""A chunk's records read, converted and rendered: the half of the work that needs no tokenizer.

It runs in the shadow of the tokenizer's load. Plain chats go through the fast engine, a chunk at once; what
is not plain, what a template refuses and what spells special tokens goes through jinja2, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.config import PackConfig
from padless.packer.encode import Encoder
from padless.packer.errors import InputError
from padless.packer.formats import FORMATS, MIXED, alpaca
from padless.packer.formats.examples import (
    Chat,
    Columns,
    Converted,
    Example,
    Pair,
    RecordError,
    Text,
    Tokens,
)
from padless.packer.lines import EMPTY, MALFORMED, NO_VERDICT, Problem
from padless.packer.locate import located
from padless.packer.marks import Marked, choose_marks, leaves, mark_plain, split_marked
from padless.packer.refusals import known_roles, lost_calls, unclear_turns, unknown_role
from padless.packer.several import KWARGS, as_chat, examples_of, with_variables
from padless.packer.sources import BadRecord, Chunk, read_chunk
from padless.packer.spans import Shield, check_no_stand_ins
from padless.packer.template import TRIMMED_DIFFERENTLY, ChatTemplate, is_plain

LONGEST_MESSAGE = 600
"""Characters: a message may quote a record, and a record may be a book."""
Convert = Callable[[Any, Columns], Converted]


class Task(NamedTuple):
    """A chunk and what the parent found out about its source."""

    chunk: Chunk
    format: str
    split: int = 0
    """Number of the split that the source goes to."""
    take: int | None = None
    """Only the first so many records (`limit`)."""


class Batch(NamedTuple):
    """Records that are encoded together, in the order of `records`."""

    records: list[int]
    parts: Marked
    plain: bool
    """Special tokens spelled in the text stay text."""
    is_chat: bool


@dataclass
class Prepared:
    """A chunk rendered; `finish` needs the encoder and this.

    What it calls records by are the numbers of examples, which are those of the records but where a record
    gives several (see packer/several.py).
    """

    task: Task
    count: int
    lines: Sequence[int] | None
    batches: list[Batch] = field(default_factory=list)
    shielded: list[tuple[int, str, str, dict[str, str]]] = field(default_factory=list)
    """(record, marked text, marks, stand-ins): records that spell special tokens inside a chat."""
    tokens: list[tuple[int, Tokens]] = field(default_factory=list)
    dropped: dict[int, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    untrained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Which of a record's assistant turns (0: the first) are not trained."""
    weights: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """The weights of a record's assistant turns (0: the first), where they are not 1."""
    empty_replies: list[int] = field(default_factory=list)
    eval_records: NDArray[np.bool_] | None = None
    """[records]: which go to the evaluation side by their content; None: all go to the task's split."""
    replaced: int = 0
    owners: list[int] | None = None
    """[examples]: the record that each is of; None: every record is one example."""
    verdicts: list[int] = field(default_factory=list)
    """[examples], where there are owners."""

    def record_of(self, example: int) -> int:
        return example if self.owners is None else self.owners[example]

    @property
    def size(self) -> int:
        """Bytes of text held."""
        return sum(int(batch.parts.offsets[-1]) for batch in self.batches)


class Renderer:
    """Everything that rendering needs and that stays the same from chunk to chunk."""

    def __init__(
        self, config: PackConfig, template: ChatTemplate | None, encoder: Encoder, shield: Shield
    ) -> None:
        self.config = config
        if config.train_on != "all" or config.overflow == "truncate":  # else turns do not matter
            template = located(template, encoder.files.special_contents)
        self.template = template
        self._roles = known_roles(template.source if template is not None else "")
        self.columns = Columns(config.columns)
        self._variables = self.columns.named.get(KWARGS, KWARGS)
        self.shield = shield
        self._folder = encoder.files.folder
        self._normalizes = encoder.normalizes

    def prepare(self, task: Task) -> Prepared:
        """Read a chunk's records and render them."""
        records = read_chunk(task.chunk)
        rows = records.rows[: task.take]
        found = Prepared(task, len(rows), records.lines, replaced=records.replaced)
        examples: list[tuple[int, Example]] = []
        convert = self._converter(task.format)
        owners: list[int] | None = None
        if task.format == "preference" or self.config.expand_turns:
            owners = found.owners = []
        for record, row in enumerate(rows):
            try:
                if type(row) is BadRecord:
                    raise RecordError(row.message)
                example = convert(row, self.columns)
                if owners is None:
                    examples.append((record, example))  # type: ignore[arg-type]
                    continue
                several = examples_of(example, self.config)
            except RecordError as error:
                number = record
                if owners is not None:
                    number = len(owners)
                    owners.append(record)
                    found.verdicts.append(NO_VERDICT)
                self.bad(found, number, str(error))
                continue
            for one, verdict in several:
                examples.append((len(owners), one))
                owners.append(record)
                found.verdicts.append(verdict)
        if self.config.eval_fraction:
            found.eval_records = _hashed(rows, self.config.seed, self.config.eval_fraction)
        self._render(found, examples)
        return found

    def _converter(self, name: str) -> Convert:
        if name == "alpaca" and self.template is None:
            return alpaca.classic
        convert: Convert = FORMATS[name].convert
        if name in MIXED and self.config.template is not None:
            return lambda row, columns: as_chat(self._with_variables(convert(row, columns), row))
        return lambda row, columns: self._with_variables(convert(row, columns), row)

    def _with_variables(self, example: Converted, row: Any) -> Converted:
        """The example with the record's own template variables."""
        if self._variables not in row or isinstance(row, str):
            return example
        return with_variables(example, row[self._variables], self._variables)

    def bad(self, found: Prepared, record: int, message: str) -> None:
        """Drop a malformed record, or make it a problem, as the policy says."""
        if self.config.on_bad_record == "drop":
            found.dropped[record] = MALFORMED
        else:
            number = found.record_of(record)
            line = found.lines[number] if found.lines is not None else None
            short = message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + " ..."
            found.problems.append(Problem(number, line, short))

    def _render(self, found: Prepared, examples: list[tuple[int, Example]]) -> None:
        chats: list[tuple[int, Chat]] = []
        plain: list[tuple[int, Pair | Text]] = []
        system = self.config.system is not None
        for record, example in examples:
            if isinstance(example, Chat):
                if (example.untrained or example.weights) and self.config.train_on == "all":
                    self.bad(
                        found,
                        record,
                        "it leaves turns out of the loss or weighs them, but train_on all trains everything",
                    )
                    continue
                chats.append((record, self._with_system(example) if system else example))
                if not example.messages[-1].get("content") and _has_empty_reply(example):
                    found.empty_replies.append(record)
                if (example.first_trained or example.untrained) and (left := self._untrained(example)):
                    found.untrained[record] = left
                if example.weights:
                    answers = _answers(found_chat := chats[-1][1])
                    found.weights[record] = [(answers.index(n), w) for n, w in found_chat.weights]
            elif isinstance(example, Tokens):
                found.tokens.append((record, example))
                if not example.input_ids:
                    found.dropped[record] = EMPTY
            elif not any(example):
                found.dropped[record] = EMPTY
            else:
                plain.append((record, example))
                if isinstance(example, Pair) and not example.completion:
                    found.empty_replies.append(record)
        found.tokens = [item for item in found.tokens if item[0] not in found.dropped]
        self._render_chats(found, chats)
        self._render_plain(found, plain)

    def _untrained(self, chat: Chat) -> tuple[int, ...]:
        """Which of the assistant's turns are context, or left out of the loss by the record itself."""
        context = chat.first_trained if self.config.train_on in ("auto", "completion") else 0
        if not context and not chat.untrained:
            return ()
        return tuple(
            place
            for place, number in enumerate(_answers(chat))
            if number < context or number in chat.untrained
        )

    def _with_system(self, chat: Chat) -> Chat:
        if self.config.system is None or chat.messages[0]["role"] == "system":
            return chat
        system = {"role": "system", "content": self.config.system}
        shift = 1 if chat.first_trained else 0
        return chat._replace(
            messages=[system, *chat.messages],
            first_trained=chat.first_trained + shift,
            untrained=tuple(number + 1 for number in chat.untrained),
            weights=tuple((number + 1, weight) for number, weight in chat.weights),
        )

    def _render_plain(self, found: Prepared, plain: list[tuple[int, Pair | Text]]) -> None:
        if not plain:
            return
        marks = choose_marks(leaf for _, example in plain for leaf in leaves(example))
        if marks is None:
            self._in_halves(found, plain, self._render_plain)
            return
        train_prompt = self.config.train_on == "all"
        marked = "".join(mark_plain(e, marks, train_prompt=train_prompt) for _, e in plain)
        records = [record for record, _ in plain]
        parts = split_marked(marked, marks, normalizes=self._normalizes)
        found.batches.append(Batch(records, parts, not self.config.allow_special, False))

    def _render_chats(self, found: Prepared, chats: list[tuple[int, Chat]]) -> None:
        if not chats:
            return
        template = self.template
        if template is None:
            raise InputError(
                f"the tokenizer in {self._folder} has no chat template, and these records "
                "are chats: give one with --template FILE or --template chatml"
            )
        if not template.has_marks and self.config.train_on != "all":
            raise InputError(
                f"what to train on cannot be told from the chat template {template.name}: "
                f"{template.why_unmarked}; give one that marks the assistant's turns with "
                "{% generation %} blocks (--template FILE, or a built-in one such as chatml), or "
                "--train-on all"
            )
        if not self._roles.issuperset([turn["role"] for _, chat in chats for turn in chat.messages]):
            chats = self._allowed(found, chats, lambda chat: unknown_role(chat, self._roles))
        joined, plain = _joined(chats)
        if not plain:
            chats = self._allowed(found, chats, lambda chat: lost_calls(chat, template.source))
        marks = choose_marks([template.fixed_text, joined])
        if marks is None:
            self._in_halves(found, chats, self._render_chats)
            return
        if not self.config.allow_special and self.shield.may_be_spelled_in(joined):
            kept: list[tuple[int, Chat]] = []
            for record, chat in chats:
                content = leaves(chat)
                if self.shield.spelled_in(content):
                    self._render_shielded(found, record, chat, content, marks)
                else:
                    kept.append((record, chat))
            chats = kept
        if not plain or any(character in joined for character in TRIMMED_DIFFERENTLY):
            fit = [is_plain(chat) for _, chat in chats]
            self._render_slow(
                found, [c for c, fits in zip(chats, fit, strict=True) if not fits], marks, template
            )
            chats = [c for c, fits in zip(chats, fit, strict=True) if fits]
        if not self._render_fast(found, chats, marks, template):
            self._render_slow(found, chats, marks, template)

    def _allowed(
        self, found: Prepared, chats: list[tuple[int, Chat]], refusal: Callable[[Chat], str | None]
    ) -> list[tuple[int, Chat]]:
        """The chats but for those that there is a reason to refuse."""
        kept: list[tuple[int, Chat]] = []
        for record, chat in chats:
            reason = refusal(chat)
            if reason is None:
                kept.append((record, chat))
            else:
                self.bad(found, record, reason)
        return kept

    def _render_fast(
        self, found: Prepared, chats: list[tuple[int, Chat]], marks: str, template: ChatTemplate
    ) -> bool:
        """Render plain chats at once; False where that cannot be done or is not what jinja2 gives."""
        if template.fast is None or not chats:
            return not chats
        try:
            marked = template.render_fast([chat for _, chat in chats], marks)
            # The second guard: one record of every chunk, against the reference.
            if not marked.startswith(template.render(chats[0][1], marks)):
                return False
            self._add(found, chats, marked, marks)
        except Exception:  # a record that the template refuses: the reference finds it
            return False
        return True

    def _render_slow(
        self, found: Prepared, chats: list[tuple[int, Chat]], marks: str, template: ChatTemplate
    ) -> None:
        pieces: list[str] = []
        kept: list[tuple[int, Chat]] = []
        for record, chat in chats:
            try:
                pieces.append(template.render(chat, marks))
                kept.append((record, chat))
            except RecordError as error:
                self.bad(found, record, str(error))
        if kept:
            try:
                self._add(found, kept, "".join(pieces), marks)
            except RecordError as error:
                raise InputError(f"chat template {template.name}: {error}") from error

    def _add(self, found: Prepared, chats: list[tuple[int, Chat]], marked: str, marks: str) -> None:
        if found.untrained or found.weights or self.config.train_on == "last":
            rendered = zip(chats, marked.split(marks[2])[:-1], strict=True)
            kept = [
                (item, text) for item, text in rendered if self._turns_are_told(found, *item, text, marks)
            ]
            chats, marked = [item for item, _ in kept], "".join(text + marks[2] for _, text in kept)
        parts = split_marked(marked, marks, normalizes=self._normalizes)
        found.batches.append(Batch([record for record, _ in chats], parts, plain=False, is_chat=True))

    def _turns_are_told(self, found: Prepared, record: int, chat: Chat, marked: str, marks: str) -> bool:
        """Whether each of the assistant's turns is one span, where some are trained and others not."""
        by_turn = record in found.untrained or record in found.weights
        if not by_turn and self.config.train_on != "last":
            return True
        reason = unclear_turns(chat, marked.count(marks[0]))
        if reason is not None:
            self.bad(found, record, reason)
        return reason is None

    def _render_shielded(
        self, found: Prepared, record: int, chat: Chat, content: list[str], marks: str
    ) -> None:
        assert self.template is not None
        try:
            check_no_stand_ins(content)
            stand_ins: dict[str, str] = {}
            content_of: Any = self.shield.cover([chat.messages, chat.tools, chat.variables], stand_ins)
            messages, tools, variables = content_of
            covered = chat._replace(messages=messages, tools=tools, variables=variables)
            marked = self.template.render(covered, marks)
        except RecordError as error:
            self.bad(found, record, str(error))
        else:
            if self._turns_are_told(found, record, chat, marked, marks):
                found.shielded.append((record, marked, marks, stand_ins))

    def _in_halves(
        self, found: Prepared, items: list[Any], render: Callable[[Prepared, list[Any]], None]
    ) -> None:
        """No three marks are free in all of the records together: try with fewer of them."""
        if len(items) == 1:
            self.bad(found, items[0][0], "it uses nearly every control character; is it binary data?")
            return
        middle = len(items) // 2
        render(found, items[:middle])
        render(found, items[middle:])


def _joined(chats: list[tuple[int, Chat]]) -> tuple[str, bool]:
    """All texts of the chats in one, and whether every chat is turns of strings and nothing else."""
    try:
        joined = "\n".join([value for _, chat in chats for turn in chat.messages for value in turn.values()])
    except TypeError:
        return "\n".join(leaf for _, chat in chats for leaf in leaves(chat)), False
    if any(chat.tools is not None or chat.variables for _, chat in chats):
        return "\n".join(leaf for _, chat in chats for leaf in leaves(chat)), False
    return joined, True


def _answers(chat: Chat) -> list[int]:
    """Numbers of the assistant's turns."""
    return [number for number, turn in enumerate(chat.messages) if turn["role"] == "assistant"]


def _has_empty_reply(chat: Chat) -> bool:
    last = chat.messages[-1]
    return last["role"] == "assistant" and not last.get("content") and not last.get("tool_calls")


def _without_nulls(value: Any) -> Any:
    """A record's content as every file format gives it: a key without a value is one that is missing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _hashed(rows: list[Any], seed: int, fraction: float) -> NDArray[np.bool_]:
    """Which records go to the evaluation side: by their content and the seed, never by their place."""
    import orjson
    import xxhash

    limit = int(fraction * 2**64)
    chosen = np.zeros(len(rows), dtype=np.bool_)
    for number, row in enumerate(rows):
        if type(row) is BadRecord:
            continue
        row = _without_nulls(row)
        try:
            content = orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # an integer of more than 64 bits
            content = repr(row).encode("utf-8")
        chosen[number] = xxhash.xxh3_64_intdigest(content, seed=seed) < limit
    return chosen
