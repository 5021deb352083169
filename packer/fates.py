"""What becomes of a record: which of its tokens are trained, and whether it is whole, cut or dropped.

Every record gets at least one line, and every token is either in a line's sequence or counted as cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer import teacher
from padless.packer.config import PackConfig
from padless.packer.lines import (
    DROPPED,
    EMPTY,
    EMPTY_REPLY,
    FRAGMENT,
    LINE,
    NO_TARGETS,
    NONE,
    TOO_LONG,
    TRUNCATED,
    WHOLE,
    Problem,
)
from padless.packer.marks import BLOCK
from padless.packer.rollouts import values_of
from padless.packer.spans import Spanned

if TYPE_CHECKING:
    from padless.packer.prepared import Prepared

Integers = NDArray[np.int64]
Counts = NDArray[np.signedinteger[Any]]


class Sequences(NamedTuple):
    """A chunk's encoded records: `records` ascending, one text each."""

    records: Integers
    spanned: Spanned
    chats: frozenset[int]
    image_token: int | None = None
    """The placeholder of images, which is never trained."""


@dataclass
class Parts:
    """Columns of the lines that are being made; one entry a part of a record."""

    sequence: list[int]
    part: list[int]
    start: list[int]
    length: list[int]
    status: list[int]
    reason: list[int]

    def add(self, sequence: int, part: int, start: int, length: int, status: int, reason: int) -> None:
        for column, value in zip(
            (self.sequence, self.part, self.start, self.length, self.status, self.reason),
            (sequence, part, start, length, status, reason),
            strict=True,
        ):
            column.append(value)


def apply_policies(
    config: PackConfig, prepared: Prepared, sequences: Sequences
) -> tuple[NDArray[np.void], NDArray[np.int32], NDArray[Any] | None, list[Problem]]:
    """Lines, values (a trained token t as -1 - t), weights or VALUES, and what is not let pass."""
    records, spanned = sequences.records, sequences.spanned
    trained = _trained(config, prepared, sequences)
    offsets = spanned.offsets
    lengths = np.diff(offsets)
    trained[offsets[:-1][lengths > 0]] = False  # nothing predicts a sequence's first token
    values = _values(spanned.ids, trained, may_change=not prepared.tokens)
    # A long record has as many entries here as tokens, so they are no wider than they must be.
    before: Counts = np.zeros(len(trained) + 1, dtype=np.int32 if len(trained) < 2**31 else np.int64)
    np.cumsum(trained, out=before[1:])
    targets = (before[offsets[1:]] - before[offsets[:-1]]).astype(np.int64)

    status = np.full(len(records), WHOLE, dtype=np.uint8)
    reason = np.full(len(records), NONE, dtype=np.uint8)
    empty_reply = np.isin(records, prepared.empty_replies)
    _drop(status, reason, targets == 0, NO_TARGETS)
    _drop(status, reason, lengths == 0, EMPTY)
    if config.on_empty_reply == "drop":
        _drop(status, reason, empty_reply, EMPTY_REPLY)
    too_long = (lengths > config.longest) & (status != DROPPED)
    weights: NDArray[Any] | None = _weights(prepared, sequences)
    taught = teacher.values_of(prepared.tokens, records, offsets, weights)
    if taught is not None:
        weights = taught
    if prepared.rollouts:
        weights = values_of(prepared.rollouts, records, offsets, trained)
    problems: list[Problem] = []
    special = Parts([], [], [], [], [], [])
    if config.overflow == "drop":
        _drop(status, reason, too_long, TOO_LONG)
    elif too_long.any():
        for sequence in np.flatnonzero(too_long).tolist():
            problem = _overflow(config, prepared, sequences, sequence, before, special)
            if problem:
                problems.append(problem)
        lines, starts = _with_special(
            sequences, lengths, before, status, reason, empty_reply, special, too_long
        )
        del before
        values, weights = _cut(values, weights, starts, lines["length"].astype(np.int64))
        return _with_dropped(lines, prepared), values, weights, problems

    lines = np.zeros(len(records), dtype=LINE)
    lines["record"] = records
    dropped = status == DROPPED
    lines["length"] = np.where(dropped, 0, lengths)
    lines["targets"] = np.where(dropped, 0, targets)
    lines["cut"] = np.where(dropped, lengths, 0)
    lines["status"], lines["reason"], lines["empty_reply"] = status, reason, empty_reply
    if dropped.any():
        kept = np.repeat(~dropped, lengths)
        values = values[kept]
        weights = weights[kept] if weights is not None else None
    return _with_dropped(lines, prepared), values, weights, problems


def _trained(config: PackConfig, prepared: Prepared, sequences: Sequences) -> NDArray[np.bool_]:
    """Which tokens are trained, by the spans that `train_on` leaves."""
    spanned, records = sequences.spanned, sequences.records
    text, start, end = spanned.span_text, spanned.span_start, spanned.span_end
    keep = np.ones(len(text), dtype=np.bool_)
    if config.train_on == "last":
        keep[:-1] = text[:-1] != text[1:]
    for record, untrained in prepared.untrained.items():
        at = int(np.searchsorted(records, record))
        if at < len(records) and records[at] == record:  # else the template or the ids were refused
            keep[int(np.searchsorted(text, at)) + np.asarray(untrained)] = False
    edges = np.zeros(len(spanned.ids) + 1, dtype=np.int32)
    np.add.at(edges, start[keep], 1)
    np.add.at(edges, end[keep], -1)
    trained: NDArray[np.bool_] = np.cumsum(edges[:-1], out=edges[:-1]) > 0
    if config.train_on == "all" and sequences.chats:
        chat = np.isin(records, list(sequences.chats))
        trained |= np.repeat(chat, np.diff(spanned.offsets))
    if sequences.image_token is not None:
        trained &= spanned.ids != sequences.image_token
    return trained


def _values(ids: NDArray[np.int32], trained: NDArray[np.bool_], *, may_change: bool) -> NDArray[np.int32]:
    """A trained token t as -1 - t, the others as they are; in the same array where that may be.

    Of a long record every array of this kind is as large as its text.
    """
    values = ids if may_change and ids.flags.writeable else ids.copy()
    for begin in range(0, len(ids), BLOCK):
        part = slice(begin, begin + BLOCK)
        values[part] ^= -trained[part].astype(np.int32)
    return values


def _weights(prepared: Prepared, sequences: Sequences) -> NDArray[np.float32] | None:
    """[tokens] of the turns and tokens that their records weigh, 0 elsewhere; None where no record does."""
    by_token = [(record, given.weights) for record, given in prepared.tokens if given.weights is not None]
    if not prepared.weights and not by_token:
        return None
    spanned, records = sequences.spanned, sequences.records
    found = np.zeros(len(spanned.ids), dtype=np.float32)
    for record, weights in prepared.weights.items():
        at = int(np.searchsorted(records, record))
        if at < len(records) and records[at] == record:
            first = int(np.searchsorted(spanned.span_text, at))
            for turn, weight in weights:
                found[spanned.span_start[first + turn] : spanned.span_end[first + turn]] = weight
    for record, values in by_token:
        at = int(np.searchsorted(records, record))
        if at < len(records) and records[at] == record:  # else its ids were refused
            found[spanned.offsets[at] : spanned.offsets[at + 1]] = values
    return found


def _drop(status: NDArray[np.uint8], reason: NDArray[np.uint8], which: NDArray[np.bool_], why: int) -> None:
    status[which] = DROPPED
    reason[which] = why


def _overflow(
    config: PackConfig,
    prepared: Prepared,
    sequences: Sequences,
    sequence: int,
    before: Counts,
    parts: Parts,
) -> Problem | None:
    """Cut one over-long sequence, or say why it cannot be."""
    spanned = sequences.spanned
    first, stop = int(spanned.offsets[sequence]), int(spanned.offsets[sequence + 1])
    length, limit = stop - first, config.longest
    record = int(sequences.records[sequence])
    number = prepared.record_of(record)
    line = prepared.lines[number] if prepared.lines is not None else None
    if config.overflow == "error":
        return Problem(
            number,
            line,
            f"has {length:,} tokens and max_length is {limit:,}: raise --max-length, or choose "
            "--overflow drop, truncate or (for text) split",
        )
    if config.overflow == "split":
        if before[stop] - before[first + 1] != length - 1:  # all but the first token are trained
            return Problem(
                number,
                line,
                f"has {length:,} tokens, more than max_length {limit:,}, and a loss mask: a fragment "
                "would begin in its middle; choose --overflow drop or truncate",
            )
        for part, start in enumerate(range(0, length, limit)):
            parts.add(sequence, part, start, min(limit, length - start), FRAGMENT, TOO_LONG)
        return None
    kept = limit
    if record in sequences.chats:
        mine = slice(*np.searchsorted(spanned.span_text, [sequence, sequence + 1]))
        ends = spanned.span_end[mine] - first
        if not len(ends):
            return Problem(
                number,
                line,
                f"has {length:,} tokens, more than max_length {limit:,}, and its template marks no "
                "turns to cut at: choose --overflow drop, or a template with {% generation %} blocks",
            )
        kept = int(ends[ends <= limit].max(initial=0))
    if kept and before[first + kept] > before[first]:
        parts.add(sequence, 0, 0, kept, TRUNCATED, TOO_LONG)
    else:
        parts.add(sequence, 0, 0, 0, DROPPED, TOO_LONG)
    return None


def _with_special(
    sequences: Sequences,
    lengths: Integers,
    before: Counts,
    status: NDArray[np.uint8],
    reason: NDArray[np.uint8],
    empty_reply: NDArray[np.bool_],
    special: Parts,
    is_special: NDArray[np.bool_],
) -> tuple[NDArray[np.void], Integers]:
    """The lines where some sequences are cut into parts of their own, and each one's first token of all."""
    normal = np.flatnonzero(~is_special)
    sequence = np.concatenate([normal, np.asarray(special.sequence, dtype=np.int64)])
    order = np.lexsort((np.concatenate([0 * normal, special.part]), sequence))
    sequence = sequence[order]
    dropped = status[normal] == DROPPED
    lines = np.zeros(len(sequence), dtype=LINE)
    lines["record"] = sequences.records[sequence]
    lines["part"] = np.concatenate([0 * normal, special.part])[order]
    lines["start"] = np.concatenate([0 * normal, special.start])[order]
    lines["length"] = np.concatenate([np.where(dropped, 0, lengths[normal]), special.length])[order]
    lines["status"] = np.concatenate([status[normal], special.status])[order]
    lines["reason"] = np.concatenate([reason[normal], special.reason])[order]
    lines["empty_reply"] = empty_reply[sequence]
    kept = np.bincount(sequence, weights=lines["length"], minlength=len(lengths)).astype(np.int64)
    lines["cut"] = np.where(lines["part"] == 0, (lengths - kept)[sequence], 0)
    start = sequences.spanned.offsets[sequence] + lines["start"]
    length = lines["length"].astype(np.int64)
    first_counts = before[np.minimum(start + 1, len(before) - 1)] - before[start]
    lines["targets"] = np.where(length > 0, before[start + length] - before[start] - first_counts, 0)
    return lines, start


def _cut(
    values: NDArray[np.int32], weights: NDArray[Any] | None, start: Integers, length: Integers
) -> tuple[NDArray[np.int32], NDArray[Any] | None]:
    """Values and weights of these parts, one after the other; the first token of each is not trained."""
    if length.sum() < len(values):  # otherwise they follow each other as it is
        # A slice a line: an index for each token would be twice as large as the tokens.
        taken = [slice(*ends) for ends in zip(start.tolist(), (start + length).tolist(), strict=True)]
        values = np.concatenate([values[:0], *(values[part] for part in taken)])
        if weights is not None:
            weights = np.concatenate([weights[:0], *(weights[part] for part in taken)])
    begins = (np.cumsum(length) - length)[length > 0]
    values[begins] = np.where(values[begins] < 0, ~values[begins], values[begins])
    return values, weights


def _with_dropped(lines: NDArray[np.void], prepared: Prepared) -> NDArray[np.void]:
    """Add a line for each record that never became tokens."""
    if not prepared.dropped:
        return lines
    added = np.zeros(len(prepared.dropped), dtype=LINE)
    added["record"] = list(prepared.dropped)
    added["status"] = DROPPED
    added["reason"] = list(prepared.dropped.values())
    together = np.concatenate([lines, added])
    return together[np.lexsort((together["part"], together["record"]))]
