"""Columns beside a format's own: a system text, and the conversation before a question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import ASSISTANT, CHAT, SYSTEM, USER, chat, packed, refused, targets, turns, word_tokenizer

from padless.packer.beside import with_columns
from padless.packer.formats import FORMATS
from padless.packer.formats.examples import Columns, Preference, Rated

ALPACA = {"instruction": "w10", "output": "w20"}
SHAREGPT = {"conversations": [{"from": "human", "value": "w10"}, {"from": "gpt", "value": "w20"}]}
OWN = [{"role": "system", "content": "w31"}, *turns("w10", "w20")]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_tokenizer(tmp_path_factory.mktemp("words"))


def said(sequence: tuple[list[int], list[int]]) -> list[tuple[int, int]]:
    """(role, first word) of each turn."""
    ids = sequence[0]
    return list(zip(ids[1::6], ids[3::6], strict=True))


def trained(sequence: tuple[list[int], list[int]]) -> list[int]:
    """The words with a label."""
    return [label for label in sequence[1] if label >= 10]


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row", [ALPACA, chat("w10", "w20"), SHAREGPT], ids=["alpaca", "messages", "sharegpt"]
)
def test_a_system_column_leads_the_conversation(
    tmp_path: Path, words: Path, row: dict[str, Any], column: str
) -> None:
    rows = [{**row, column: given} for given in ("w30", "", None, " ")] + [row]
    first, *others = packed(tmp_path, rows, words)
    assert said(first) == [(SYSTEM, 30), (USER, 10), (ASSISTANT, 20)]
    assert [said(other) for other in others] == [[(USER, 10), (ASSISTANT, 20)]] * 4
    assert targets([first]) == targets(others[:1])


def test_a_conversation_with_a_system_turn_keeps_its_own(tmp_path: Path, words: Path) -> None:
    (found,) = packed(tmp_path, [{"messages": OWN, "system": "w30"}], words, "--system", "w32")
    assert said(found)[0] == (SYSTEM, 31)


def test_a_records_own_system_text_goes_before_the_builds(tmp_path: Path, words: Path) -> None:
    found = packed(tmp_path, [{**ALPACA, "system": "w30"}, ALPACA], words, "--system", "w32")
    assert [said(one)[0] for one in found] == [(SYSTEM, 30), (SYSTEM, 32)]


def test_the_columns_may_have_other_names_and_be_left_out(tmp_path: Path, words: Path) -> None:
    row = {**ALPACA, "system": "w30", "guide": "w31"}
    (found,) = packed(tmp_path / "a", [row], words, "--column", "system=guide")
    assert said(found)[0] == (SYSTEM, 31)
    (found,) = packed(tmp_path / "b", [row], words, "--column", "system=")
    assert said(found)[0] == (USER, 10)


def test_of_two_system_columns_the_one_that_says_something_counts(tmp_path: Path, words: Path) -> None:
    """As in columnar files, where every record has every column."""
    pairs = [(None, "w30"), ("w30", None), ("", "w30"), ("w30", "w30")]
    rows = [{**ALPACA, "system": one, "system_prompt": other} for one, other in pairs]
    found = packed(tmp_path / "packed", rows, words)
    assert [said(one)[0] for one in found] == [(SYSTEM, 30)] * 4
    both = [{**ALPACA, "system": "w30", "system_prompt": "w31"}]
    told = refused(tmp_path, both, words)
    assert "system and system_prompt say different things; --column system=NAME" in told
    (one,) = packed(tmp_path / "named", both, words, "--column", "system=system_prompt")
    assert said(one)[0] == (SYSTEM, 31)


@pytest.mark.parametrize("history", [[["w11", "w21"], ["w12", "w22"]], turns("w11", "w21", "w12", "w22")])
def test_a_history_comes_before_the_question(tmp_path: Path, words: Path, history: list[Any]) -> None:
    row = {**ALPACA, "system": "w30", "history": history}
    (found,) = packed(tmp_path / "all", [row], words)
    assert said(found) == [
        (SYSTEM, 30),
        *((USER, 11), (ASSISTANT, 21), (USER, 12), (ASSISTANT, 22), (USER, 10), (ASSISTANT, 20)),
    ]
    assert trained(found) == [20]
    for train_on in ("completion", "last"):
        assert packed(tmp_path / train_on, [row], words, "--train-on", train_on) == [found]
    (whole,) = packed(tmp_path / "assistant", [row], words, "--train-on", "assistant")
    as_turns = chat("w11", "w21", "w12", "w22", "w10", "w20", system="w30")
    assert [whole] == packed(tmp_path / "whole", [as_turns], words)
    parts = packed(tmp_path / "expanded", [row], words, "--expand-turns")
    assert parts == [found]


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"prompt": "w10", "completion": "w20"}, [20]),
        ({"prompt": turns("w10"), "completion": turns("w10", "w20")[1:]}, [20]),
        ({"prompt": "w10", "completion": "w20", "label": True}, [20]),
        ({"prompt": "w10", "response": "w20", "advantages": 0.5}, [20]),
        ({"prompt": "w10", "chosen": "w20", "rejected": "w23"}, [20, 23]),
    ],
    ids=["strings", "turns", "judged", "rollout", "pair"],
)
def test_answers_in_a_history_are_context_in_every_format(
    tmp_path: Path, words: Path, row: dict[str, Any], answers: list[int]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    rows = [{**row, "history": [["w11", "w21"]]}]
    found = packed(tmp_path / "packed", rows, words, "--template", str(template))
    assert [said(one)[1] for one in found] == [(ASSISTANT, 21)] * len(answers)
    assert [trained(one) for one in found] == [[answer] for answer in answers]


def test_a_history_beside_whole_conversations_is_none_of_it(tmp_path: Path, words: Path) -> None:
    (found,) = packed(tmp_path, [chat("w10", "w20", history=[["w11", "w21"]])], words)
    assert said(found) == [(USER, 10), (ASSISTANT, 20)]


def test_tools_beside_a_question_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0].name }}{% endif %}"
    words = word_tokenizer(tmp_path / "words", template=template + CHAT)
    assert packed(tmp_path, [{**ALPACA, "tools": '[{"name": "w40"}]'}], words)[0][0][0] == 40


def test_pairs_and_verdicts_have_them_too() -> None:
    """As in orca_dpo_pairs: system, question, chosen, rejected."""
    columns = Columns({})
    question = [{"role": "user", "content": "q"}]
    answers = {"chosen": turns("q", "a")[1:], "rejected": turns("q", "b")[1:]}
    row = {"prompt": question, "system": "s", "history": [["p", "r"]], **answers}
    pair = with_columns(FORMATS["preference"].convert, "preference", [row], columns)(row, columns)
    assert isinstance(pair, Preference)
    for one in (pair.chosen, pair.rejected):
        assert [turn["content"] for turn in one.messages[:4]] == ["s", "p", "r", "q"]
        assert one.first_trained == 4
    row = {"messages": turns("q", "a"), "label": True, "system": "s"}
    rated = with_columns(FORMATS["preference"].convert, "preference", [row], columns)(row, columns)
    assert isinstance(rated, Rated) and rated.example.messages[0]["content"] == "s"
    assert rated.example.first_trained == 2


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [("system_prompt", "w30", "a system text"), ("history", [["w11", "w21"]], "earlier turns")],
)
def test_what_a_string_prompt_has_no_place_for_is_refused(
    tmp_path: Path, words: Path, column: str, value: Any, what: str
) -> None:
    row = {"question": "w10", "response": "w20"}
    told = refused(tmp_path, [{**row, column: value}], words)
    assert f"{column} gives {what}" in told and f"--column {column.partition('_')[0]}=" in told
    assert packed(tmp_path / "empty", [{**row, column: None}, {**row, column: type(value)()}], words)
    bare = word_tokenizer(tmp_path / "bare", template=None)
    told = refused(tmp_path, [{**ALPACA, column: value}], bare)
    assert f"{column} gives {what}" in told


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**ALPACA, "system": ["w30"]}, "system must be text, got list"),
        ({**ALPACA, "history": [["w11"]]}, "history[0] must be a question and its answer, two texts"),
        ({**ALPACA, "history": "w11"}, "history must be a list of turns"),
        ({**ALPACA, "history": [7]}, "--column history= leaves the column out"),
        ({**ALPACA, "history": [{"from": "robot", "value": "w11"}]}, "history[0] is from 'robot'"),
        (
            {**ALPACA, "history": [{"role": "assistant", "content": "w21", "train": False}]},
            "history says what is trained",
        ),
    ],
)
def test_columns_that_cannot_be_are_refused(
    tmp_path: Path, words: Path, row: dict[str, Any], said: str
) -> None:
    assert said in refused(tmp_path, [row], words)
