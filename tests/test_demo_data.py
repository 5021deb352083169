"""What ships for the demo: made by our script, small, and of the shape that the demo promises."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
FILES = ("instructions.jsonl", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")


@pytest.fixture(scope="module")
def records(demo_data: Path) -> list[dict[str, str]]:
    lines = (demo_data / "instructions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer(demo_data: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_data / "tokenizer" / "tokenizer.json"))


@pytest.fixture(scope="module")
def config(demo_data: Path) -> dict[str, Any]:
    text = (demo_data / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def as_messages(record: dict[str, str]) -> list[dict[str, str]]:
    asked = record["instruction"] + (f"\n\n{record['input']}" if record["input"] else "")
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": record["output"]},
    ]


def test_the_script_gives_the_committed_bytes(demo_data: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_demo.py"
    subprocess.run([sys.executable, "-B", script, "--output", tmp_path], check=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (demo_data / name).read_bytes(), (
            f"{name} is not what scripts/make_demo.py gives: run it and commit the result"
        )


def test_nothing_but_the_three_files_ships_and_they_are_small(demo_data: Path) -> None:
    files = [path for path in demo_data.rglob("*") if path.is_file()]
    assert sorted(path.relative_to(demo_data).as_posix() for path in files) == sorted(FILES)
    assert sum(path.stat().st_size for path in files) < 400_000


def test_records_have_alpacas_columns_and_are_all_different(records: list[dict[str, str]]) -> None:
    assert {tuple(record) for record in records} == {("instruction", "input", "output")}
    assert all(record["instruction"] for record in records)
    asked = {(record["instruction"], record["input"]) for record in records}
    assert len(asked) == len(records) >= 300


def test_some_records_have_an_input_and_two_an_empty_output(records: list[dict[str, str]]) -> None:
    assert 0.35 < sum(bool(record["input"]) for record in records) / len(records) < 0.45
    assert sum(not record["output"] for record in records) == 2


def test_lengths_are_spread_like_alpacas_and_fit_the_demos_packs(
    records: list[dict[str, str]], tokenizer: Tokenizer
) -> None:
    # ChatML around two turns is 2 * 4 tokens and the line breaks; alpaca's own figures there are
    # median 69, mean 84, 1 % above 282, longest 1,092.
    lengths = sorted(
        len(tokenizer.encode("".join(message["content"] for message in as_messages(record)))) + 12
        for record in records
    )
    assert 45 < statistics.median(lengths) < 85
    assert 60 < statistics.mean(lengths) < 110
    assert lengths[0] < 30
    assert 600 < lengths[-1] <= 1024


def test_the_tokenizer_gives_every_text_back(records: list[dict[str, str]], tokenizer: Tokenizer) -> None:
    texts = [text for record in records for text in record.values()]
    texts += ["\x00\t\r\n  end", "e\u0301 \u200d \U0001f9d1\u200d\U0001f680", "\ufffd \u0928\u092e"]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_three_and_the_end_tokens_are_named(
    tokenizer: Tokenizer, config: dict[str, Any]
) -> None:
    added = tokenizer.get_added_tokens_decoder()
    named = {number: token.content for number, token in added.items() if token.special}
    assert named == {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    assert config["eos_token"] == "<|im_end|>"
    assert config["pad_token"] == "<|endoftext|>"


def test_the_template_is_chatml_and_trains_the_answer_with_its_end_token(demo_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(demo_data / "tokenizer"))
    question = [{"role": "system", "content": " Be kind."}, {"role": "user", "content": "Hi\n"}]
    messages = [*question, {"role": "assistant", "content": "Ho"}]
    text = (
        "<|im_start|>system\n Be kind.<|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n"
        "<|im_start|>assistant\nHo<|im_end|>\n"
    )
    assert loaded.apply_chat_template(messages, tokenize=False) == text
    prompt = loaded.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert prompt == text.removesuffix("Ho<|im_end|>\n")
    encoded = loaded.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert loaded.decode([token for token, trained in pairs if trained]) == "Ho<|im_end|>"
