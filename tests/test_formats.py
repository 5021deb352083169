"""Record formats: what each makes of a row, how it is detected, and that nothing but RecordError comes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer.errors import InputError, RecordError
from padless.packer.formats import FORMATS, MIXED, alpaca, detect
from padless.packer.formats.examples import Chat, Columns, Converted, Example, Pair, Rollout, Text, Tokens

USUAL = Columns({})


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return answer("", tool_calls=calls)


CONVERTED: list[tuple[str, dict[str, Any], Example]] = [
    ("alpaca", {"instruction": "I", "input": "", "output": "O"}, Chat([user("I"), answer("O")])),
    ("alpaca", {"instruction": "I", "input": "in", "output": "O"}, Chat([user("I\n\nin"), answer("O")])),
    ("alpaca", {"instruction": "I", "input": None, "output": None}, Chat([user("I"), answer("")])),
    ("alpaca", {"instruction": "I", "response": "O"}, Chat([user("I"), answer("O")])),
    ("messages", {"messages": [user("q"), answer("a")]}, Chat([user("q"), answer("a")])),
    (
        "messages",
        {"messages": [{"role": "user", "content": "q", "name": None}, answer("a", tool_calls=None)]},
        Chat([user("q"), answer("a")]),
    ),
    ("messages", {"messages": [user("q")], "tools": []}, Chat([user("q")])),
    ("messages", {"messages": [user("q")], "tools": " "}, Chat([user("q")])),
    ("messages", {"messages": [user("q")], "tools": '[{"name": "f"}]'}, Chat([user("q")], [{"name": "f"}])),
    ("messages", {"messages": [user("q")], "tools": {"name": "f"}}, Chat([user("q")], [{"name": "f"}])),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "Human ", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "r"},
                {"from": "gpt", "value": None},
            ]
        },
        Chat(
            [
                {"role": "system", "content": "s"},
                user("q"),
                call("f", {"x": 1}),
                {"role": "tool", "content": "r"},
                answer(""),
            ]
        ),
    ),
    ("sharegpt", {"conversation": [user("q"), answer("a")]}, Chat([user("q"), answer("a")])),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "function_call", "value": "no JSON"},
                {"from": "tool_call", "value": "[1]"},
                {"from": "tool_call", "value": '{"name": null}'},
            ]
        },
        Chat([answer("no JSON"), answer("[1]"), answer('{"name": null}')]),
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "tool_call", "value": '{"name": "f", "parameters": {"x": 1}}'}]},
        Chat([call("f", {"x": 1})]),
    ),
    ("sharegpt", {"conversations": [{"from": "tool_call", "value": '{"name": "f"}'}]}, Chat([call("f", {})])),
    (
        "sharegpt",
        {
            "conversations": [
                {
                    "from": "function_call",
                    "value": '{"name": "f", "arguments": {"n": -9999999999999999999, "s": "\\ud800"}}',
                }
            ],
            "tools": '[{"name": "f", "default": 123456789012345678901}]',
        },
        Chat(
            [call("f", {"n": -9999999999999999999, "s": "\ufffd"})],
            [{"name": "f", "default": 123456789012345678901}],
        ),
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "tool", "value": "q"}, {"from": "GPT", "value": "a"}]},
        Chat([{"role": "tool", "content": "q"}, answer("a")]),
    ),
    ("prompt-completion", {"prompt": "p", "completion": "c"}, Pair("p", "c")),
    ("prompt-completion", {"question": "p", "answer": None}, Pair("p", "")),
    (
        "prompt-completion",
        {"prompt": [user("q"), answer("a"), user("r")], "completion": [answer("b")]},
        Chat([user("q"), answer("a"), user("r"), answer("b")], None, 3),
    ),
    (
        "prompt-completion",
        {"prompt": "q", "completion": {"from": "gpt", "value": "b"}},
        Chat([user("q"), answer("b")], None, 1),
    ),
    (
        "prompt-completion",
        {"prompt": [user("q")], "completion": "b"},
        Chat([user("q"), answer("b")], None, 1),
    ),
    ("text", {"text": "t", "url": "u"}, Text("t")),
    ("text", {"content": None}, Text("")),
    (
        "rollout",
        {"prompt_ids": [1], "response_ids": [2], "reward": 3, "group_id": 4},
        Rollout(Tokens([1, 2], [-100, 2]), {}, 3.0, 4),
    ),
    ("tokenized", {"input_ids": [1, 2]}, Tokens([1, 2], None)),
    ("tokenized", {"input_ids": [1, 2], "labels": [-100, 2]}, Tokens([1, 2], [-100, 2])),
    ("tokenized", {"input_ids": [1, 2], "labels": None, "loss_mask": [0, 1]}, Tokens([1, 2], [-100, 2])),
    ("tokenized", {"input_ids": [1, 2], "assistant_masks": [True, False]}, Tokens([1, 2], [1, -100])),
]


@pytest.mark.parametrize(("name", "row", "expected"), CONVERTED)
def test_a_row_becomes(name: str, row: dict[str, Any], expected: Example) -> None:
    assert FORMATS[name].matches(row, USUAL)
    assert FORMATS[name].convert(row, USUAL) == expected


@pytest.mark.parametrize(("name", "row", "expected"), CONVERTED)
def test_a_row_is_told_by_its_columns(name: str, row: dict[str, Any], expected: Example) -> None:
    assert detect(row, USUAL, "here") == name


def test_every_format_is_tried_here() -> None:
    assert {name for name, _, _ in CONVERTED} == set(FORMATS) - {"preference"}, "see test_preference.py"
    kinds = {name: {type(example) is Chat for n, _, example in CONVERTED if n == name} for name in FORMATS}
    assert {name for name, found in kinds.items() if len(found) == 2} == MIXED - {"preference", "rollout"}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("alpaca", {"instruction": "I", "text": "t"}, "no column output or response.*the record has: instr"),
        ("alpaca", {"instruction": 3, "output": "O"}, "instruction must be text, got int"),
        ("alpaca", {"instruction": "I", "input": [], "output": "O"}, "input must be text, got list"),
        ("messages", {}, "no column messages; the record has: none"),
        ("messages", {"messages": []}, "messages must be a list of turns, got an empty list"),
        ("messages", {"messages": "q"}, "messages must be a list of turns, got str"),
        (
            "messages",
            {"messages": [{"content": "q"}]},
            r"messages\[0\] must have a role.*an object with content",
        ),
        (
            "messages",
            {"messages": [user("q"), None]},
            r"messages\[1\] must have a role and a content, got null",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": None}]},
            r"messages\[0\] \(user\) has no content",
        ),
        ("messages", {"messages": [user("q")], "tools": "[{"}, "tools is not valid JSON"),
        (
            "sharegpt",
            {"conversations": [{"from": "nobody", "value": "x"}]},
            "is from 'nobody'; known are human",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "gpt", "value": 1}]},
            r"\[0\].value must be text .*, got int",
        ),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, r"conversations\[0\] must have from and value"),
        ("prompt-completion", {"prompt": "p"}, "no column completion or answer or response"),
        ("prompt-completion", {"prompt": [user("q")], "completion": [user("r")]}, "has no assistant turn"),
        ("text", {"text": 1}, "text must be text, got int"),
        ("tokenized", {"input_ids": [1, "2"]}, "input_ids must be a list of integers"),
        ("tokenized", {"input_ids": [1, True]}, "input_ids must be a list of integers"),
        ("tokenized", {"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\] is 2 where input_ids has 1"),
        ("tokenized", {"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries for 2 input_ids"),
        ("tokenized", {"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries for 2 input_ids"),
        *(
            ("tokenized", {"input_ids": [1, 2], name: [1, 1, 1]}, f"{name} has 3 entries for 2 input_ids")
            for name in ("attention_mask", "special_tokens_mask", "segment_ids", "seq_idx")
        ),
        ("tokenized", {"input_ids": [1, 2], "position_ids": [0]}, "position_ids has 1 entries for 2"),
        ("tokenized", {"input_ids": [1, 2], "loss_mask": 1}, "loss_mask must be a list of 0 and 1"),
        ("tokenized", {"input_ids": [1, 2], "loss_mask": [0.5, 1]}, "loss_mask must be a list of 0 and 1"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_naming_the_column(
    name: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        FORMATS[name].convert(row, USUAL)


_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.floats(0, 1), st.text('ab{}[]"', max_size=6)
)
_keys = st.sampled_from(
    [
        "role",
        "content",
        "from",
        "value",
        "name",
        "arguments",
        "tool_calls",
        "reasoning",
        "user",
        "assistant",
        "gpt",
    ]
)
_values = st.recursive(
    st.one_of(_leaves, st.sampled_from(["user", "assistant", "gpt", "human", "function_call"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_keys, inner, max_size=3)),
    max_leaves=8,
)
_columns = st.sampled_from(
    [
        "messages",
        "conversations",
        "instruction",
        "input",
        "output",
        "prompt",
        "completion",
        "answer",
        "system",
    ]
    + [
        "chosen",
        "rejected",
        "label",
        "text",
        "content",
        "tools",
        "input_ids",
        "labels",
        "loss_mask",
        "completion_mask",
    ]
)


@settings(max_examples=300, deadline=None)
@given(row=st.dictionaries(_columns, _values, max_size=5))
def test_any_row_is_converted_or_refused_with_a_reason(row: dict[str, Any]) -> None:
    try:
        name = detect(row, USUAL, "here")
    except InputError as error:
        assert "--format" in str(error)
    else:
        assert FORMATS[name].matches(row, USUAL)
    for one in FORMATS.values():
        try:
            example = one.convert(row, USUAL)
        except RecordError as error:
            assert str(error)
        else:
            assert isinstance(example, Converted)


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_goes_by_the_names_that_templates_read(name: str) -> None:
    (turn,) = FORMATS["messages"].convert({"messages": [answer("a", **{name: "why"})]}, USUAL).messages
    assert turn["reasoning_content"] == turn["thinking"] == "why"
    parts = [{"type": "text", "text": "w"}, {"type": "text", "text": "hy"}]
    (turn,) = FORMATS["messages"].convert({"messages": [answer("a", **{name: parts})]}, USUAL).messages
    assert turn["reasoning_content"] == turn["thinking"] == "why"


@pytest.mark.parametrize("more", [{}, {"train": True}])
def test_a_call_that_would_lose_its_arguments_is_refused(more: dict[str, Any]) -> None:
    turn = {"from": "function_call", "value": '{"name": "f", "args": {"x": 1}}', **more}
    with pytest.raises(RecordError, match=r"conversations\[0\] is a call of f with args and no arguments"):
        FORMATS["sharegpt"].convert({"conversations": [turn]}, USUAL)


def test_calls_beside_from_and_value_are_kept() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    turn = {"from": "gpt", "value": None, "tool_calls": calls}
    (found,) = FORMATS["sharegpt"].convert({"conversations": [turn]}, USUAL).messages
    assert found == {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (
            {"instruction": "Do {input}", "input": "{x}", "output": "O"},
            "Do {input}\n\n### Input:\n{x}\n\n### Resp",
        ),
        ({"instruction": "Do {input}", "input": "", "output": "O"}, "Do {input}\n\n### Response:\n"),
    ],
)
def test_classic_prompts_take_braces_in_the_data_as_text(row: dict[str, Any], prompt: str) -> None:
    found = alpaca.classic(row, USUAL)
    assert prompt in found.prompt
    assert found.completion == "O"


def test_a_named_column_plays_its_role_and_no_other_does() -> None:
    columns = Columns({"prompt": "ask", "completion": "say"})
    row = {"ask": "q", "say": "a", "prompt": "not this", "completion": "nor this"}
    assert detect(row, columns, "here") == "prompt-completion"
    assert FORMATS["prompt-completion"].convert(row, columns) == Pair("q", "a")
    with pytest.raises(RecordError, match="no column say"):
        FORMATS["prompt-completion"].convert({"ask": "q", "completion": "a"}, columns)


def test_rows_of_other_columns_are_told_apart_one_by_one() -> None:
    columns = Columns({})
    rows = [
        {"instruction": "a", "output": "b"},
        {"question": "a", "answer": "b"},
        {"query": "a", "output": "b"},
    ]
    assert [alpaca.convert(row, columns) for row in rows * 2] == [Chat([user("a"), answer("b")])] * 6


def test_lines_of_text_are_text() -> None:
    assert detect("a line", USUAL, "here") == "text"
    assert FORMATS["text"].convert("a line", USUAL) == Text("a line")


def test_columns_that_fit_no_format_are_listed_with_the_way_out() -> None:
    with pytest.raises(
        InputError, match=r"here: cannot tell .* \(a, b\); name it with --format \(preference,"
    ):
        detect({"a": 1, "b": 2}, USUAL, "here")
