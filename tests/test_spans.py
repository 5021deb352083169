"""Tokens know whether they are trained: counted in bytes or not, it is what the tokenizer's offsets say."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import files_of, letters, marks_for
from chats import texts as any_texts
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from padless.packer.encode import Encoder
from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat
from padless.packer.marks import leaves, split_marked
from padless.packer.spans import Shield, Spanned, check_no_stand_ins, encode_marked, join, reorder, take
from padless.packer.template import ChatTemplate

MARKS = "\x01\x02\x03"
TOKENIZERS = ("qwen3", "llama3.1", "gpt2", "mistral-sp")

Segments = list[tuple[str, bool]]

# Characters that compose across a border, that take several tokens, or that tokenizers join with others.
awkward = st.sampled_from(
    ["e", "\u0301", "\u0323", "\u0958", "\u0915\u093c", "\u1100", "\u1161", "\u11a8", "\u212b", "\ufb01"]
    + [
        "\U0001f469\u200d\U0001f467",
        "\U0001f1e9\U0001f1ea",
        "\u2603\ufe0f",
        "\U00020000",
        " ",
        "  ",
        "\n",
        "ing",
    ]
)
pieces = st.one_of(st.text(letters, max_size=5), st.lists(awkward, max_size=4).map("".join))
records = st.lists(st.lists(st.tuples(pieces, st.booleans()), max_size=5), min_size=1, max_size=4)


@lru_cache
def encoder_of(shared: Path, tokenizer: str) -> Encoder:
    return Encoder(files_of(shared, tokenizer))


def mark(record: Segments) -> str:
    parts = (f"{MARKS[0]}{text}{MARKS[1]}" if trained else text for text, trained in record)
    return "".join(parts) + MARKS[2]


def expected_tokens(encoder: Encoder, record: Segments, *, plain: bool) -> tuple[list[int], list[bool]]:
    """One text encoded by `tokenizers`; trained is what overlaps a trained character."""
    encoder.reference.encode_special_tokens = plain
    encoding = encoder.reference.encode("".join(text for text, _ in record), add_special_tokens=False)
    trained = [on for text, on in record for _ in text]
    return encoding.ids, [any(trained[start:end]) for start, end in encoding.offsets]


def tokens_of(found: Spanned, index: int) -> tuple[list[int], list[bool]]:
    start, stop = found.offsets[index : index + 2].tolist()
    trained = np.zeros(len(found.ids), dtype=np.bool_)
    for first, last in zip(found.span_start.tolist(), found.span_end.tolist(), strict=True):
        trained[first:last] = True
    return found.ids[start:stop].tolist(), trained[start:stop].tolist()


@pytest.mark.shared
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_trained_tokens_are_those_that_overlap_trained_characters(
    shared: Path, tokenizer: str, plain: bool
) -> None:
    encoder = encoder_of(shared, tokenizer)
    assert (encoder.byte_lengths is None) == (tokenizer == "mistral-sp")
    specials = st.sampled_from(encoder.files.special_contents)
    some = st.lists(st.tuples(st.one_of(pieces, pieces, specials), st.booleans()), max_size=5)

    @settings(max_examples=120, deadline=None)
    @given(records=st.lists(some, min_size=1, max_size=4))
    def same(records: list[Segments]) -> None:
        parts = split_marked("".join(map(mark, records)), MARKS, normalizes=encoder.normalizes)
        found = encode_marked(encoder, parts, plain=plain)
        for index, record in enumerate(records):
            assert tokens_of(found, index) == expected_tokens(encoder, record, plain=plain)

    same()


@pytest.mark.shared
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_whole_text_is_trained_whole(shared: Path, tokenizer: str) -> None:
    encoder = encoder_of(shared, tokenizer)
    texts = ["a b", "", "e\u0301 \u0958", "x"]
    parts = split_marked(
        "".join(mark([(text, True)]) for text in texts), MARKS, normalizes=encoder.normalizes
    )
    found = encode_marked(encoder, parts, plain=True)
    for index, text in enumerate(texts):
        ids, trained = tokens_of(found, index)
        assert ids == expected_tokens(encoder, [(text, True)], plain=True)[0]
        assert all(trained)


@pytest.mark.shared
def test_an_empty_span_trains_nothing(shared: Path) -> None:
    for tokenizer in TOKENIZERS:
        encoder = encoder_of(shared, tokenizer)
        for record in ([("", True)], [("ab", False), ("", True), ("c d", False)], [("", True), ("a", False)]):
            parts = split_marked(mark(record), MARKS)
            assert not any(tokens_of(encode_marked(encoder, parts, plain=True), 0)[1])


@pytest.mark.shared
@settings(max_examples=40, deadline=None)
@given(records=records)
def test_texts_taken_apart_and_joined_are_the_same(shared: Path, records: list[Segments]) -> None:
    found = encode_marked(
        encoder_of(shared, "gpt2"), split_marked("".join(map(mark, records)), MARKS), plain=True
    )
    again = join([take(found, index) for index in range(len(records))])
    for one, other in zip(again, found, strict=True):
        assert one.tolist() == other.tolist()
    assert [len(column) for column in join([])] == [0, 1, 0, 0, 0]


@pytest.mark.shared
@settings(max_examples=40, deadline=None)
@given(records=records, seed=st.randoms())
def test_texts_in_another_order_are_the_texts_one_by_one(
    shared: Path, records: list[Segments], seed: random.Random
) -> None:
    found = encode_marked(
        encoder_of(shared, "gpt2"), split_marked("".join(map(mark, records)), MARKS), plain=True
    )
    order = seed.sample(range(len(records)), len(records))
    expected = join([take(found, index) for index in order])
    for one, other in zip(reorder(found, np.array(order)), expected, strict=True):
        assert one.tolist() == other.tolist()


# -- special tokens that are spelled in the data ------------------------------------------------

AROUND = {
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama3.1": ("<|start_header_id|>", "<|eot_id|>"),
    "gpt2": ("<|endoftext|>", "<|endoftext|>"),
    "mistral-sp": ("<s>", "</s>"),
}


def turns_template(tokenizer: str) -> ChatTemplate:
    """Each turn between two special tokens; answers are trained with the second."""
    opening, closing = AROUND[tokenizer]
    turn = f"{{{{ m.content + '{closing}' }}}}"
    source = (
        f"{{% for m in messages %}}{opening}{{% if m.role == 'user' %}}{turn}{{% else %}}"
        f"{{% generation %}}{turn}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
    )
    return ChatTemplate(source, {}, "here")


def shielded(encoder: Encoder, template: ChatTemplate, chat: Chat) -> tuple[list[int], list[bool]]:
    shield = Shield(encoder)
    assume(not any(ord(c) >= 0x10FF00 for leaf in leaves(chat) for c in leaf))
    check_no_stand_ins(leaves(chat))
    stand_ins: dict[str, str] = {}
    covered: Any = shield.cover(chat.messages, stand_ins)
    marks = marks_for(template, chat)
    return tokens_of(shield.encode(template.render(Chat(covered), marks), marks, stand_ins), 0)


@pytest.mark.shared
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_special_tokens_spelled_in_the_data_stay_text(shared: Path, tokenizer: str) -> None:
    encoder, template = encoder_of(shared, tokenizer), turns_template(tokenizer)
    special = [encoder.files.token_id(text) for text in AROUND[tokenizer]]
    spelled = st.sampled_from(encoder.files.special_contents[:4] + list(AROUND[tokenizer]))
    contents = st.lists(st.one_of(any_texts, spelled), max_size=4).map("".join)

    def text_ids(text: str) -> list[int]:
        found: list[int] = expected_tokens(encoder, [(text, False)], plain=True)[0]
        return found

    @settings(max_examples=60, deadline=None)
    @given(question=contents, answer=contents)
    def same(question: str, answer: str) -> None:
        chat = Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
        asked, said = text_ids(question), text_ids(answer)
        ids = [special[0], *asked, special[1], special[0], *said, special[1]]
        trained = [False] * (len(asked) + 3) + [True] * (len(said) + 1)
        assert shielded(encoder, template, chat) == (ids, trained)

    same()


@pytest.mark.shared
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_without_spelled_special_tokens_the_shield_changes_nothing(shared: Path, tokenizer: str) -> None:
    encoder, template = encoder_of(shared, tokenizer), turns_template(tokenizer)

    @settings(max_examples=60, deadline=None)
    @given(question=any_texts, answer=any_texts)
    def same(question: str, answer: str) -> None:
        chat = Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
        assume(not Shield(encoder).spelled_in(leaves(chat)))
        marks = marks_for(template, chat)
        parts = split_marked(template.render(chat, marks), marks, normalizes=encoder.normalizes)
        assert shielded(encoder, template, chat) == tokens_of(encode_marked(encoder, parts, plain=False), 0)

    same()


@pytest.mark.shared
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_spelling_of_a_special_token_is_found(shared: Path, tokenizer: str) -> None:
    encoder = encoder_of(shared, tokenizer)
    shield = Shield(encoder)
    for text in encoder.files.special_contents:
        assert shield.may_be_spelled_in(f"a {text} b")
        assert shield.spelled_in(["a", f"b{text}c"])
        assert not shield.spelled_in([text[:-1], text[1:]])  # two contents do not make one


@pytest.mark.shared
def test_covering_reaches_into_calls_and_tools(shared: Path) -> None:
    shield = Shield(encoder_of(shared, "qwen3"))
    stand_ins: dict[str, str] = {}
    spelled = {"a<|im_end|>": ["<|im_end|><|im_start|>", {"x": 1, "y": None}]}
    end, start = chr(0x10FF00), chr(0x10FF01)
    assert shield.cover(spelled, stand_ins) == {f"a{end}": [end + start, {"x": 1, "y": None}]}
    assert stand_ins == {"<|im_end|>": end, "<|im_start|>": start}


def test_a_record_with_characters_of_the_shield_is_refused() -> None:
    check_no_stand_ins(["\U0010fe00", "a"])
    with pytest.raises(RecordError, match=r"U\+10FF00"):
        check_no_stand_ins(["a", "b\U0010ff00"])


@pytest.mark.shared
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_records_whose_json_is_clear_spell_no_special_token_and_have_no_mark(
    shared: Path, tokenizer: str
) -> None:
    encoder = encoder_of(shared, tokenizer)
    shield = Shield(encoder)
    special = st.sampled_from([*encoder.files.special_contents[:4], *AROUND.get(tokenizer, ())])
    odd = st.sampled_from([chr(code) for code in (1, 2, 3, 0x1C, 0x1F, 0x7F)])
    pieces = st.lists(st.one_of(st.text(max_size=4), special, odd), max_size=3).map("".join)
    seen = set()

    @settings(max_examples=150, deadline=None)
    @given(text=pieces, ascii=st.booleans(), nested=st.booleans())
    def same(text: str, ascii: bool, nested: bool) -> None:
        written = json.dumps({"value": text}, ensure_ascii=ascii)
        data = json.dumps({"value": written if nested else text}, ensure_ascii=ascii)
        clear = shield.is_clear(data.encode("utf-8", "surrogatepass"))
        seen.add(clear)
        if clear:
            assert not shield.spelled_in([text])
            assert not any(ord(c) < 32 and c not in "\b\t\n\f\r" for c in text)

    same()
    assert False in seen
    assert not shield.is_clear(None)


@pytest.mark.shared
def test_most_json_is_clear(shared: Path) -> None:
    shield = Shield(encoder_of(shared, "qwen3"))
    file = shared / "data" / "chat" / "glaive_toolcall_en_demo.json"
    assert shield.is_clear(file.read_bytes())
    assert not shield.is_clear(b'["<|im_end|>"]') and not shield.is_clear(b'["\\u003c|im_end|>"]')
