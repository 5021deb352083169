"""What becomes of records, against the same rules written out record by record."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer.config import PackConfig
from padless.packer.fates import Sequences, apply_policies
from padless.packer.lines import FAULTS, MALFORMED, REASONS, STATUSES
from padless.packer.prepared import Prepared, Task
from padless.packer.sources import Chunk
from padless.packer.spans import Spanned

CHUNK = Task(Chunk(index=0, source=0, reader="jsonl", path=""), "messages", False)


@dataclass(frozen=True, kw_only=True)
class Record:
    """An encoded record: tokens are numbers of their own, spans do not overlap."""

    ids: list[int]
    spans: list[tuple[int, int]]
    chat: bool = True
    context: int = 0
    """Spans at the front that are only context."""
    empty_reply: bool = False
    malformed: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the table, in words, with the tokens of its sequence and which of them are trained."""

    record: int
    status: str
    reason: str = ""
    part: int = 0
    start: int = 0
    cut: int = 0
    ids: tuple[int, ...] = ()
    trained: tuple[bool, ...] = ()


def config(**options: Any) -> PackConfig:
    return PackConfig(sources=("x",), tokenizer="x", output="x", **{"max_length": 6, **options})


# -- the rules, slowly --------------------------------------------------------------------------


def mask_of(options: PackConfig, record: Record) -> list[bool]:
    spans = record.spans[record.context :]
    if options.train_on == "last":
        spans = [span for span in record.spans[-1:] if span in spans]
    trained = [any(start <= place < end for start, end in spans) for place in range(len(record.ids))]
    if options.train_on == "all" and record.chat:
        trained = [True] * len(trained)
    return [False, *trained[1:]] if trained else []


def expected_lines(options: PackConfig, number: int, record: Record) -> list[Line] | None:
    """None: the build must stop at this record."""
    length, limit = len(record.ids), options.max_length
    trained = mask_of(options, record)

    def dropped(reason: str) -> list[Line]:
        return [Line(record=number, status="dropped", reason=reason, cut=length)]

    def part(status: str, index: int, start: int, stop: int, cut: int) -> Line:
        mask = [False, *trained[start + 1 : stop]]
        ids = tuple(record.ids[start:stop])
        reason = "" if status == "whole" else "too-long"
        return Line(
            record=number,
            status=status,
            reason=reason,
            part=index,
            start=start,
            cut=cut,
            ids=ids,
            trained=tuple(mask),
        )

    if record.malformed:
        return [Line(record=number, status="dropped", reason="malformed")]
    if options.on_empty_reply == "drop" and record.empty_reply:
        return dropped("empty-reply")
    if not length:
        return dropped("empty")
    if not any(trained):
        return dropped("no-targets")
    if length <= limit:
        return [part("whole", 0, 0, length, 0)]
    if options.overflow == "error":
        return None
    if options.overflow == "drop":
        return dropped("too-long")
    if options.overflow == "split":
        if not all(trained[1:]):
            return None
        starts = range(0, length, limit)
        return [part("fragment", n, s, min(s + limit, length), 0) for n, s in enumerate(starts)]
    kept = limit
    if record.chat:
        if not record.spans:
            return None
        kept = max((end for _, end in record.spans if end <= limit), default=0)
    if not any(trained[:kept]):
        return dropped("too-long")
    return [part("truncated", 0, 0, kept, length - kept)]


# -- the packer's own ---------------------------------------------------------------------------


def apply(options: PackConfig, records: list[Record]) -> tuple[list[Line], list[int]]:
    """Lines in words, and the records at which the build must stop."""
    prepared = Prepared(CHUNK, len(records), None)
    prepared.dropped = {n: MALFORMED for n, record in enumerate(records) if record.malformed}
    prepared.empty_replies = [n for n, record in enumerate(records) if record.empty_reply]
    prepared.untrained = {
        n: tuple(range(record.context)) for n, record in enumerate(records) if record.context
    }
    kept = [(n, record) for n, record in enumerate(records) if not record.malformed]
    offsets = np.cumsum([0, *(len(record.ids) for _, record in kept)])
    spans = [
        (text, offsets[text] + start, offsets[text] + end)
        for text, (_, record) in enumerate(kept)
        for start, end in record.spans
    ]
    columns = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    ids = np.array([token for _, record in kept for token in record.ids], dtype=np.int32)
    sequences = Sequences(
        np.array([n for n, _ in kept], dtype=np.int64),
        Spanned(ids, offsets, *columns),
        frozenset(n for n, record in kept if record.chat),
    )
    lines, values, _, problems = apply_policies(options, prepared, sequences)
    found: list[Line] = []
    position = 0
    for line in lines:
        mine = values[position : position + int(line["length"])]
        position += len(mine)
        found.append(
            Line(
                record=int(line["record"]),
                status=STATUSES[line["status"]],
                reason=REASONS[line["reason"]],
                part=int(line["part"]),
                start=int(line["start"]),
                cut=int(line["cut"]),
                ids=tuple(int(v) if v >= 0 else -1 - int(v) for v in mine),
                trained=tuple(bool(v < 0) for v in mine),
            )
        )
        assert int(line["targets"]) == int((mine < 0).sum())
        assert bool(line["empty_reply"]) == (
            records[found[-1].record].empty_reply and not records[found[-1].record].malformed
        )
    assert position == len(values)
    return found, [problem.record for problem in problems]


@st.composite
def some_records(draw: st.DrawFn) -> list[Record]:
    found: list[Record] = []
    for number in range(draw(st.integers(1, 6))):
        length = draw(st.integers(0, 20))
        edges = draw(st.lists(st.integers(0, length), max_size=6).map(sorted))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        whole = draw(st.booleans())  # a document: trained from end to end
        found.append(
            Record(
                ids=[100 * number + place for place in range(length)],
                spans=[(0, length)] if whole else spans,
                chat=not whole,
                context=0 if whole else draw(st.integers(0, len(spans))) * draw(st.integers(0, 1)),
                empty_reply=draw(st.integers(0, 5)) == 0,
                malformed=draw(st.integers(0, 7)) == 0,
            )
        )
    return found


@pytest.mark.parametrize("overflow", ["error", "drop", "truncate", "split"])
@pytest.mark.parametrize("train_on", ["auto", "all", "last"])
def test_records_fare_as_the_rules_say(overflow: str, train_on: str) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None)
    @given(records=some_records(), empty=st.sampled_from(["keep", "drop"]), limit=st.integers(2, 12))
    def same(records: list[Record], empty: str, limit: int) -> None:
        options = config(overflow=overflow, train_on=train_on, on_empty_reply=empty, max_length=limit)
        lines, stops = apply(options, records)
        expected = [expected_lines(options, n, record) for n, record in enumerate(records)]
        assert stops == [n for n, some in enumerate(expected) if some is None]
        found = [line for line in lines if line.record not in stops]
        assert found == [line for some in expected if some is not None for line in some]
        seen.update(line.status for line in found)
        seen["stopped"] += len(stops)

    same()
    outcomes = {"error": "stopped", "drop": "dropped", "truncate": "truncated", "split": "fragment"}
    assert seen["whole"] > 0
    assert seen[outcomes[overflow]] > 0


def test_the_context_of_a_refused_record_is_not_taken_from_the_next_one() -> None:
    refused = Record(ids=[], spans=[], context=1, malformed=True)
    lines, _ = apply(config(), [refused, Record(ids=[7, 8, 9], spans=[(1, 3)])])
    assert [line.trained for line in lines] == [(), (False, True, True)]


@settings(max_examples=150, deadline=None)
@given(records=some_records(), overflow=st.sampled_from(["drop", "truncate", "split"]))
def test_every_token_is_in_a_sequence_or_counted_as_cut(records: list[Record], overflow: str) -> None:
    lines, stops = apply(config(overflow=overflow), records)
    for number, record in enumerate(records):
        mine = [line for line in lines if line.record == number]
        assert mine or number in stops
        if number not in stops and not record.malformed:
            assert sum(len(line.ids) + line.cut for line in mine) == len(record.ids)
            assert [line.part for line in mine] == list(range(len(mine)))
        assert all(len(line.ids) <= 6 and not any(line.trained[:1]) for line in mine)


@pytest.mark.parametrize(
    ("overflow", "record", "message"),
    [
        ("error", Record(ids=list(range(9)), spans=[(0, 9)]), "has 9 tokens and max_length is 6: raise"),
        ("split", Record(ids=list(range(9)), spans=[(4, 9)]), "a loss mask: a fragment would begin"),
        ("truncate", Record(ids=list(range(9)), spans=[]), "marks no turns to cut at"),
    ],
)
def test_a_record_that_cannot_be_cut_says_how_long_it_is_and_what_to_do(
    overflow: str, record: Record, message: str
) -> None:
    train_on = "all" if overflow == "truncate" else "auto"
    prepared = Prepared(CHUNK, 1, [17])
    columns = np.array([(0, *span) for span in record.spans], dtype=np.int64).reshape(-1, 3).T
    spanned = Spanned(np.array(record.ids, dtype=np.int32), np.array([0, 9]), *columns)
    sequences = Sequences(np.array([0]), spanned, frozenset({0}))
    _, _, _, problems = apply_policies(config(overflow=overflow, train_on=train_on), prepared, sequences)
    (problem,) = problems
    assert (problem.record, problem.line) == (0, 17)
    assert message in problem.message
    assert "--overflow" in problem.message


def test_faults_are_what_nobody_asked_for() -> None:
    assert {REASONS[reason] for reason in FAULTS} == {"empty", "no-targets", "malformed"}
