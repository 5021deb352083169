"""Faults that other packers were reported for: records, their roles and their lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from building import build, sequence_table
from toys import (
    ASSISTANT,
    CHAT,
    END,
    EOS,
    EXAMPLE_IDS,
    NEWLINE,
    START,
    SYSTEM,
    USER,
    chat,
    fates,
    packed,
    packed_file,
    refused,
    targets,
    turns,
    word_tokenizer,
)

from padless.packer.reference import load_reference
from padless.runtime.format import read_manifest


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "words")


def text_of(tokenizer: Path, ids: list[int]) -> str:
    text: str = load_reference(str(tokenizer)).decode(ids, skip_special_tokens=False)
    return text


# -- injection -----------------------------------------------------------------------------------------


def test_a_control_token_that_a_user_spells_stays_text(tmp_path: Path, words: Path) -> None:
    """BR-061."""
    rows = [chat("w10 <|im_end|> w11", "w20")]
    (found,) = packed(tmp_path / "a", rows, words)
    assert found[0].count(END) == 2
    assert targets([found]) == [[20, END]]
    (found,) = packed(tmp_path / "b", rows, words, "--allow-special")
    assert found[0].count(END) == 3


def test_markup_in_a_document_ends_nothing(tmp_path: Path, words: Path) -> None:
    """BR-062."""
    (found,) = packed(tmp_path, [{"text": "w10 <eos> w11"}], words)
    assert found[0].count(EOS) == 1 and found[0][-1] == EOS
    assert found[0][0] == 10 and found[0][-2] == 11


def test_a_control_token_in_the_data_stops_nothing(tmp_path: Path, words: Path) -> None:
    """BR-063."""
    rows = [chat("w10", "w20"), chat("<|im_start|>", "w21"), chat("w12", "w22")]
    found = packed(tmp_path, rows, words)
    assert targets(found) == [[20, END], [21, END], [22, END]]
    assert [ids.count(START) for ids, _ in found] == [2, 2, 2]


# -- roles ---------------------------------------------------------------------------------------------


def test_senders_are_known_by_name_whatever_their_case(tmp_path: Path, words: Path) -> None:
    """BR-064."""
    rows = [
        {"conversations": [{"from": "User", "value": "w10"}, {"from": "assistant", "value": "w20"}]},
        {"messages": [{"role": "Human", "content": "w10"}, {"role": "GPT", "content": "w20"}]},
        {"conversations": [{"from": "human", "value": "w11"}, {"from": "narrator", "value": "w21"}]},
    ]
    said = refused(tmp_path, rows[2:], words)
    assert "conversations[1]" in said and "'narrator'" in said and "line 1" in said
    assert packed(tmp_path / "a", rows[1:2], words) == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])]
    found = packed(tmp_path / "b", [rows[0], rows[2]], words, "--on-bad-record", "drop")
    assert found == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])]
    assert fates(tmp_path / "b" / "packed") == [("whole", None), ("dropped", "malformed")]


def test_a_role_that_neither_we_nor_the_template_know_is_refused(tmp_path: Path, words: Path) -> None:
    """BR-064, in the other layout; a role that the template names is its own affair."""
    rows = [{"messages": [*turns("w10", "w20"), {"role": "narrator", "content": "w30"}]}]
    said = refused(tmp_path, rows, words)
    assert "messages[2]" in said and "'narrator'" in said and "line 1" in said
    template = CHAT.replace(
        "message['role'] +", "('system' if message.role == 'narrator' else message.role) +"
    )
    folder = word_tokenizer(tmp_path / "other", template=template)
    (found,) = packed(tmp_path, rows, folder)
    assert found[0] == [*EXAMPLE_IDS, START, SYSTEM, NEWLINE, 30, END, NEWLINE]


@pytest.mark.parametrize("role", ["developer", "function", "ipython", "content"])
def test_a_turn_of_which_the_template_writes_nothing_is_refused(tmp_path: Path, role: str) -> None:
    """Beside BR-064: many templates pass over the roles that they do not name, as Qwen3's does."""
    template = CHAT.replace("messages %}", "messages if message['role'] in ('user', 'assistant') %}")
    folder = word_tokenizer(tmp_path / "few", template=template)
    rows = [
        {"messages": [{"role": role, "content": "w30"}, *turns("w10", "w20")]},
        {"messages": [*turns("w10", "w20"), {"role": role, "content": "w30"}]},
    ]
    for place, row in zip((0, 2), rows, strict=True):
        said = refused(tmp_path, [chat("w10", "w20"), row], folder)
        assert f"messages[{place}] has the role '{role}'" in said and "line 2" in said
        first = template.replace("in ('user'", f"in ('{role}', 'user'")
        assert packed(tmp_path / role / str(place), [row], word_tokenizer(tmp_path / "all", template=first))
    dropping = ("--on-bad-record", "drop", "--max-drop-share", 1)
    found = packed(tmp_path / "drop", [chat("w10", "w20"), *rows], folder, *dropping)
    assert found == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])]


@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize("first", ["from", "role"])
def test_two_ways_of_naming_keys_may_meet_in_one_record(
    tmp_path: Path, words: Path, column: str, first: str
) -> None:
    """BR-065."""
    mixed: list[dict[str, Any]] = [{"from": "human", "value": "w10"}, {"role": "assistant", "content": "w20"}]
    if first == "role":
        mixed = [{"role": "user", "content": "w10"}, {"from": "gpt", "value": "w20"}]
    found = packed(tmp_path, [{column: mixed}], words)
    assert found == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])]


def test_all_turns_survive_and_the_system_field_leads(tmp_path: Path, words: Path) -> None:
    """BR-066."""
    senders = ["human", "gpt"] * 2
    values = ["w10", "w20", "w11", "w21"]
    conversations = [{"from": f, "value": v} for f, v in zip(senders, values, strict=True)]
    (found,) = packed(tmp_path, [{"system": "w30", "conversations": conversations}], words)
    assert found[0][0::6] == [START] * 5
    assert found[0][1::6] == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    assert found[0][3::6] == [30, 10, 20, 11, 21]
    assert targets([found]) == [[20, END, 21, END]]


# -- row-loss ------------------------------------------------------------------------------------------


def ids_rows(*lengths: int) -> list[dict[str, list[int]]]:
    """Tokenized records of so many tokens, with ids from 10 on."""
    found, first = [], 10
    for length in lengths:
        found.append({"input_ids": list(range(first, first + length))})
        first += length
    return found


def test_what_lies_beyond_the_limit_is_kept_or_counted(tmp_path: Path, words: Path) -> None:
    """BR-068."""
    rows = ids_rows(7, 2, 4, 1)
    found = packed(
        tmp_path / "a", rows, words, "--max-length", 4, "--overflow", "split", "--max-drop-share", 1
    )
    assert sum(len(ids) for ids, _ in found) == 13
    assert fates(tmp_path / "a" / "packed")[-1] == ("dropped", "no-targets")  # nothing predicts a lone token
    manifest = read_manifest(tmp_path / "a" / "packed")
    assert manifest.options["overflow"] == "split"
    found = packed(tmp_path / "b", rows, words, "--max-length", 4, "--overflow", "truncate")
    assert sum(len(ids) for ids, _ in found) == 10
    assert read_manifest(tmp_path / "b" / "packed").statistics["cut_by_reason"]["too-long"] == 3


def test_no_sequence_begins_in_mid_conversation(tmp_path: Path, words: Path) -> None:
    """BR-069."""
    rows = [chat("w10 w11 w12 w13", "w20"), chat("w10", "w20")]
    assert "--overflow split is for text" in refused(tmp_path, rows, words, "--overflow", "split")
    for overflow in ("drop", "truncate"):
        found = packed(tmp_path / overflow, rows, words, "--max-length", 12, "--overflow", overflow)
        assert [ids for ids, _ in found] == [EXAMPLE_IDS]


@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
def test_the_same_sequences_survive_packed_and_unpacked(tmp_path: Path, words: Path, overflow: str) -> None:
    """BR-070."""
    options = ("--max-length", 8, "--overflow", overflow)
    one, other = (
        packed(tmp_path / strategy, ids_rows(5, 12), words, *options, "--strategy", strategy)
        for strategy in ("bfd", "none")
    )
    assert one == other


def test_long_documents_are_split_not_filtered(tmp_path: Path, words: Path) -> None:
    """BR-071, BR-073."""
    options = ("--max-length", 8, "--overflow", "split")
    found = packed(tmp_path, ids_rows(20, 3), words, *options)
    assert [len(ids) for ids, _ in found] == [8, 8, 4, 3]
    said = refused(tmp_path, [chat("w10", "w20")], words, "--max-length", 8)
    assert "12 tokens" in said and "max_length is 8" in said


@pytest.mark.parametrize(("overflow", "lengths"), [("drop", [8]), ("truncate", [8, 8])])
def test_one_long_record_follows_the_policy(
    tmp_path: Path, words: Path, overflow: str, lengths: list[int]
) -> None:
    """BR-072."""
    said = refused(tmp_path, ids_rows(8, 9), words, "--max-length", 8)
    assert "record 1 (line 2)" in said and "9 tokens" in said and "max_length is 8" in said
    found = packed(tmp_path, ids_rows(8, 9), words, "--max-length", 8, "--overflow", overflow)
    assert [len(ids) for ids, _ in found] == lengths
    assert fates(tmp_path / "packed")[1] == (
        {"drop": "dropped", "truncate": "truncated"}[overflow],
        "too-long",
    )


def test_no_hidden_limit_lies_below_the_one_that_was_asked_for(tmp_path: Path, words: Path) -> None:
    """BR-074."""
    rows = [{"text": " ".join(["w10"] * 2999)}]
    (found,) = packed(tmp_path, rows, words, "--max-length", 4096)
    assert len(found[0]) == 3000
    assert read_manifest(tmp_path / "packed").options["max_length"] == 4096


def test_splitting_loses_no_token_to_a_begin_token(tmp_path: Path) -> None:
    """BR-075: the begin token stands once, where the document begins."""
    folder = word_tokenizer(tmp_path / "words", begin="<bos>")
    rows = [{"text": " ".join(f"w{n}" for n in range(10, 25))}]
    found = packed(tmp_path, rows, folder, "--max-length", 5, "--overflow", "split")
    assert [token for ids, _ in found for token in ids] == [1, *range(10, 25), EOS]


def test_a_newline_more_in_the_generation_prompt_loses_no_record(tmp_path: Path) -> None:
    """BR-076: right masks for all, or one message for all; and drops above a share are an error."""
    template = CHAT.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n\\n' }}")
    folder = word_tokenizer(tmp_path / "words", template=template)
    rows = [chat(f"w{n}", "w20") for n in range(10, 20)]
    assert targets(packed(tmp_path, rows, folder)) == [[20, END]] * 10
    rows[3] = {"messages": []}
    options = ("--on-bad-record", "drop", "--max-drop-share", 0.01)
    assert "1 malformed" in refused(tmp_path, rows, folder, *options)


def test_a_cap_on_sequences_is_kept_and_a_misspelt_one_is_an_error(tmp_path: Path, words: Path) -> None:
    """BR-077."""
    packed(tmp_path, ids_rows(*[2] * 6), words, "--max-length", 16, "--max-sequences-per-pack", 2)
    assert sorted(sequence_table(tmp_path / "packed")["pack"]) == [0, 0, 1, 1, 2, 2]
    run = build(tmp_path / "rows.jsonl", tmp_path / "x", "--tokenizer", words, "--max-sequence-per-pack", 2)
    assert run.code == 2 and "--max-sequence-per-pack" in run.err


# -- empty-row -----------------------------------------------------------------------------------------


def test_an_empty_reply_is_kept_and_counted_or_dropped_when_asked(tmp_path: Path, words: Path) -> None:
    """BR-078."""
    rows = [{"instruction": "w10", "output": ""}, {"instruction": "w11", "output": "w20"}]
    assert targets(packed(tmp_path / "a", rows, words)) == [[END], [20, END]]
    assert read_manifest(tmp_path / "a" / "packed").statistics["empty_replies"] == 1
    assert targets(packed(tmp_path / "b", rows, words, "--on-empty-reply", "drop")) == [[20, END]]
    assert fates(tmp_path / "b" / "packed") == [("dropped", "empty-reply"), ("whole", None)]


def test_empty_texts_are_counted_and_in_no_pack(tmp_path: Path, words: Path) -> None:
    """BR-079."""
    rows = [{"text": ""}, {"text": "w10"}, {"text": "   "}]
    found = packed(tmp_path, rows, words, "--eos", "none", "--bos", "<bos>")
    assert [ids for ids, _ in found] == [[1, 10]]
    from padless.runtime.reader import PackedReader

    assert all((one.seq_lengths > 0).all() for one in PackedReader(tmp_path / "packed"))
    assert [status for status, _ in fates(tmp_path / "packed")] == ["dropped", "whole", "dropped"]


def test_null_empty_and_missing_are_the_same(tmp_path: Path, words: Path) -> None:
    """BR-080."""
    row = {"instruction": "w10", "output": "w20"}
    found = packed(tmp_path, [{**row, "input": None}, {**row, "input": ""}, row], words)
    assert found == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])] * 3


def test_a_blank_cell_is_empty_never_a_word(tmp_path: Path) -> None:
    """BR-081."""
    folder = word_tokenizer(tmp_path / "words", words=("None", "nan", "null"))
    source = tmp_path / "rows.csv"
    source.write_text("instruction,input,output\nw10,,w20\nw11,w12,\n")
    one, other = packed_file(source, tmp_path / "a", folder)
    assert one == (EXAMPLE_IDS, [-100] * 9 + [20, END, -100])
    assert targets([other]) == [[END]] and max(other[0]) < 100
    assert read_manifest(tmp_path / "a").statistics["empty_replies"] == 1
    assert packed_file(source, tmp_path / "b", folder, "--on-empty-reply", "drop") == [one]


def test_where_nothing_survives_the_reasons_are_told(tmp_path: Path, words: Path) -> None:
    """BR-082."""
    rows: list[Any] = [{"messages": []}, {"messages": turns("w10")}]
    said = refused(tmp_path, rows, words, "--format", "messages", "--on-bad-record", "drop", "--workers", 2)
    assert "2 records" in said and "1 malformed" in said and "1 no-targets" in said
