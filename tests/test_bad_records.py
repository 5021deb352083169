"""What does not fit is named by file, row and field, or dropped and counted; and what `auto` decides."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from building import assert_verified, sequence_table
from toys import CHAT, END, chat, packed, refused, targets, turns, word_tokenizer

from padless.packer.errors import InputError
from padless.packer.formats import FORMATS, detect
from padless.packer.formats.examples import Chat, Columns, Pair

ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHAT
)
MARKED = CHAT.replace(
    "+ message['content'] + '<|im_end|>\\n' }}",
    "}}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
)

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown role": (
        CHAT,
        {"messages": [*turns("w10"), {"role": "narrator", "content": "w11"}]},
        "messages[1] has the role 'narrator', which neither padless nor the chat template knows",
    ),
    "an unknown sender": (
        CHAT,
        {"conversations": [{"from": "human", "value": "w10"}, {"from": "narrator", "value": "w11"}]},
        "conversations[1] is from 'narrator'; known are human",
    ),
    "a turn order that the template refuses": (
        ALTERNATING,
        {"messages": [*turns("w10"), *turns("w11", "w20")]},
        "the chat template refuses it: roles must alternate",
    ),
    "a message without content": (
        CHAT,
        {"messages": [*turns("w10"), {"role": "assistant"}]},
        "messages[1] (assistant) has no content",
    ),
    "a variable that the template needs": (
        MARKED.replace("'<|im_end|>' }}", "'<|im_end|>' }}{{ who.name if message['content'] == 'w66' }}"),
        chat("w66", "w66"),
        "the chat template refuses it: 'who' is undefined",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_file_row_and_field_are_named(tmp_path: Path, case: str) -> None:
    template, row, said = BAD[case]
    words = word_tokenizer(tmp_path / "words", template=template)
    good = {"conversations": chat("w10", "w20")["messages"]} if "conversations" in row else chat("w10", "w20")
    message = refused(tmp_path, [good, good, row], words)
    assert f"rows.jsonl, record 2 (line 3): {said}" in message
    assert "--on-bad-record drop" in message


@pytest.mark.parametrize("case", BAD)
def test_such_a_record_is_dropped_and_counted_where_that_is_asked_for(tmp_path: Path, case: str) -> None:
    template, row, _ = BAD[case]
    words = word_tokenizer(tmp_path / "words", template=template)
    good = {"conversations": chat("w10", "w20")["messages"]} if "conversations" in row else chat("w10", "w20")
    found = packed(tmp_path, [good, row, good], words, "--on-bad-record", "drop")
    assert [END in trained for trained in targets(found)] == [True, True]
    assert sequence_table(tmp_path / "packed")["reason"] == [None, "malformed", None]
    assert_verified(tmp_path / "packed")


def test_a_template_with_a_syntax_error_is_named_with_the_line(tmp_path: Path) -> None:
    words = word_tokenizer(tmp_path / "words")
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    message = refused(tmp_path, [chat("w10", "w20")], words, "--template", template)
    assert "broken.jinja, line 2: unexpected '}'" in message


# -- what `auto` makes of the names in use -------------------------------------------------------------

QUESTIONS = ("instruction", "prompt", "question", "query")
ANSWERS = ("output", "response", "answer", "completion")


@pytest.mark.parametrize(("question", "answer"), list(product(QUESTIONS, ANSWERS)))
def test_names_for_a_question_and_its_answer_mean_the_same(question: str, answer: str) -> None:
    row = {question: "q", answer: "a"}
    name = detect(row, Columns({}), "here")
    assert name == ("alpaca" if question == "instruction" else "prompt-completion")
    expected = Chat(turns("q", "a")) if name == "alpaca" else Pair("q", "a")
    assert FORMATS[name].convert(row, Columns({})) == expected


MESSAGES = chat("w10", "w20")
ORDERED: list[tuple[str, dict[str, Any]]] = [
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    ("tokenized", {"input_ids": [1, 2]}),
]


@pytest.mark.parametrize("number", range(len(ORDERED)))
def test_the_more_specific_format_goes_first(number: int) -> None:
    name, columns = ORDERED[number]
    row = {**MESSAGES, "text": "t"}
    for _, more in reversed(ORDERED[number:]):
        row |= more
    assert detect(row, Columns({}), "here") == name


def test_two_names_for_one_role_are_taken_in_their_order_or_as_named() -> None:
    row = {"question": "q", "answer": "a", "completion": "c"}
    assert FORMATS["prompt-completion"].convert(row, Columns({})) == Pair("q", "c")
    named = Columns({"completion": "answer"})
    assert detect(row, named, "here") == "prompt-completion"
    assert FORMATS["prompt-completion"].convert(row, named) == Pair("q", "a")


@pytest.mark.parametrize("column", ["rewards", "advantages", "old_logprobs", "completions"])
def test_rollouts_are_refused_with_what_they_look_like(column: str) -> None:
    with pytest.raises(InputError, match="look like rollouts .* not one answer a record"):
        detect({**MESSAGES, column: [1.0]}, Columns({}), "here")
