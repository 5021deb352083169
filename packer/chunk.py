"""One chunk of records to tokens: rendered, encoded, the policies applied.

`prepare` needs no tokenizer, `finish` does the rest. Both are pure functions of the task, and so are the
bytes that come out, whichever worker does it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer import teacher
from padless.packer.config import PackConfig
from padless.packer.encode import Encoder
from padless.packer.fates import Sequences, apply_policies
from padless.packer.fim import Fim
from padless.packer.formats.examples import Tokens
from padless.packer.image_rule import ImageRule
from padless.packer.image_tokens import ImageTexts, expand
from padless.packer.lines import CHOSEN, Problem
from padless.packer.prepared import Batch, Prepared, Task
from padless.packer.render import Renderer
from padless.packer.several import merge, with_one_boundary
from padless.packer.spans import Shield, Spanned, encode_marked, join, reorder
from padless.packer.template import ChatTemplate


class ChunkResult(NamedTuple):
    """A finished chunk: its lines of the sequence table and the tokens of its sequences."""

    lines: NDArray[np.void]
    values: NDArray[np.int32]
    """Every sequence's tokens in the order of the lines; a trained token t is stored as -1 - t."""
    records: int
    problems: list[Problem]
    replaced: int
    weights: NDArray[Any] | None = None
    """[values]: each token's weight in the loss (float32), 0 where the record gives none; or what rollouts
    (VALUES) or a teacher (`kind_of`) have for it; None: no record gives any."""
    images: bytes = b""
    """What is told of the images of each line that has some, as long as the line says."""


class ChunkWork:
    """Everything that stays the same from chunk to chunk."""

    def __init__(
        self,
        config: PackConfig,
        template: ChatTemplate | None,
        encoder: Encoder,
        end_id: int | None,
        fim: Fim | None,
    ) -> None:
        self.config = config
        self.encoder = encoder
        self.shield = Shield(encoder)
        self.renderer = Renderer(config, template, encoder, self.shield, fim)
        self.end_id = end_id
        """The id that closes a text; None: none."""
        self.begin_ids: tuple[int, ...] = ()
        """Set once the tokenizer is there; texts and plain pairs begin with them."""

    def prepare(self, task: Task) -> Prepared:
        """Read a chunk's records and render them."""
        return self.renderer.prepare(task)

    def finish(self, prepared: Prepared) -> ChunkResult:
        """Encode what was rendered, decide what is trained, and apply the policies."""
        order = [record for batch in prepared.batches for record in batch.records]
        chat_records = [record for batch in prepared.batches if batch.is_chat for record in batch.records]
        # A text goes once it is tokens: of a long record both together would be the most that is held.
        pieces = [self._encode(prepared.batches.pop(0)) for _ in range(len(prepared.batches))]
        for record, marked, marks, stand_ins in prepared.shielded:
            pieces.append(self.shield.encode(marked, marks, stand_ins))
            order.append(record)
            chat_records.append(record)
        for record, tokens in prepared.tokens:
            problem = self._out_of_range(tokens)
            if problem:
                prepared.bad(record, problem)
            else:
                pieces.append(_given(tokens))
                order.append(record)
        together = pieces[0] if len(pieces) == 1 else join(pieces)
        if any(a > b for a, b in zip(order, order[1:], strict=False)):
            by_record = np.argsort(order, kind="stable")
            together = reorder(together, by_record)
            order = [order[i] for i in by_record]
        rule = self.renderer.image_rule
        token = None
        if isinstance(rule, ImageRule):
            together, order = expand(rule, prepared, together, order)
            token = rule.token_id
        records = np.asarray(order, dtype=np.int64)
        if CHOSEN in prepared.verdicts:
            together = with_one_boundary(prepared, records, together, frozenset(chat_records))
        sequences = Sequences(records, together, frozenset(chat_records), token)
        lines, values, weights, problems = apply_policies(self.config, prepared, sequences)
        texts = ImageTexts(prepared, lines) if prepared.images else None
        if prepared.owners is not None:
            lines, values, weights = merge(prepared, lines, values, weights, self.config)
        problems = sorted([*prepared.problems, *problems])
        lines["split"] = prepared.task.split
        if prepared.eval_records is not None and len(lines):
            lines["split"] = prepared.eval_records[lines["record"]]
        images = texts.settle(lines) if texts is not None else b""
        return ChunkResult(lines, values, prepared.count, problems, prepared.replaced, weights, images)

    def _encode(self, batch: Batch) -> Spanned:
        spanned = encode_marked(self.encoder, batch.parts, plain=batch.plain)
        if self.renderer.fim is not None and batch.before is not None:
            spanned = self.renderer.fim.put_together(spanned, batch.before)
        return spanned if batch.is_chat else self._with_ends(spanned)

    def _with_ends(self, spanned: Spanned) -> Spanned:
        """Put the begin tokens before each text and the end token, trained, behind it."""
        begin = len(self.begin_ids)
        n = len(spanned.offsets) - 1
        lengths = np.diff(spanned.offsets)
        ending = np.zeros(n, dtype=np.int64)
        if self.end_id is not None:
            last = spanned.ids[np.maximum(spanned.offsets[1:] - 1, 0)] if len(spanned.ids) else -1
            ending[:] = (lengths == 0) | (last != self.end_id)  # never doubled
        if not begin and not ending.any():
            return spanned
        offsets = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(lengths + begin + ending, out=offsets[1:])
        ids = np.empty(int(offsets[-1]), dtype=np.int32)
        shift = offsets[:-1] + begin - spanned.offsets[:-1]
        is_text = np.ones(len(ids), dtype=np.bool_)
        for place, token in enumerate(self.begin_ids):
            ids[offsets[:-1] + place] = token
            is_text[offsets[:-1] + place] = False
        ended = np.flatnonzero(ending)
        ids[offsets[1:][ended] - 1] = self.end_id if self.end_id is not None else 0
        is_text[offsets[1:][ended] - 1] = False
        ids[is_text] = spanned.ids
        start = spanned.span_start + shift[spanned.span_text]
        # One span a text: what is trained, through its end token.
        end = spanned.span_end + shift[spanned.span_text] + ending[spanned.span_text]
        empty = spanned.span_start == spanned.span_end
        text_end = offsets[1:][spanned.span_text]
        start = np.where(empty, text_end - ending[spanned.span_text], start)
        return Spanned(ids, offsets, spanned.span_text, start, np.where(empty, text_end, end))

    def _out_of_range(self, tokens: Tokens) -> str | None:
        largest = self.encoder.largest_id
        worst = next((i for i in tokens.input_ids if not 0 <= i <= largest), None)
        name = "input_ids"
        if worst is None and tokens.teacher is not None:
            name = teacher.IDS
            worst = int(tokens.teacher[name].max(initial=0))
            worst = None if worst <= largest else worst
        if worst is None:
            return None
        return f"{name} has {worst}, outside the tokenizer's ids 0 to {largest}"


def _given(tokens: Tokens) -> Spanned:
    """Ids that came tokenized, with the runs of their labels as spans."""
    ids = np.asarray(tokens.input_ids, dtype=np.int32)
    trained = np.ones(len(ids), dtype=np.int8)
    if tokens.labels is not None:
        trained[:] = np.asarray(tokens.labels) != -100
    edges = np.flatnonzero(np.diff(trained, prepend=0, append=0))
    return Spanned(
        ids,
        np.array([0, len(ids)], dtype=np.int64),
        np.zeros(len(edges) // 2, dtype=np.int64),
        edges[::2].astype(np.int64),
        edges[1::2].astype(np.int64),
    )
