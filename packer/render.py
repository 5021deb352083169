"""A chunk's records read, converted and rendered: the half of the work that needs no tokenizer.

It runs in the shadow of the tokenizer's load.
"""

from __future__ import annotations

from typing import Any

from padless.packer import teacher
from padless.packer.beside import Convert, as_chat, with_columns
from padless.packer.config import PackConfig
from padless.packer.encode import Encoder
from padless.packer.errors import RecordError
from padless.packer.eval_side import eval_records
from padless.packer.fim import Fim
from padless.packer.formats import FORMATS, MIXED, alpaca
from padless.packer.formats.examples import (
    Chat,
    Columns,
    Converted,
    Example,
    Pair,
    Preference,
    Rollout,
    Text,
    Tokens,
    preceded,
)
from padless.packer.image_rule import ImageRule, rule_of
from padless.packer.images import COLUMN, VIDEOS, Placer, image_folder, images_in
from padless.packer.lines import EMPTY, NO_VERDICT
from padless.packer.marks import choose_marks, leaves, mark_plain, split_marked, whole_texts
from padless.packer.prepared import Batch, Prepared, Task
from padless.packer.render_chats import ChatRenderer
from padless.packer.several import examples_of
from padless.packer.sources import BadRecord, read_chunk
from padless.packer.spans import Shield
from padless.packer.template import ChatTemplate
from padless.runtime.format import PackedImage


class Renderer:
    """Everything that rendering needs and that stays the same from chunk to chunk."""

    def __init__(
        self,
        config: PackConfig,
        template: ChatTemplate | None,
        encoder: Encoder,
        shield: Shield,
        fim: Fim | None,
    ) -> None:
        self.config = config
        self.fim = fim
        self.chats = ChatRenderer(config, template, encoder, shield)
        self.columns = Columns(config.columns)
        self._shield = shield
        self._normalizes = encoder.normalizes
        self.image_rule = rule_of(encoder.files)

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template, with the assistant's turns marked or located."""
        return self.chats.template

    def prepare(self, task: Task) -> Prepared:
        """Read a chunk's records and render them."""
        records = read_chunk(task.chunk)
        rows = records.rows[: task.take]
        drops_bad = self.config.on_bad_record == "drop"
        found = Prepared(task, len(rows), records.lines, drops_bad, replaced=records.replaced)
        found.is_clear = self._shield.is_clear(records.json)
        records.json = None  # of a long record every copy counts
        examples: list[tuple[int, Example]] = []
        convert = self.converter(task.format, rows)
        placer = self._placer(task, rows)
        owners: list[int] | None = None
        if task.format == "preference" or self.config.expand_turns:
            owners = found.owners = []
        for record, row in enumerate(rows):
            try:
                if type(row) is BadRecord:
                    raise RecordError(row.message)
                example = convert(row, self.columns)
                if placer is not None and isinstance(row, dict):
                    example = placer.place(example, row, self.columns, task.chunk.start + record)
                if isinstance(example, Rollout):
                    if owners is not None:
                        raise RecordError("a rollout is one answer: leave --expand-turns out")
                    found.rollouts[record] = example
                    example = example.example
                if owners is None:
                    examples.append((record, example))  # type: ignore[arg-type]
                    continue
                if isinstance(example, Preference) and example.margin:
                    found.margins[record] = example.margin
                several = examples_of(example, self.config)
            except RecordError as error:
                number = record
                if owners is not None:
                    number = len(owners)
                    owners.append(record)
                    found.verdicts.append(NO_VERDICT)
                found.bad(number, str(error))
                continue
            for one, verdict in several:
                examples.append((len(owners), one))
                owners.append(record)
                found.verdicts.append(verdict)
        if self.config.eval_fraction:
            found.eval_records = eval_records(rows, self.config.seed, self.config.eval_fraction)
        if placer is not None and placer.found:
            found.images = {n: mine for n, one in examples if (mine := _images(one, placer))}
        self._render(found, examples)
        return found

    def _placer(self, task: Task, rows: list[Any]) -> Placer | None:
        """What puts images into the conversations of a chunk, where there may be some."""
        if not isinstance(self.image_rule, ImageRule):
            columns = {self.columns.named.get(COLUMN[0]), *COLUMN, *VIDEOS}
            if not any(isinstance(row, dict) and not columns.isdisjoint(row) for row in rows):
                return None
        folder = image_folder(self.config.image_root, task.chunk.source, task.chunk.path)
        return Placer(self.image_rule, folder, task.name)

    def converter(self, name: str, rows: list[Any]) -> Convert:
        """What makes examples of a format's records, with all columns that stand beside it in these."""
        convert: Convert = FORMATS[name].convert
        if name == "alpaca" and self.chats.template is None:
            convert = alpaca.classic
        elif name in MIXED and self.config.template is not None:
            plain = convert

            def convert(row: Any, columns: Columns) -> Converted:
                found: Converted = as_chat(plain(row, columns))
                return found

        return with_columns(convert, name, rows, self.columns)

    def _render(self, found: Prepared, examples: list[tuple[int, Example]]) -> None:
        chats: list[tuple[int, Chat]] = []
        plain: list[tuple[int, Pair | Text]] = []
        system = self.config.system is not None
        for record, example in examples:
            if isinstance(example, Chat):
                if (example.untrained or example.weights) and self.config.train_on == "all":
                    found.bad(
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
        teacher.check_chunk(found)
        self.chats.render(found, chats)
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
        return preceded(chat, [{"role": "system", "content": self.config.system}])

    def _render_plain(self, found: Prepared, plain: list[tuple[int, Pair | Text]]) -> None:
        if not plain:
            return
        texts = [example.text for _, example in plain if isinstance(example, Text)]
        if len(texts) == len(plain):
            before = None
            if self.fim is not None:
                texts, before = self.fim.cut(texts)
            whole = whole_texts(texts, normalizes=self._normalizes)
            records = [n for n, _ in plain]
            found.batches.append(Batch(records, whole, not self.config.allow_special, False, before))
            return
        marks = choose_marks(leaf for _, example in plain for leaf in leaves(example))
        if marks is None:
            found.in_halves(plain, self._render_plain)
            return
        train_prompt = self.config.train_on == "all"
        marked = "".join(mark_plain(e, marks, train_prompt=train_prompt) for _, e in plain)
        records = [record for record, _ in plain]
        parts = split_marked(marked, marks, normalizes=self._normalizes)
        found.batches.append(Batch(records, parts, not self.config.allow_special, False))


def _images(example: Example, placer: Placer) -> list[PackedImage]:
    """The images of an example, in the order of its turns."""
    if not isinstance(example, Chat):
        return []
    return [placer.found[int(part["image"])] for turn in example.messages for part in images_in(turn)]


def _answers(chat: Chat) -> list[int]:
    """Numbers of the assistant's turns."""
    return [number for number, turn in enumerate(chat.messages) if turn["role"] == "assistant"]


def _has_empty_reply(chat: Chat) -> bool:
    last = chat.messages[-1]
    return last["role"] == "assistant" and not last.get("content") and not last.get("tool_calls")
