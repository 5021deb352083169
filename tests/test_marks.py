"""Marks in a render come out again, wherever they stand and whatever the text is."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from chats import letters, rich_chats
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat, Pair, Text, Tokens
from padless.packer.marks import (
    CANDIDATES,
    Marked,
    choose_marks,
    leaves,
    mark_plain,
    normalized,
    split_marked,
)

MARKS = "\x01\x02\x03"

Segments = list[tuple[str, bool]]

unstable = st.sampled_from(
    ["e", "\u0301", "\u0323", "\u0958", "\u1100", "\u1161", "\u11a8", "\u212b", "\u00e9"]
)
pieces = st.one_of(st.text(letters, max_size=5), st.lists(unstable, max_size=4).map("".join))
records = st.lists(st.lists(st.tuples(pieces, st.booleans()), max_size=5), min_size=1, max_size=4)


def mark(record: Segments) -> str:
    """(text, trained) segments as one marked record."""
    parts = (f"{MARKS[0]}{text}{MARKS[1]}" if trained else text for text, trained in record)
    return "".join(parts) + MARKS[2]


def bare(record: Segments) -> str:
    return "".join(text for text, _ in record)


def trained_bytes(found: Marked, *, counted: bool) -> list[tuple[int, bytes]]:
    """Each span's text and content, cut out by its byte places."""
    texts = [unicodedata.normalize("NFC", text) for text in found.texts] if counted else found.texts
    data = "".join(texts).encode("utf-8")
    places = found.counted if counted and found.counted is not None else found
    spans = zip(found.span_text.tolist(), places.span_start.tolist(), places.span_end.tolist(), strict=True)
    return [(text, data[start:end]) for text, start, end in spans]


@given(records=records)
def test_what_was_marked_comes_out_in_bytes(records: list[Segments]) -> None:
    found = split_marked("".join(map(mark, records)), MARKS)
    assert found.texts == [bare(record) for record in records]
    lengths = [len(text.encode("utf-8")) for text in found.texts]
    assert np.diff(found.offsets).tolist() == lengths
    expected = [
        (number, text.encode("utf-8"))
        for number, record in enumerate(records)
        for text, trained in record
        if trained
    ]
    assert trained_bytes(found, counted=False) == expected


@given(records=records)
def test_what_was_marked_comes_out_in_characters(records: list[Segments]) -> None:
    found = split_marked("".join(map(mark, records)), MARKS)
    for number, record in enumerate(records):
        text, spans = found.one(number)
        assert text == bare(record)
        assert [text[start:end] for start, end in spans] == [text for text, trained in record if trained]
        ends = np.cumsum([len(text) for text, _ in record]).tolist()
        assert [end for _, end in spans] == [
            end for end, (_, trained) in zip(ends, record, strict=True) if trained
        ]


@given(records=records)
@settings(max_examples=200)
def test_places_count_the_composed_text_where_the_tokenizer_composes(records: list[Segments]) -> None:
    found = split_marked("".join(map(mark, records)), MARKS, normalizes=True)
    assert found.texts == [bare(record) for record in records]  # the tokenizer composes for itself
    composed = [unicodedata.normalize("NFC", text) for text in found.texts]
    if found.counted is None:
        assert composed == found.texts
        return
    apart = found.counted.apart
    spans = [(number, text) for number, record in enumerate(records) for text, trained in record if trained]
    if not apart.any():
        assert np.diff(found.counted.offsets).tolist() == [len(text.encode("utf-8")) for text in composed]
        expected = [(number, unicodedata.normalize("NFC", text).encode("utf-8")) for number, text in spans]
        assert trained_bytes(found, counted=True) == expected
    for number, record in enumerate(records):
        pieces = "".join(unicodedata.normalize("NFC", part) for part in _between_marks(record))
        assert apart[number] == (pieces != composed[number])


def _between_marks(record: Segments) -> list[str]:
    return mark(record).replace(MARKS[1], MARKS[0]).rstrip(MARKS[2]).split(MARKS[0])


def test_a_span_that_begins_within_a_composed_character_cannot_be_counted() -> None:
    assert normalized("e\x01\u0301\x02\x03", MARKS) is None
    assert normalized("\x01e\u0301\x02\x03", MARKS) == "\x01\u00e9\x02\x03"


@given(contents=st.lists(st.text(st.characters(max_codepoint=0x40)), max_size=4))
def test_marks_are_in_none_of_the_contents(contents: list[str]) -> None:
    marks = choose_marks(contents)
    free = [mark for mark in CANDIDATES if all(mark not in content for content in contents)]
    if marks is None:
        assert len(free) < 3
    else:
        assert len(set(marks)) == len(marks) == 3
        assert set(marks) <= set(free)


def test_there_are_no_marks_where_fewer_than_three_are_free() -> None:
    assert choose_marks([CANDIDATES[:-3]]) == CANDIDATES[-3:]
    assert choose_marks([CANDIDATES[:5], CANDIDATES[5:-2]]) is None


def test_marks_are_one_byte_and_no_white_space() -> None:
    assert len(CANDIDATES.encode("utf-8")) == len(set(CANDIDATES)) == len(CANDIDATES)
    assert not any(mark.isspace() for mark in CANDIDATES)


@pytest.mark.parametrize(
    "marked", ["\x01a\x01b\x02c\x02\x03", "\x01a\x03", "a\x02\x03", "\x01a\x03b\x02\x03", "\x02\x01\x03"]
)
def test_marks_that_do_not_pair_up_are_an_error(marked: str) -> None:
    with pytest.raises(RecordError, match="overlap or are left open"):
        split_marked(marked, MARKS)


def strings_in(value: Any) -> list[str]:
    """Every string in plain data, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in strings_in(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings_in(item)]
    return []


@given(chat=rich_chats())
@settings(deadline=None)
def test_every_text_of_a_chat_is_searched(chat: Chat) -> None:
    found = leaves(chat)
    values = [value for turn in chat.messages for value in turn.values()]
    assert sorted(found) == sorted([*strings_in(values), *strings_in(chat.tools)])


def test_every_text_of_a_pair_and_of_a_document_is_searched() -> None:
    assert leaves(Pair("a", "b")) == ["a", "b"]
    assert leaves(Text("a")) == ["a"]
    assert leaves(Tokens([1], None)) == []


@pytest.mark.parametrize(
    ("example", "train_prompt", "expected"),
    [
        (Text("doc"), False, [(0, 3)]),
        (Text(""), False, [(0, 0)]),
        (Pair("ask", "say"), False, [(3, 6)]),
        (Pair("ask", "say"), True, [(0, 6)]),
        (Pair("ask", ""), False, [(3, 3)]),
    ],
)
def test_documents_and_completions_are_trained(
    example: Pair | Text, train_prompt: bool, expected: list[tuple[int, int]]
) -> None:
    found = split_marked(mark_plain(example, MARKS, train_prompt=train_prompt), MARKS)
    assert found.one(0) == ("".join(example), expected)
