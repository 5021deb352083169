"""Rendered text to tokens that know whether they are trained.

A chunk is encoded flat, and the tokens are counted in bytes: for a byte-level vocabulary the cumulated
lengths of the tokens are their offsets, at numpy speed. A text whose tokens do not add up to its bytes
goes through the tokenizer's own character offsets instead. A token that overlaps a span belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.encode import Encoder
from padless.packer.errors import RecordError
from padless.packer.marks import BLOCK, Counted, Marked, split_marked

Offsets = NDArray[np.int64]


class Spanned(NamedTuple):
    """Tokens of many texts, flat, and the token ranges of their spans."""

    ids: NDArray[np.int32]
    offsets: Offsets
    """[texts + 1]: where each text's tokens begin."""
    span_text: Offsets
    span_start: Offsets
    """First token of each span, and one past its last; spans in the order of the texts."""
    span_end: Offsets


def encode_marked(encoder: Encoder, parts: Marked, *, plain: bool) -> Spanned:
    """Encode a chunk's texts and find the tokens of their spans.

    `plain`: special tokens spelled in the texts stay text.
    """
    if encoder.byte_lengths is None:
        if not _all_whole(parts):
            return join([_by_characters(encoder, parts, n, plain) for n in range(len(parts.texts))])
        ids, offsets = encoder.flat(parts.texts, plain=plain)  # nothing to locate
        return Spanned(ids, offsets, parts.span_text, offsets[:-1], offsets[1:])
    counted = parts.counted or Counted(
        parts.offsets, parts.span_start, parts.span_end, np.zeros(len(parts.texts), dtype=np.bool_)
    )
    ids, offsets = encoder.flat(parts.texts, plain=plain)
    # As narrow as they may be, and made in place: a long text has one for each of its tokens.
    kind = np.int32 if counted.offsets[-1] < 2**30 else np.int64
    edges: NDArray[np.signedinteger[Any]] = np.zeros(len(ids) + 1, dtype=kind)
    for begin in range(0, len(ids), BLOCK):  # numpy makes 8 bytes of each index for a moment
        edges[1 + begin : 1 + begin + BLOCK] = encoder.byte_lengths[ids[begin : begin + BLOCK]]
    np.cumsum(edges[1:], out=edges[1:])
    apart = counted.apart | (np.diff(edges[offsets]) != np.diff(counted.offsets))
    shift = edges[offsets[:-1]] - counted.offsets[:-1]  # zero but behind a text that does not add up
    start = (counted.span_start + shift[parts.span_text]).astype(edges.dtype)
    end = (counted.span_end + shift[parts.span_text]).astype(edges.dtype)
    first = np.searchsorted(edges, start, side="right") - 1
    last = np.searchsorted(edges, end, side="left")
    first = np.where(start == end, last, first)  # an empty span trains nothing
    found = Spanned(ids, offsets, parts.span_text, first, last)
    if not apart.any():
        return found
    again = {int(n): _by_characters(encoder, parts, int(n), plain) for n in np.flatnonzero(apart)}
    return join([again.get(n) or take(found, n) for n in range(len(parts.texts))])


def _all_whole(parts: Marked) -> bool:
    n = len(parts.texts)
    return (
        len(parts.span_text) == n
        and np.array_equal(parts.span_text, np.arange(n))
        and np.array_equal(parts.span_start, parts.offsets[:-1])
        and np.array_equal(parts.span_end, parts.offsets[1:])
    )


def _by_characters(encoder: Encoder, parts: Marked, index: int, plain: bool) -> Spanned:
    """One text by the tokenizer's own offsets."""
    text, spans = parts.one(index)
    ids, offsets = encoder.with_offsets(text, plain=plain)
    return _located(ids, offsets, spans)


def _located(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> Spanned:
    """Spans in characters to spans in tokens, for one text."""
    n = len(ids)
    starts = np.fromiter((o[0] for o in offsets), dtype=np.int64, count=n)
    ends = np.fromiter((o[1] for o in offsets), dtype=np.int64, count=n)
    first = np.zeros(len(spans), dtype=np.int64)
    last = np.zeros(len(spans), dtype=np.int64)
    for number, (start, end) in enumerate(spans):
        inside = np.flatnonzero((ends > start) & (starts < end) & (start < end))
        if len(inside):
            first[number], last[number] = inside[0], inside[-1] + 1
        else:  # nothing is trained, but a turn ends here
            first[number] = last[number] = np.count_nonzero(starts < end)
    return Spanned(
        np.asarray(ids, dtype=np.int32),
        np.array([0, n], dtype=np.int64),
        np.zeros(len(spans), dtype=np.int64),
        first,
        last,
    )


def take(found: Spanned, index: int) -> Spanned:
    """One text of many."""
    start, stop = found.offsets[index], found.offsets[index + 1]
    mine = slice(*np.searchsorted(found.span_text, [index, index + 1]))
    return Spanned(
        found.ids[start:stop],
        np.array([0, stop - start], dtype=np.int64),
        np.zeros(mine.stop - mine.start, dtype=np.int64),
        found.span_start[mine] - start,
        found.span_end[mine] - start,
    )


def reorder(found: Spanned, order: NDArray[np.integer]) -> Spanned:
    """The texts in another order: text `order[n]` becomes the n-th."""
    lengths = np.diff(found.offsets)[order]
    offsets = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    shift = offsets[:-1] - found.offsets[:-1][order]
    ids = found.ids[np.arange(len(found.ids)) - np.repeat(shift, lengths)]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    text = place[found.span_text]
    spans = np.argsort(text, kind="stable")
    text = text[spans]
    return Spanned(
        ids, offsets, text, found.span_start[spans] + shift[text], found.span_end[spans] + shift[text]
    )


def join(pieces: Sequence[Spanned]) -> Spanned:
    """Several texts' tokens one after the other."""
    if not pieces:
        empty = np.zeros(0, dtype=np.int64)
        return Spanned(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64), empty, empty, empty)
    lengths = np.concatenate([np.diff(piece.offsets) for piece in pieces])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    texts = np.cumsum([0, *(len(piece.offsets) - 1 for piece in pieces)])
    tokens = offsets[texts]
    return Spanned(
        np.concatenate([piece.ids for piece in pieces]),
        offsets,
        np.concatenate([p.span_text + n for p, n in zip(pieces, texts, strict=False)]),
        np.concatenate([p.span_start + n for p, n in zip(pieces, tokens, strict=False)]),
        np.concatenate([p.span_end + n for p, n in zip(pieces, tokens, strict=False)]),
    )


class Shield:
    """Keeps what a record's text spells as a special token text, beside the template's own special tokens.

    In the data each such spelling becomes one character that the record does not contain; after the render
    what still reads as a special token is the template's own. The render is cut there, as the tokenizer
    itself cuts it, and what lies between is encoded with special tokens as text.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        specials = encoder.files.special_contents
        self._ids = {text: encoder.files.token_id(text) for text in specials}
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None
        self._starts = sorted({text[:2] for text in specials})
        self._json_starts: list[bytes] | None = None
        if "".join(self._starts).isascii() and not any(c in start for start in self._starts for c in '"\\/'):
            self._json_starts = [start.encode() for start in self._starts]

    def spelled_in(self, contents: Sequence[str]) -> bool:
        """Whether any of the contents spells a special token."""
        if self._specials is None:
            return False
        return self.may_be_spelled_in("\n".join(contents)) and any(
            self._specials.search(content) for content in contents
        )

    def may_be_spelled_in(self, text: str) -> bool:
        """A quick look: False where no special token can be in it."""
        return any(start in text for start in self._starts)

    def is_clear(self, json: bytes | None) -> bool:
        """Whether it is seen of a JSON text that none of its texts spells a special token or has a mark.

        Control characters are always escaped as \\u00.., and so may be any other character.
        """
        if json is None or b"\\u00" in json or self._json_starts is None:
            return False
        return not any(start in json for start in self._json_starts)

    def cover(self, value: object, stand_ins: dict[str, str]) -> object:
        """A copy of a record's content in which stand-ins take the place of spelled special tokens."""
        if isinstance(value, str):
            assert self._specials is not None
            return self._specials.sub(lambda m: self._stand_in(m.group(), stand_ins), value)
        if isinstance(value, dict):
            return {self.cover(key, stand_ins): self.cover(item, stand_ins) for key, item in value.items()}
        if isinstance(value, list):
            return [self.cover(item, stand_ins) for item in value]
        return value

    def _stand_in(self, special: str, stand_ins: dict[str, str]) -> str:
        # Supplementary private use: no text has them by accident, and `encode` checks that none has.
        return stand_ins.setdefault(special, chr(0x10FF00 + len(stand_ins)))

    def encode(self, marked: str, marks: str, stand_ins: dict[str, str]) -> Spanned:
        """Tokens of one covered record. RecordError where its text has the stand-ins' characters itself."""
        assert self._specials is not None
        text, spans = split_marked(marked, marks).one(0)
        uncover = {stand_in: special for special, stand_in in stand_ins.items()}
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for match in self._specials.finditer(text):
            self._plain(text[position : match.start()], position, uncover, ids, offsets)
            special = self._ids[match.group()]
            assert special is not None
            ids.append(special)
            offsets.append(match.span())
            position = match.end()
        self._plain(text[position:], position, uncover, ids, offsets)
        return _located(ids, offsets, spans)

    def _plain(
        self,
        covered: str,
        at: int,
        uncover: dict[str, str],
        ids: list[int],
        offsets: list[tuple[int, int]],
    ) -> None:
        if not covered:
            return
        # back[i]: the covered text's character that character i of the uncovered text stands in
        back = [i for i, c in enumerate(covered) for _ in range(len(uncover.get(c, c)))]
        back.append(len(covered))
        text = "".join(uncover.get(c, c) for c in covered)
        found, places = self.encoder.with_offsets(text, plain=True)
        ids += found
        offsets += [(at + back[s], at + (back[e - 1] + 1 if e > s else back[s])) for s, e in places]


def check_no_stand_ins(contents: Sequence[str]) -> None:
    """RecordError where a record already has characters that `Shield` uses."""
    if any(0x10FF00 <= ord(c) <= 0x10FFFF for content in contents for c in content):
        raise RecordError("it spells special tokens and has characters from U+10FF00 on; take those out")
