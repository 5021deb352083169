"""Mistakes that users make in a build: each makes what it needs and says what must be told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from building import (
    DEMO,
    TOKENIZER,
    demo_rows,
    write_lines,
)

Case = Callable[[Path], tuple[list[object], list[str]]]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    """Enter a case: from a folder to the build's source and options, and what must be said."""
    CASES[make.__name__.replace("_", " ")] = make
    return make


# -- sources -------------------------------------------------------------------------------------------


@case
def no_such_file(folder: Path) -> tuple[list[object], list[str]]:
    shutil.copy(DEMO, folder / "data.jsonl")
    return [folder / "dta.jsonl"], ["dta.jsonl", "no file", "near it", "data.jsonl"]


@case
def an_empty_file(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "data.jsonl").touch()
    return [folder / "data.jsonl"], ["data.jsonl", "empty (0 bytes)"]


@case
def a_file_of_blank_lines(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "data.jsonl").write_text("\n\n\n")
    return [folder / "data.jsonl"], ["data.jsonl", "no records"]


@case
def an_empty_folder(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "data").mkdir()
    return [folder / "data"], ["data", "no file to read", ".jsonl"]


@case
def a_file_of_unknown_kind(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "data.xyz").write_text("a")
    return [folder / "data.xyz"], ["data.xyz", "extension", ".jsonl"]


@case
def a_malformed_line(folder: Path) -> tuple[list[object], list[str]]:
    lines = [json.dumps(row) for row in demo_rows()[:9]]
    lines[6] = '{"instruction": "never clo'
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return [folder / "data.jsonl"], ["data.jsonl", "line 7", "--on-bad-record drop"]


@case
def a_malformed_array(folder: Path) -> tuple[list[object], list[str]]:
    text = json.dumps(demo_rows()[:9], indent=1)
    (folder / "data.json").write_text(text[: len(text) // 2])
    return [folder / "data.json"], ["data.json", f"line {text[: len(text) // 2].count(chr(10)) + 1}"]


@case
def a_malformed_record_in_an_array(folder: Path) -> tuple[list[object], list[str]]:
    rows = [json.dumps(row) for row in demo_rows()[:9]]
    rows[4] = '{"instruction": "x", "output": nope}'
    (folder / "data.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
    return [folder / "data.json"], ["data.json", "line 6"]


@case
def a_missing_column(folder: Path) -> tuple[list[object], list[str]]:
    write_lines(folder / "data.jsonl", [{"instruction": "a", "reply": "b"}])
    said = ["data.jsonl", "line 1", "output", "instruction, reply"]
    return [folder / "data.jsonl", "--format", "alpaca"], said


@case
def a_column_named_that_is_not_there(folder: Path) -> tuple[list[object], list[str]]:
    write_lines(folder / "data.jsonl", [{"instruction": "a", "output": "b"}])
    options = ["--format", "text", "--column", "text=body"]
    return [folder / "data.jsonl", *options], ["body", "instruction, output"]


@case
def columns_of_no_known_format(folder: Path) -> tuple[list[object], list[str]]:
    write_lines(folder / "data.jsonl", [{"left": "a", "right": "b"}])
    return [folder / "data.jsonl"], ["data.jsonl", "left, right", "--format", "--column"]


@case
def a_field_of_another_type(folder: Path) -> tuple[list[object], list[str]]:
    write_lines(folder / "data.jsonl", [*demo_rows()[:4], {"instruction": 7, "output": "b"}])
    return [folder / "data.jsonl"], ["line 5", "instruction must be text, got int"]


@case
def a_record_that_is_too_long(folder: Path) -> tuple[list[object], list[str]]:
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": "word " * 99}]
    write_lines(folder / "data.jsonl", rows)
    said = ["line 2", "tokens", "max_length is 64", "--max-length", "--overflow"]
    return [folder / "data.jsonl", "--max-length", 64], said


@case
def nothing_but_faults(folder: Path) -> tuple[list[object], list[str]]:
    write_lines(folder / "data.jsonl", [{"text": ""}, {"text": ""}])
    return [folder / "data.jsonl"], ["nothing to pack", "2 records", "2 empty"]


@case
def all_too_long(folder: Path) -> tuple[list[object], list[str]]:
    options = ["--max-length", 2, "--overflow", "drop"]
    return [DEMO, *options], ["nothing to pack", "400 records", "too-long"]


@case
def too_many_faults(folder: Path) -> tuple[list[object], list[str]]:
    write_lines(folder / "data.jsonl", [*demo_rows()[:9], {"instruction": 1, "output": ""}])
    said = ["1 of 10 records", "10.0%", "malformed", "max_drop_share 5.0%", "--max-drop-share"]
    return [folder / "data.jsonl", "--on-bad-record", "drop"], said


@case
def an_empty_eval_split(folder: Path) -> tuple[list[object], list[str]]:
    write_lines(folder / "data.jsonl", demo_rows()[:3])
    return [folder / "data.jsonl", "--eval-fraction", 0.0001], ["validation", "empty", "--eval-fraction"]


@case
def one_file_for_both_splits(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--eval-source", DEMO], ["given twice"]


# -- options -------------------------------------------------------------------------------------------


@case
def no_length(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--max-length", 0], ["--max-length", "at least 1", "got 0"]


@case
def an_unknown_strategy(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--strategy", "best"], ["strategy", "'best'", "bfd", "none"]


@case
def an_alignment_larger_than_a_pack(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--align", 4096], ["--align 4,096", "--max-length", "lower it"]


@case
def a_length_that_is_no_multiple_of_the_alignment(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--align", 7], ["no multiple of align 7", "give --max-length"]


@case
def fewer_sequences_than_packs_must_be(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--packs-multiple", 500], ["400 sequences", "500 packs", "--packs-multiple 500"]


@case
def a_window_of_nothing(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--plan-window", 0], ["--plan-window", "at least 1", "got 0"]


@case
def an_unknown_format(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--format", "chat"], ["format", "'chat'", "auto", "messages"]


@case
def an_unknown_template(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--template", "chatlm"], ["'chatlm'", "chatml", "file"]


@case
def an_unknown_end_token(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--eos", "<end>"], ["--eos", "'<end>'", "no token"]


@case
def an_eval_share_above_one(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--eval-fraction", 1.5], ["--eval-fraction", "between 0 and 1", "1.5"]


@case
def all_for_evaluation(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--eval-fraction", 1], ["--eval-fraction", "less than 1"]


@case
def no_worker(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--workers", 0], ["workers", "at least 1", "got 0"]


@case
def a_bad_regular_expression(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "a.txt").write_text("a")
    return [folder / "a.txt", "--text-by", "(a"], ["(a"]


@case
def a_pair_without_equals(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--column", "text"], ["--column", "ROLE=NAME", "'text'"]


@case
def fragments_of_a_chat(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--overflow", "split"], ["--overflow split", "alpaca", "truncate"]


@case
def malformed_YAML(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "c.yaml").write_text("seed: [1\n")
    return [DEMO, "--config", folder / "c.yaml"], ["c.yaml", "not valid YAML"]


@case
def YAML_of_another_shape(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "c.yaml").write_text("- seed\n")
    return [DEMO, "--config", folder / "c.yaml"], ["c.yaml", "mapping"]


@case
def an_unknown_name_in_YAML(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "c.yaml").write_text("max_len: 5\n")
    return [DEMO, "--config", folder / "c.yaml"], ["c.yaml", "'max_len'", "max_length"]


@case
def a_wrong_type_in_YAML(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "c.yaml").write_text("seed: many\n")
    return [DEMO, "--config", folder / "c.yaml"], ["seed", "'many'"]


@case
def a_wrong_type_of_a_word_in_YAML(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "c.yaml").write_text("system: 5\n")
    return [DEMO, "--config", folder / "c.yaml"], ["system", "5"]


@case
def a_wrong_type_of_a_switch_in_YAML(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "c.yaml").write_text("allow_special: please\n")
    return [DEMO, "--config", folder / "c.yaml"], ["--allow-special", "'please'"]


@case
def no_such_YAML(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--config", folder / "c.yaml"], ["c.yaml", "No such file"]


# -- tokenizer and template ----------------------------------------------------------------------------


@case
def no_tokenizer_folder(folder: Path) -> tuple[list[object], list[str]]:
    return [DEMO, "--tokenizer", folder / "tok"], ["tok", "tokenizer.json"]


@case
def a_tokenizer_folder_without_its_file(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "tok").mkdir()
    return [DEMO, "--tokenizer", folder / "tok"], ["tok", "no tokenizer.json", "save_pretrained"]


@case
def a_tokenizer_that_is_no_JSON(folder: Path) -> tuple[list[object], list[str]]:
    shutil.copytree(TOKENIZER, folder / "tok")
    (folder / "tok" / "tokenizer.json").write_text('{"model": {')
    return [DEMO, "--tokenizer", folder / "tok"], ["tok", "cannot be read"]


@case
def a_tokenizer_of_another_shape(folder: Path) -> tuple[list[object], list[str]]:
    shutil.copytree(TOKENIZER, folder / "tok")
    (folder / "tok" / "tokenizer.json").write_text("[]")
    return [DEMO, "--tokenizer", folder / "tok"], ["tok", "cannot be read"]


@case
def a_tokenizer_without_a_known_model(folder: Path) -> tuple[list[object], list[str]]:
    shutil.copytree(TOKENIZER, folder / "tok")
    (folder / "tok" / "tokenizer.json").write_text('{"model": {"type": "Magic", "vocab": {}}}')
    return [DEMO, "--tokenizer", folder / "tok"], ["tok"]


def tokenizer_without_template(folder: Path) -> Path:
    shutil.copytree(TOKENIZER, folder / "tok")
    path = folder / "tok" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    return folder / "tok"


def chats(folder: Path) -> Path:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return write_lines(folder / "chats.jsonl", [{"messages": turns}] * 3)


@case
def a_chat_without_a_template(folder: Path) -> tuple[list[object], list[str]]:
    options = ["--tokenizer", tokenizer_without_template(folder)]
    return [chats(folder), *options], ["no chat template", "--template"]


@case
def a_template_with_a_syntax_error(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "t.jinja").write_text("{% for m in messages %}\n{{ m. }}\n{% endfor %}")
    return [chats(folder), "--template", folder / "t.jinja"], ["t.jinja", "line 2"]


@case
def a_template_that_marks_nothing(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return [chats(folder), "--template", folder / "t.jinja"], ["t.jinja", "generation", "--train-on all"]


@case
def a_template_that_refuses_a_record(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bad = [*good, {"role": "tool", "content": "c"}]
    source = write_lines(folder / "data.jsonl", [{"messages": good}, {"messages": bad}])
    said = ["data.jsonl", "line 2", "no tools here", "--on-bad-record drop"]
    return [source, "--template", folder / "t.jinja"], said


@case
def a_template_that_asks_for_the_date(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "t.jinja").write_text(
        "{{ strftime_now('%d %b') }}{% for m in messages %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    return [chats(folder), "--template", folder / "t.jinja"], ["date", "--template-arg"]
