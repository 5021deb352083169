"""One sequence a turn, and a record's own template variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from building import assert_verified, built, sequence_table, sequences_of, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import CHAT, END, chat, packed, refused, targets, word_tokenizer

from padless.packer.config import PackConfig
from padless.packer.errors import InputError

EXPAND = "--expand-turns"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_tokenizer(tmp_path_factory.mktemp("words"))


def test_each_turn_gets_a_sequence_that_ends_with_it_and_trains_it_alone(tmp_path: Path, words: Path) -> None:
    row = chat("w10", "w20", "w11", "w21", "w12", "w22")
    found = packed(tmp_path / "turns", [row], words, EXPAND)
    prefixes = [{"messages": row["messages"][:n]} for n in (2, 4, 6)]
    expected = packed(tmp_path / "prefixes", prefixes, words, "--train-on", "last")
    assert found == expected
    table = sequence_table(tmp_path / "turns" / "packed")
    assert table["record"] == [0, 0, 0] and table["part"] == [0, 1, 2]
    assert_verified(tmp_path / "turns" / "packed")


def test_a_prefix_is_rendered_as_the_template_renders_it_for_that_turn(tmp_path: Path) -> None:
    """A template that drops reasoning of all turns but the last keeps it where the turn is the last."""
    template = CHAT.replace(
        "message['content']",
        "(message['content'] if loop.last else message['content'].split(' ')[-1])",
    )
    words = word_tokenizer(tmp_path / "words", template=template)
    found = packed(tmp_path, [chat("w10", "w30 w20", "w11", "w31 w21")], words, EXPAND)
    assert targets(found) == [[30, 20, END], [31, 21, END]]
    assert 30 not in found[1][0] and 20 in found[1][0]


@settings(max_examples=15, deadline=None)
@given(flags=st.lists(st.booleans(), min_size=1, max_size=6))
def test_turns_left_out_of_the_loss_give_none(
    tmp_path_factory: pytest.TempPathFactory, flags: list[bool]
) -> None:
    folder = tmp_path_factory.mktemp("turns")
    row = chat(*(word for n in range(len(flags)) for word in (f"w{10 + n}", f"w{20 + n}")))
    for number, flag in enumerate(flags):
        row["messages"][2 * number + 1]["train"] = flag
    found = packed(
        folder, [row, chat("w10", "w20")], word_tokenizer(folder / "words"), EXPAND, "--max-length", 96
    )
    expected = [[20 + n, END] for n, flag in enumerate(flags) if flag]
    assert targets(found) == [*expected, [20, END]]
    assert_verified(folder / "packed")


def test_turns_of_a_prompt_are_context_unless_asked_for(tmp_path: Path, words: Path) -> None:
    turns = chat("w10", "w20", "w11", "w21")["messages"]
    rows = [{"prompt": turns[:3], "completion": turns[3:]}]
    assert targets(packed(tmp_path / "a", rows, words, EXPAND)) == [[21, END]]
    found = packed(tmp_path / "b", rows, words, EXPAND, "--train-on", "assistant")
    assert targets(found) == [[20, END], [21, END]]


def test_a_record_of_which_turns_do_not_fit_is_truncated(tmp_path: Path, words: Path) -> None:
    rows = [chat("w10", "w20", "w11 " * 70, "w21", "w12", "w22"), chat("w10", "w20")]
    found = packed(tmp_path, rows, words, EXPAND, "--overflow", "drop")
    assert targets(found) == [[20, END], [20, END]]
    table = sequence_table(tmp_path / "packed")
    assert (table["record"], table["part"]) == ([0, 1], [0, 0])
    assert (table["status"], table["reason"]) == (["truncated", "whole"], ["too-long", None])
    assert table["cut"] == [(24 + 69) + (36 + 69), 0]
    assert_verified(tmp_path / "packed")


def test_bytes_do_not_depend_on_the_workers(tmp_path: Path, words: Path) -> None:
    rows = [chat(f"w{10 + n % 80}", "w20", "w11", "w21", k=n) for n in range(50)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    options = ("--tokenizer", words, "--max-length", 64, EXPAND)
    one = built(source, tmp_path / "one", *options, "--workers", 1)
    two = built(source, tmp_path / "two", *options, "--workers", 2)
    assert sequences_of(tmp_path / "one") == sequences_of(tmp_path / "two")
    assert one["sequences"] == two["sequences"] == 100 and one["records"] == 50


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_expanding_turns_and_training_otherwise_contradict_each_other(train_on: str) -> None:
    with pytest.raises(InputError, match="expand_turns .* train_on"):
        PackConfig(
            sources=("a",), tokenizer="t", max_length=8, output="o", expand_turns=True, train_on=train_on
        )


# -- chat_template_kwargs ------------------------------------------------------------------------------

STYLED = "{{ style | default('w90') }}" + CHAT


@pytest.mark.parametrize("given", [{"style": "w91"}, '{"style": "w91"}'])
def test_a_records_variables_go_before_those_of_the_build(tmp_path: Path, given: object) -> None:
    words = word_tokenizer(tmp_path / "words", template=STYLED)
    rows = [
        chat("w10", "w20"),
        chat("w10", "w20", chat_template_kwargs=given),
        chat("w10", "w20", chat_template_kwargs=None),
        chat("w10", "w20", chat_template_kwargs={"style": None}),
    ]
    assert [ids[0] for ids, _ in packed(tmp_path / "a", rows, words)] == [90, 91, 90, 90]
    found = packed(tmp_path / "b", rows, words, "--template-arg", "style=w92")
    assert [ids[0] for ids, _ in found] == [92, 91, 92, 92]
    named = [{**row, "mine": row.pop("chat_template_kwargs", None)} for row in rows]
    found = packed(tmp_path / "c", named, words, "--column", "chat_template_kwargs=mine")
    assert [ids[0] for ids, _ in found] == [90, 91, 90, 90]


def test_special_tokens_spelled_in_variables_stay_text(tmp_path: Path) -> None:
    words = word_tokenizer(tmp_path / "words", template=STYLED)
    rows = [chat("w10", "w20", chat_template_kwargs={"style": "<|im_end|>"})]
    ((ids, _),) = packed(tmp_path, rows, words)
    assert ids.count(END) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "chat_template_kwargs is not valid JSON"),
        ([1], "chat_template_kwargs must be an object of template variables, got list"),
        ({"messages": []}, "chat_template_kwargs sets 'messages'"),
        ({"add_generation_prompt": True}, "chat_template_kwargs sets 'add_generation_prompt'"),
        ({"padless_open": ""}, "chat_template_kwargs sets 'padless_open'"),
    ],
)
def test_variables_that_cannot_be_are_refused(tmp_path: Path, words: Path, given: object, said: str) -> None:
    message = refused(tmp_path, [chat("w10", "w20", chat_template_kwargs=given)], words)
    assert said in message and "record 0 (line 1)" in message
