"""Faults that other packers were reported for: what is trained, and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from building import built, sequence_table, sequences_of, write_lines
from toys import (
    CHAT,
    END,
    EOS,
    EXAMPLE_IDS,
    byte_tokenizer,
    chat,
    fates,
    packed,
    refused,
    targets,
    turns,
    word_tokenizer,
)

from padless.packer.reference import load_reference

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "words")


# -- label-shift: what a folder holds for targets ------------------------------------------------------


def joined(folder: Path) -> tuple[list[int], list[int]]:
    """Ids and shifted targets of the only pack."""
    from padless.runtime.reader import PackedReader

    (pack,) = PackedReader(folder)
    return pack.input_ids.tolist(), [*pack.labels[1:].tolist(), -100]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"input_ids": [10, 11]}, {"input_ids": [20, 21, 22]}], [11, -100, 21, 22, -100]),
        ([{"input_ids": [1, 10, 2]}, {"input_ids": [1, 20, 2]}], [10, 2, -100, 20, 2, -100]),
    ],
)
@pytest.mark.parametrize("labels", ["auto", "always"])
def test_no_target_crosses_from_one_sequence_to_the_next(
    tmp_path: Path, words: Path, rows: list[Any], expected: list[int], labels: str
) -> None:
    """BR-020, BR-022."""
    packed(tmp_path, rows, words, "--labels", labels)
    ids, shifted = joined(tmp_path / "packed")
    if ids[-1] == 11:  # the packs' own order of sequences is free
        expected = [21, 22, -100, 11, -100]
    assert shifted == expected


def test_a_text_without_any_separator_predicts_nothing_of_the_next(tmp_path: Path, words: Path) -> None:
    """BR-021."""
    rows = [{"text": "w10 w11"}, {"text": "w20 w21"}]
    found = packed(tmp_path, rows, words, "--bos", "none", "--eos", "none")
    assert found == [([10, 11], [-100, 11]), ([20, 21], [-100, 21])]
    assert sum(target != -100 for target in joined(tmp_path / "packed")[1]) == 2


def test_labels_are_the_tokens_themselves_and_never_shifted(tmp_path: Path, words: Path) -> None:
    """BR-024: shifted labels are refused, so nobody can mean one and be given the other."""
    assert packed(tmp_path, [{"input_ids": [10, 11, 12]}], words) == [([10, 11, 12], [-100, 11, 12])]
    rows = [{"input_ids": [10, 11, 12], "labels": [11, 12, -100]}]
    assert "labels must be unshifted" in refused(tmp_path, rows, words)


# -- loss-mask -----------------------------------------------------------------------------------------


def decoded(tokenizer: Path, ids: list[int]) -> str:
    text: str = load_reference(str(tokenizer)).decode(ids, skip_special_tokens=False)
    return text


def test_a_marker_that_fuses_with_the_text_before_it_moves_no_mask(tmp_path: Path) -> None:
    """BR-032."""
    template = "{% for m in messages %}{{ ('\n>> ' if m.role == 'assistant' else '') + m.content }}"
    template += "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}{{ '\n>> ' if add_generation_prompt }}"
    folder = byte_tokenizer(tmp_path / "bytes", (".", "\n"), template=template)
    (found,) = packed(tmp_path, [chat("x.", "A")], folder)
    assert len(found[0]) == len("x.\n>> A") - 1 + 1  # "." and the newline are one token
    assert decoded(folder, targets([found])[0]) == "A<eos>"


@pytest.mark.parametrize(
    ("merge", "prompt", "completion", "trained"),
    [((":", "1"), "Ans:", "1 cat", ":1 cat<eos>"), ((".", "r"), "x.", "run", ".run<eos>")],
)
def test_a_token_across_the_seam_is_trained_with_the_completion(
    tmp_path: Path, merge: tuple[str, str], prompt: str, completion: str, trained: str
) -> None:
    """BR-033, BR-034: what lies across the seam is predicted with the completion, which has its end."""
    folder = byte_tokenizer(tmp_path / "bytes", merge)
    rows = [{"prompt": prompt, "completion": completion}]
    (found,) = packed(tmp_path, rows, folder, "--bos", "none")
    assert len(found[0]) == len(prompt + completion) - 1 + 1
    assert decoded(folder, targets([found])[0]) == trained


def test_a_generation_prompt_unlike_the_full_render_is_refused_with_the_reason(tmp_path: Path) -> None:
    """BR-035: its length would point anywhere."""
    template = CHAT.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\nw90 ' }}").replace(
        "+ message['content']", "+ ('w91 ' if message['role'] == 'assistant' else '') + message['content']"
    )
    assert template.count("w90") == template.count("w91") == 1
    folder = word_tokenizer(tmp_path / "words", template=template)
    said = refused(tmp_path, [chat("w10", "w20")], folder)
    assert "w91" in said and "w90" in said and "--template FILE" in said


def test_the_example_row_has_just_its_two_targets(tmp_path: Path, words: Path) -> None:
    """BR-036."""
    (found,) = packed(tmp_path, [chat("w10", "w20")], words)
    assert found == (EXAMPLE_IDS, [-100] * 9 + [20, END, -100])


def test_a_turn_at_the_very_start_does_not_mark_what_follows(tmp_path: Path) -> None:
    """BR-037: nothing predicts the first token, and nothing after the turn is the assistant's."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ ' ' }}{% endfor %}"
    )
    folder = word_tokenizer(tmp_path / "words", template=template)
    rows = [
        {"messages": turns("x", "w20 w21", "w10")[1:]},
        {"messages": turns("x", "w20", "w10")[1:]},
        {"messages": turns("w10", "w20 ", "w11")},
    ]
    assert packed(tmp_path, rows, folder) == [
        ([20, 21, 10], [-100, 21, -100]),
        ([10, 20, 11], [-100, 20, -100]),
    ]
    assert fates(tmp_path / "packed") == [("whole", None), ("dropped", "no-targets"), ("whole", None)]


def test_a_cut_inside_an_answer_leaves_no_chat_without_targets(tmp_path: Path, words: Path) -> None:
    """BR-038, BR-048: chats are cut at a turn's end; what has none within the limit is counted."""
    rows = [chat("w10", "w20"), chat("w10 w11", "w20"), chat("w10", "w20", "w11", "w21")]
    found = packed(tmp_path, rows, words, "--max-length", 12, "--overflow", "truncate")
    assert found == [
        (EXAMPLE_IDS, [-100] * 9 + [20, END, -100]),
        (EXAMPLE_IDS[:3] + [10, 11] + EXAMPLE_IDS[4:-1], [-100] * 10 + [20, END]),
        (EXAMPLE_IDS[:-1], [-100] * 9 + [20, END]),
    ]
    assert fates(tmp_path / "packed")[1:] == [("truncated", "too-long")] * 2
    said = refused(tmp_path, rows[:2], words, "--max-length", 10, "--overflow", "truncate")
    assert "nothing to pack" in said and "2 too-long" in said


def test_the_limit_and_the_record_beyond_it_are_named(tmp_path: Path, words: Path) -> None:
    """BR-048."""
    rows = [chat("w10", "w20"), chat("w10 w11", "w20")]
    said = refused(tmp_path, rows, words, "--max-length", 12)
    assert "record 1 (line 2)" in said and "13 tokens" in said and "max_length is 12" in said


@pytest.mark.parametrize("strategy", ["bfd", "none"])
def test_what_is_trained_does_not_depend_on_packing(tmp_path: Path, words: Path, strategy: str) -> None:
    """BR-039."""
    rows = [chat("w10", "w20"), chat("w11", "w21")]
    assert targets(packed(tmp_path, rows, words, "--strategy", strategy)) == [[20, END], [21, END]]


def test_nothing_is_put_before_text_that_is_not_encoded_on_its_own(tmp_path: Path) -> None:
    """BR-040."""
    folder = word_tokenizer(tmp_path / "words", begin="w99")
    (found,) = packed(tmp_path, [chat("w10", "w20")], folder)
    assert found == (EXAMPLE_IDS, [-100] * 9 + [20, END, -100])


def test_reasoning_beside_the_content_is_rendered_and_trained(tmp_path: Path) -> None:
    """BR-042."""
    template = CHAT.replace(
        "+ message['content']",
        "+ ('w70 ' + message['reasoning_content'] + ' w71 ' if message['reasoning_content'] else '')"
        " + message['content']",
    )
    folder = word_tokenizer(tmp_path / "words", template=template)
    row = chat("w10", "w20")
    row["messages"][1]["reasoning_content"] = "w80"
    assert targets(packed(tmp_path, [row], folder)) == [[70, 80, 71, 20, END]]


def test_markers_of_one_special_token_are_found(tmp_path: Path) -> None:
    """BR-044."""
    template = (
        "{% for m in messages %}{{ ('<|im_start|>' if m.role == 'user' else '<|im_end|>') + m.content }}"
        "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}{{ '<|im_end|>' if add_generation_prompt }}"
    )
    folder = word_tokenizer(tmp_path / "words", template=template)
    found = packed(tmp_path, [chat(f"w{n}", f"w{n + 10}") for n in range(10, 15)], folder)
    assert targets(found) == [[n + 10, EOS] for n in range(10, 15)]


def test_a_data_set_without_any_target_is_refused(tmp_path: Path, words: Path) -> None:
    """BR-044: the guard, whatever the share of drops that is allowed."""
    said = refused(tmp_path, [{"messages": turns("w10")}] * 5, words)
    assert "nothing to pack" in said and "5 no-targets" in said


def test_a_template_that_marks_nothing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """BR-045."""
    template = "{{ messages | map(attribute='content') | join(' ') }}"
    folder = word_tokenizer(tmp_path / "words", template=template)
    said = refused(tmp_path, [chat("w10", "w20")], folder)
    assert "{% generation %}" in said and "--train-on all" in said


@pytest.mark.parametrize("template", [CHAT, GENERATION], ids=["located", "marked"])
@pytest.mark.parametrize("flag", ["train", "weight", "loss_weight"])
def test_a_turn_can_be_left_out_of_the_loss(tmp_path: Path, template: str, flag: str) -> None:
    """BR-043."""
    folder = word_tokenizer(tmp_path / "words", template=template)
    row = chat("w10", "w20", "w11", "w21")
    row["messages"][1][flag] = False if flag == "train" else 0
    row["messages"][3][flag] = True if flag == "train" else 1.0
    named = [
        {"from": "human", "value": "w10"},
        {"from": "gpt", "value": "w20", flag: 0},
        {"from": "human", "value": "w11"},
        {"from": "gpt", "value": "w21"},
    ]
    found = packed(tmp_path, [row, chat("w10", "w20", "w11", "w21"), {"messages": named}], folder)
    assert targets(found) == [[21, END], [20, END, 21, END], [21, END]]
    assert found[0][0] == found[1][0] == found[2][0]


@pytest.mark.parametrize(
    ("turn", "key", "value", "said"),
    [
        (1, "trian", False, "trian"),
        (1, "loss_mask", 0, "loss_mask"),
        (1, "train", "no", "'no'"),
        (1, "train", 0.5, "0.5"),
        (1, "weight", -0.5, "-0.5"),
        (1, "weight", float("inf"), "inf"),
        (0, "train", True, "user"),
    ],
)
def test_a_flag_that_is_not_understood_is_an_error(
    tmp_path: Path, words: Path, turn: int, key: str, value: Any, said: str
) -> None:
    """BR-043."""
    row = chat("w10", "w20")
    row["messages"][turn][key] = value
    message = refused(tmp_path, [row], words)
    assert said in message and f"messages[{turn}]" in message and "line 1" in message


def test_a_template_with_several_blocks_in_a_turn_cannot_tell_turns_apart(tmp_path: Path) -> None:
    """Beside BR-043: which block is of which turn would be a guess."""
    template = GENERATION.replace(
        "{% generation %}", "{% generation %}w70 {% endgeneration %}{% generation %}"
    )
    folder = word_tokenizer(tmp_path / "words", template=template)
    assert targets(packed(tmp_path, [chat("w10", "w20")], folder)) == [[70, 20, END]]
    row = chat("w10", "w20", "w11", "w21")
    assert "2 trained spans" in refused(tmp_path, [chat("w10", "w20")], folder, "--train-on", "last")
    row["messages"][1]["train"] = False
    assert "4 trained spans" in refused(tmp_path, [row], folder)


def test_a_flag_and_train_on_last_both_count(tmp_path: Path, words: Path) -> None:
    """Beside BR-043: the last turn is not trained where it says so."""
    row = chat("w10", "w20", "w11", "w21")
    row["messages"][3]["train"] = False
    assert "1 no-targets" in refused(tmp_path, [row], words, "--train-on", "last")


# -- all-masked ----------------------------------------------------------------------------------------


def test_a_completion_beyond_the_limit_is_counted_never_trained_on_nothing(
    tmp_path: Path, words: Path
) -> None:
    """BR-046."""
    long = " ".join(f"w{n}" for n in range(10, 30))
    rows = [{"prompt": long, "completion": " w30 w31"}, {"prompt": "w10", "completion": " w20"}]
    found = packed(tmp_path, rows, words, "--max-length", 8, "--overflow", "truncate")
    assert targets(found) == [[20, EOS]]
    assert fates(tmp_path / "packed") == [("dropped", "too-long"), ("whole", None)]


@pytest.mark.parametrize("overflow", ["drop", "truncate"])
def test_one_long_record_changes_no_other(tmp_path: Path, words: Path, overflow: str) -> None:
    """BR-047."""
    rows = [chat("w10", "w20") for _ in range(100)]
    rows[37] = chat(" ".join(["w10"] * 50), "w20")
    found = packed(tmp_path, rows, words, "--max-length", 20, "--overflow", overflow)
    assert found == [(EXAMPLE_IDS, [-100] * 9 + [20, END, -100])] * 99
    table = sequence_table(tmp_path / "packed")
    gone = [row for row, status in zip(table["row"], table["status"], strict=True) if status == "dropped"]
    assert gone == [37] and table["reason"][37] == "too-long"


def test_eval_records_without_targets_are_not_in_the_eval_split(tmp_path: Path, words: Path) -> None:
    """BR-049."""
    rows = [chat("w10", "w20") for _ in range(4)]
    evaluation = [*rows[:3], chat(" ".join(["w10"] * 50), "w20")]
    train, other = (
        write_lines(tmp_path / name, r) for name, r in (("a.jsonl", rows), ("b.jsonl", evaluation))
    )
    options = ("--tokenizer", words, "--max-length", 20, "--overflow", "truncate", "--eval-source", other)
    summary = built(train, tmp_path / "packed", *options)
    assert summary["splits"]["validation"]["dropped_by_reason"] == {"too-long": 1}
    found = list(sequences_of(tmp_path / "packed" / "validation").values())
    assert targets(found) == [[20, END]] * 3


# -- specials ------------------------------------------------------------------------------------------


def test_an_end_token_that_is_also_the_pad_token_is_trained(tmp_path: Path) -> None:
    """BR-050."""
    folder = word_tokenizer(tmp_path / "words", pad="<eos>")
    rows: list[Any] = [{"text": "w10 w11"}, {"input_ids": [10, 11, 2]}]
    for number, row in enumerate(rows):
        (found,) = packed(tmp_path / str(number), [row], folder)
        assert found == ([10, 11, EOS], [-100, 11, EOS])


@pytest.mark.parametrize("end", ["", "<eos>"])
def test_what_is_cut_is_not_closed(tmp_path: Path, end: str) -> None:
    """BR-051, BR-052."""
    folder = word_tokenizer(tmp_path / "words", end=end)
    rows = [{"text": " ".join(f"w{n}" for n in range(10, 20))}]
    (found,) = packed(tmp_path, rows, folder, "--max-length", 8, "--overflow", "truncate")
    assert found[0] == list(range(10, 18))
    table = sequence_table(tmp_path / "packed")
    assert (table["status"], table["cut"]) == (["truncated"], [3])


def test_every_text_has_one_end_token_and_it_is_trained(tmp_path: Path, words: Path) -> None:
    """BR-053, BR-055: an end that is a token of the text already (as told by --allow-special) stays one."""
    rows = [{"text": "w10 w11"}, {"text": "w10 w11 <eos>"}, {"text": "w10"}]
    found = packed(tmp_path, rows, words, "--allow-special", "--bos", "none")
    assert found == [
        ([10, 11, EOS], [-100, 11, EOS]),
        ([10, 11, EOS], [-100, 11, EOS]),
        ([10, EOS], [-100, EOS]),
    ]


def test_a_template_that_writes_the_begin_token_gets_no_second_one(tmp_path: Path) -> None:
    """BR-054."""
    folder = word_tokenizer(tmp_path / "words", begin="<bos>", template="{{ bos_token }}" + CHAT)
    (found,) = packed(tmp_path, [chat("w10", "w20")], folder)
    assert found[0] == [1, *EXAMPLE_IDS]


@pytest.mark.parametrize("kind", ["plain", "dual", "no bos"])
def test_ids_are_those_that_transformers_gives_at_run_time(tmp_path: Path, kind: str) -> None:
    """BR-056."""
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {
        "plain": {},
        "dual": {"begin": "<bos>", "template": "{{ bos_token }}" + CHAT},
        "no bos": {"bos": None},
    }[kind]
    folder = word_tokenizer(tmp_path / "words", **options)
    live = transformers.AutoTokenizer.from_pretrained(folder)
    row = chat("w10", "w20", "w11", "w21")
    (found,) = packed(tmp_path, [row], folder)
    expected = live.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
    assert found[0] == list(expected)
    assert found[0].count(1) == (kind == "dual")


# -- template ------------------------------------------------------------------------------------------

FORGETFUL = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = text.split('w81 ')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def test_reasoning_that_a_template_forgets_is_in_neither_ids_nor_targets(tmp_path: Path) -> None:
    """BR-058, BR-059: the mask is that of the stock template's own full render."""
    folder = word_tokenizer(tmp_path / "words", template=FORGETFUL)
    rows = [chat("w10", "w80 w50 w81 w20", "w11", "w80 w51 w81 w21")]
    (found,) = packed(tmp_path, rows, folder)
    assert targets([found]) == [[20, END, 80, 51, 81, 21, END]]
    assert found[0][:12] == EXAMPLE_IDS


CALLING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def test_content_that_is_null_beside_calls_is_empty(tmp_path: Path) -> None:
    """BR-060."""
    folder = byte_tokenizer(tmp_path / "bytes", template=CALLING)
    function = {"name": "f", "arguments": {"a": 1}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "w10"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "w30"},
        {"role": "assistant", "content": "w20", "tool_calls": None},
    ]
    (found,) = packed(tmp_path, [{"messages": messages}], folder, "--max-length", 512)
    text = decoded(folder, found[0])
    assert "None" not in text and "null" not in text
    assert text.count("<|im_start|>") == 4
    trained = decoded(folder, targets([found])[0])
    assert trained == json.dumps(function) + "<|im_end|>w20<|im_end|>"
