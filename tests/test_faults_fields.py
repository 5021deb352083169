"""Faults that other packers were reported for: fields, their types and characters, and formats told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from building import built, pack, sequences_of, write_lines
from toys import (
    CHAT,
    END,
    EOS,
    EXAMPLE_IDS,
    byte_tokenizer,
    chat,
    packed,
    packed_file,
    refused,
    targets,
    turns,
    word_tokenizer,
)

from padless.packer.reference import load_reference


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "words")


def text_of(tokenizer: Path, ids: list[int]) -> str:
    text: str = load_reference(str(tokenizer)).decode(ids, skip_special_tokens=False)
    return text


# -- schema --------------------------------------------------------------------------------------------

TOOLS = "{{ tools | tojson if tools }}" + CHAT
_ARGUMENTS = "message.tool_calls[0].function.arguments | tojson"
CALLS = CHAT.replace(
    "+ message['content']", f"+ ({_ARGUMENTS} if message.tool_calls else '') + message['content']"
)


def tool(name: str, parameter: str, kind: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": kind}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet of JSON"])
def test_tools_have_their_own_keys_and_no_others(tmp_path: Path, kind: str) -> None:
    """BR-083: in Parquet a struct has the keys of all rows, null where a row has none."""
    folder = byte_tokenizer(tmp_path / "bytes", template=TOOLS)
    rows = [chat("w10", "w20", tools=[tool("f", "a", "string")])]
    rows += [chat("w11", "w21", tools=[tool("g", "b", "integer")])]
    if kind == "jsonl":
        source = write_lines(tmp_path / "rows.jsonl", rows)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        source = tmp_path / "rows.parquet"
        text = kind == "parquet of JSON"
        stored = [{**row, "tools": json.dumps(row["tools"])} if text else row for row in rows]
        pq.write_table(pa.Table.from_pylist(stored), source)
    found = packed_file(source, tmp_path / "packed", folder, "--max-length", 512)
    for row, (ids, _) in zip(rows, found, strict=True):
        assert json.loads(text_of(folder, ids).split("<|im_start|>")[0]) == row["tools"]


@pytest.mark.parametrize("layout", ["messages", "prompt-completion"])
def test_an_argument_keeps_the_type_it_has_in_its_record(tmp_path: Path, layout: str) -> None:
    """BR-084, BR-089."""
    folder = byte_tokenizer(tmp_path / "bytes", template=CALLS)
    rows: list[dict[str, Any]] = []
    for value in ("2024-01-02", 7, 10**18 + 1, 1.5, None, [1, "x"]):
        function = {"name": "f", "arguments": {"time": value}}
        calls = [{"type": "function", "function": function}]
        asked = turns("w10")
        called = [{"role": "assistant", "content": None, "tool_calls": calls}]
        both = {"prompt": asked, "completion": called}
        rows.append({"messages": asked + called} if layout == "messages" else both)
    found = packed(tmp_path, rows, folder, "--max-length", 512)
    said = [text_of(folder, ids).split("assistant\n")[1].split("<|im_end|>")[0] for ids, _ in found]
    assert said == [
        '{"time": "2024-01-02"}',
        '{"time": 7}',
        '{"time": 1000000000000000001}',
        '{"time": 1.5}',
        '{"time": null}',
        '{"time": [1, "x"]}',
    ]


def test_calls_that_are_null_or_missing_are_the_same(tmp_path: Path) -> None:
    """BR-085."""
    folder = byte_tokenizer(tmp_path / "bytes", template=CALLS)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    answer = {"role": "assistant", "content": "w20"}
    rows = [
        {"messages": [*turns("w10"), message]}
        for message in (answer, {**answer, "tool_calls": None}, {**answer, "tool_calls": calls})
    ]
    missing, null, one = packed(tmp_path, rows, folder, "--max-length", 512)
    assert missing == null
    assert text_of(folder, one[0]) == text_of(folder, null[0]).replace("w20", "{}w20")


def test_text_that_looks_like_a_date_stays_its_characters(tmp_path: Path) -> None:
    """BR-087."""
    folder = byte_tokenizer(tmp_path / "bytes")
    dates = [{"text": "2024-01-02"}] * 3
    found = packed(tmp_path / "a", dates, folder), packed(tmp_path / "b", [*dates, {"text": "word"}], folder)
    for sequences in found:
        assert [text_of(folder, ids) for ids, _ in sequences[:3]] == ["2024-01-02<eos>"] * 3


def test_columns_that_are_not_used_are_not_typed(tmp_path: Path, words: Path) -> None:
    """BR-088."""
    rows: list[dict[str, Any]] = [{"id": str(n), "text": "w10 w11"} for n in range(2000)]
    rows[1500]["id"] = 7
    rows[1900]["late"] = {"new": []}
    assert packed(tmp_path, rows, words) == [([10, 11, EOS], [-100, 11, EOS])] * 2000


@pytest.mark.parametrize("name", ["lines.jsonl", "array.json", "array.jsonl", "lines.json"])
@pytest.mark.parametrize("dressed", [False, True], ids=["plain", "BOM and CRLF"])
def test_an_array_and_lines_are_told_by_what_they_hold(
    tmp_path: Path, words: Path, name: str, dressed: bool
) -> None:
    """BR-090."""
    rows: list[dict[str, Any]] = [chat("w10", "w20"), {**chat("w10", "w20"), "id": 7}, chat("w10", "w20")]
    lines = [json.dumps(row) for row in rows]
    text = "[\n" + ",\n".join(lines) + "\n]\n" if "array" in name else "\n".join(lines) + "\n"
    data = text.encode("utf-8")
    if dressed:
        data = b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")
    (tmp_path / name).write_bytes(data)
    found = packed_file(tmp_path / name, tmp_path / "packed", words)
    assert found == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])] * 3


# -- encoding ------------------------------------------------------------------------------------------


def test_half_a_surrogate_pair_is_replaced_once_and_counted(tmp_path: Path) -> None:
    """BR-091."""
    folder = byte_tokenizer(tmp_path / "bytes")
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "w10 \\ud8a1 w11"}\n')
    summary = built(source, tmp_path / "packed", "--tokenizer", folder)
    assert summary["replaced_surrogates"] == 1
    ((ids, _),) = sequences_of(tmp_path / "packed").values()
    assert text_of(folder, ids) == "w10 \ufffd w11<eos>"


def test_an_escaped_emoji_is_the_emoji(tmp_path: Path) -> None:
    """BR-092."""
    folder = byte_tokenizer(tmp_path / "bytes")
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\U0001f600"}\n', encoding="utf-8")
    one, other = packed_file(source, tmp_path / "packed", folder)
    assert one == other
    assert text_of(folder, one[0]) == "\U0001f600<eos>"


def test_nothing_behind_a_nul_is_lost(tmp_path: Path) -> None:
    """BR-093: it stays a character like any other."""
    folder = byte_tokenizer(tmp_path / "bytes")
    found = packed(tmp_path, [{"text": "w10\0w11 w12"}], folder)
    assert text_of(folder, found[0][0]) == "w10\0w11 w12<eos>"
    (found_chat,) = packed(tmp_path / "chat", [chat("w\0", "w11\0w12")], folder)
    assert text_of(folder, targets([found_chat])[0]) == "w11\0w12<|im_end|>"


@pytest.mark.parametrize("reply", ["\u21f6 w20", "\U0001f600", "e\u0301 \u4e2d"])
def test_all_bytes_of_a_character_are_trained_and_none_of_the_users(tmp_path: Path, reply: str) -> None:
    """BR-094."""
    folder = byte_tokenizer(tmp_path / "bytes")
    (found,) = packed(tmp_path, [chat("\U0001f600 \u4e2d", reply)], folder)
    assert text_of(folder, targets([found])[0]) == reply + "<|im_end|>"
    trained = [place for place, label in enumerate(found[1]) if label != -100]
    assert len(trained) == len(reply.encode("utf-8")) + 1


def test_calls_that_a_template_would_not_write_are_refused(tmp_path: Path, words: Path) -> None:
    """Beside BR-060, BR-085."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    row = {"messages": [*turns("w10"), {"role": "assistant", "content": None, "tool_calls": calls}]}
    for options in ((), ("--template", "chatml"), ("--template", "llama3")):
        said = refused(tmp_path, [row], words, *options)
        assert "messages[1] calls tools" in said and "--template FILE" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[1] calls tools"),
        ({"tool_calls": "f()"}, "messages[1].tool_calls must be a list of calls, got str"),
        ({"tool_calls": [{"type": "function"}]}, "messages[1].tool_calls[0] must be an object with the name"),
        ({"reasoning": ["w30"]}, "messages[1]'s reasoning[0] is str"),
        ({"reasoning_content": 5}, "messages[1]'s reasoning must be text"),
        ({"role": 5}, "messages[1].role must be text, got int"),
    ],
)
def test_what_a_template_would_pass_over_in_an_answer_is_refused(
    tmp_path: Path, words: Path, answer: dict[str, Any], said: str
) -> None:
    row = {"messages": [*turns("w10"), {"role": "assistant", "content": "w20"} | answer]}
    assert said in refused(tmp_path, [row], words)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**chat("w10", "w20"), "tools": [7]}, "tools must be a list of objects"),
        ({**chat("w10", "w20"), "tools": "7"}, "tools must be a list of objects"),
        ({"conversations": [{"from": "gpt", "value": "w20"}], "system": ["w30"]}, "system must be text"),
        (
            {"messages": [{"role": "user", "content": "w10", "tool_calls": [{"name": "f"}]}, *turns("w10")]},
            "messages[0].tool_calls are of a turn of user",
        ),
    ],
)
def test_what_stands_where_no_template_reads_it_is_refused(
    tmp_path: Path, words: Path, row: dict[str, Any], said: str
) -> None:
    assert said in refused(tmp_path, [row], words)


# -- content parts, and formats that are told apart ----------------------------------------------------


def test_parts_of_text_are_put_together(tmp_path: Path, words: Path) -> None:
    parts = [{"type": "text", "text": "w1"}, {"type": "text", "text": "0"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "w20"}]}
    assert packed(tmp_path, [row], words) == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "text", "text": "w10"}, {"type": "audio", "audio": "x.wav"}], "[1] is of type 'audio'"),
        ([{"type": "text"}], "content[0]"),
        (["w10"], "content[0] is str"),
        ({"answer": 1}, "an object with answer"),
        (7, "got int"),
    ],
)
def test_content_that_is_no_text_is_refused_never_lost(
    tmp_path: Path, words: Path, content: Any, said: str
) -> None:
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "w20"}]}
    message = refused(tmp_path, [row], words)
    assert said in message and "messages[0].content" in message


@pytest.mark.parametrize(
    ("row", "either"),
    [
        ({**chat("w10", "w20"), "prompt": "w10", "completion": "w20"}, "messages or prompt-completion"),
        ({**chat("w10", "w20"), "instruction": "w10", "output": "w20"}, "messages or alpaca"),
        ({**chat("w10", "w20"), "conversations": [{"from": "gpt", "value": "w20"}]}, "messages or sharegpt"),
        ({"instruction": "w10", "output": "w20", "question": "w10", "answer": "w20"}, "alpaca or prompt"),
    ],
)
def test_columns_that_fit_two_formats_are_refused_and_listed(
    tmp_path: Path, words: Path, row: dict[str, Any], either: str
) -> None:
    said = refused(tmp_path, [row], words)
    assert either in said and ", ".join(row) in said and "--format" in said
    name = either.split()[0]
    assert targets(packed(tmp_path, [row], words, "--format", name)) == [[20, END]]


def test_pairs_of_answers_are_not_taken_for_something_else(tmp_path: Path, words: Path) -> None:
    asked = [{"from": "human", "value": "w10"}]
    row = {"conversations": asked, "chosen": {"from": "gpt", "value": "w20"}, "rejected": {"from": "gpt"}}
    said = refused(tmp_path, [row], words)
    assert "rejected[0] must have from and value" in said
    options = ("--column", "prompt=conversations", "--column", "completion=chosen")
    assert targets(packed(tmp_path, [row], words, *options)) == [[20, END]]


def test_columns_that_are_empty_do_not_make_a_format_doubtful(tmp_path: Path, words: Path) -> None:
    row = {**chat("w10", "w20"), "conversations": None, "prompt": "", "completion": ""}
    assert targets(packed(tmp_path, [row], words)) == [[20, END]]


def test_what_a_source_was_taken_for_is_printed_with_its_columns(tmp_path: Path, words: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"instruction": "w10", "response": "w20", "id": 7}])
    options = ("--tokenizer", words, "--max-length", 64, "--output", tmp_path / "packed")
    run = pack("build", source, *options)
    assert run.code == 0, run.err
    assert "rows.jsonl: alpaca (columns: instruction, response, id)" in run.out
