"""Marked text: the trained spans of a render, carried in the render itself.

A chunk's records travel as one string, `... [open] trained [close] ... [end]` for each record, whose three
marks are control characters that no record of the chunk contains. Taking them out again is a few passes
at memory speed over the UTF-8 bytes:

    "Q\x01A\x02\x03"  ->  text "QA", bytes 0..2, span 1..2
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat, Example, Pair, Text

CANDIDATES = "".join(map(chr, [*range(1, 9), *range(14, 28)]))
"""One byte each, and no white space: no template and no tokenizer trims them away."""

BLOCK = 2**20
"""Bytes that are looked at together: what is made of them for a moment stays small beside a long text."""

Offsets = NDArray[np.int64]


class Counted(NamedTuple):
    """Byte places of texts in NFC; `apart`: texts whose spans cannot be told there."""

    offsets: Offsets
    span_start: Offsets
    span_end: Offsets
    apart: NDArray[np.bool_]


class Marked(NamedTuple):
    """Texts without their marks, and where the spans lie, in UTF-8 bytes over all texts put together."""

    texts: list[str]
    offsets: Offsets
    """[len(texts) + 1]: where each text begins."""
    span_text: Offsets
    """Which text each span is in."""
    span_start: Offsets
    span_end: Offsets
    counted: Counted | None = None
    """Where the tokenizer normalizes and that changes a text: the same places in the bytes it sees."""

    def one(self, index: int) -> tuple[str, list[tuple[int, int]]]:
        """One text and its spans in characters."""
        text = self.texts[index]
        mine = slice(*np.searchsorted(self.span_text, [index, index + 1]))
        edges = np.stack([self.span_start[mine], self.span_end[mine]], axis=1) - self.offsets[index]
        if text.isascii():
            return text, [(int(start), int(end)) for start, end in edges]
        data = text.encode("utf-8")
        return text, [
            (len(data[:start].decode("utf-8")), len(data[:end].decode("utf-8"))) for start, end in edges
        ]


def choose_marks(contents: Iterable[str]) -> str | None:
    """Three characters that none of the contents has; None where fewer than three are free."""
    joined = "".join(contents)
    free = "".join(islice((mark for mark in CANDIDATES if mark not in joined), 3))
    return free if len(free) == 3 else None


def leaves(example: Example) -> list[str]:
    """Every text in a record, so that it can be searched."""
    if isinstance(example, Text):
        return [example.text]
    if isinstance(example, Pair):
        return [example.prompt, example.completion]
    found: list[str] = []
    if isinstance(example, Chat):
        for turn in example.messages:
            for value in turn.values():
                if type(value) is str:
                    found.append(value)
                else:
                    _collect(value, found)
        _collect(example.tools, found)
        _collect(example.variables, found)
    return found


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            found.append(key if type(key) is str else str(key))
            if type(item) is str:
                found.append(item)
            elif item is not None:
                _collect(item, found)
    elif isinstance(value, list):
        for item in value:
            _collect(item, found)


def mark_plain(example: Pair | Text, marks: str, *, train_prompt: bool) -> str:
    """A prompt with its completion, or a document, as marked text."""
    if isinstance(example, Text):
        return f"{marks[0]}{example.text}{marks[1]}{marks[2]}"
    if train_prompt:
        return f"{marks[0]}{example.prompt}{example.completion}{marks[1]}{marks[2]}"
    return f"{example.prompt}{marks[0]}{example.completion}{marks[1]}{marks[2]}"


def whole_texts(texts: list[str], *, normalizes: bool) -> Marked:
    """Texts that are trained from end to end, which need no marks: nothing is copied, however long they are.

    `normalizes`: as of `split_marked`.
    """
    every = np.arange(len(texts))
    places = _byte_offsets(texts)
    found = Marked(texts, places, every, places[:-1], places[1:])
    if normalizes and any(_is_unstable(text) for text in texts):
        places = _byte_offsets([unicodedata.normalize("NFC", t) if _is_unstable(t) else t for t in texts])
        nowhere = np.zeros(len(texts), dtype=np.bool_)
        found = found._replace(counted=Counted(places, places[:-1], places[1:], nowhere))
    return found


def _byte_offsets(texts: list[str]) -> Offsets:
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(t) if t.isascii() else len(t.encode("utf-8")) for t in texts], out=offsets[1:])
    return offsets


def _is_unstable(text: str) -> bool:
    return not text.isascii() and not unicodedata.is_normalized("NFC", text)


def split_marked(marked: str, marks: str, *, normalizes: bool = False) -> Marked:
    """Take the marks out; `normalizes`: count the bytes in NFC, as the tokenizer will.

    RecordError where the marks do not pair up (a template that nests its blocks).
    """
    data = np.frombuffer(marked.encode("utf-8"), dtype=np.uint8)
    opening, closing, ending = (ord(mark) for mark in marks)
    at = np.concatenate(
        [
            begin + np.flatnonzero((block == opening) | (block == closing) | (block == ending))
            for begin in range(0, len(data) or 1, BLOCK)
            for block in [data[begin : begin + BLOCK]]
        ]
    )
    kind = data[at]
    clean = at - np.arange(len(at))
    is_end = kind == ending
    opens = np.flatnonzero(kind == opening)
    closes = np.flatnonzero(kind == closing)
    if len(opens) != len(closes) or not np.array_equal(closes, opens + 1):
        raise RecordError("the template's generation blocks overlap or are left open")
    text_of_mark = np.cumsum(is_end) - is_end
    texts = marked.replace(marks[0], "").replace(marks[1], "").split(marks[2])
    texts.pop()  # behind the last end mark
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    offsets[1:] = clean[is_end]
    found = Marked(texts, offsets, text_of_mark[opens], clean[opens], clean[closes])
    if normalizes:
        # Below U+0300 nothing composes; in UTF-8 what lies from there on begins with 0xCC or more.
        high = np.unique(np.searchsorted(at[is_end], np.flatnonzero(data >= 0xCC)))
        unstable = [n for n in high.tolist() if not unicodedata.is_normalized("NFC", texts[n])]
        if unstable:
            found = found._replace(counted=_count_composed(marked, marks, unstable))
    return found


def _count_composed(marked: str, marks: str, unstable: list[int]) -> Counted:
    records = [record + marks[2] for record in marked.split(marks[2])[:-1]]
    apart = np.zeros(len(records), dtype=np.bool_)
    for index in unstable:
        composed = normalized(records[index], marks)
        if composed is None:
            apart[index] = True
        else:
            records[index] = composed
    places = split_marked("".join(records), marks)
    return Counted(places.offsets, places.span_start, places.span_end, apart)


def normalized(marked: str, marks: str) -> str | None:
    """One record's marked text in NFC; None where a span's edge falls inside a composed character."""
    pieces = re.split(f"([{marks}])", marked)
    found = "".join(piece if piece in marks else unicodedata.normalize("NFC", piece) for piece in pieces)
    whole = unicodedata.normalize("NFC", _bare(marked, marks))
    return found if _bare(found, marks) == whole else None


def _bare(marked: str, marks: str) -> str:
    return marked.translate({ord(mark): None for mark in marks})
