"""The table: shared file x format x tokenizer, ids and masks against the slow reference.

Chats go through the tokenizer's own template, which has no generation blocks: the packer locates the turns,
the reference renders the same template with blocks. Texts and pairs of strings are one encode and the end
token. What is compared is every id and every label of the first records of a file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from slow_reference import (
    Chat,
    Record,
    Tokens,
    alpaca_chat,
    chat_tokens,
    completion_tokens,
    last_turn_only,
    messages_chat,
    sharegpt_chat,
    sharegpt_message,
)
from test_equal_transformers import read_records
from transformers import AutoTokenizer

from padless.packer import PackConfig, pack_dataset
from padless.runtime.reader import PackedReader

pytestmark = pytest.mark.shared

LIMIT = 40
"""Records of a file."""

Expected = Callable[[Any, str, Record], list[Tokens]]
"""(tokenizer, template with blocks, record) -> the sequences that it gives."""


def chat(to_chat: Callable[[Record], Chat]) -> Expected:
    return lambda tokenizer, template, record: [chat_tokens(tokenizer, template, to_chat(record))]


def pair_of_turns(tokenizer: Any, template: str, record: Record) -> list[Tokens]:
    """Both answers to a conversation, of which only they are trained."""
    context = record["conversations"]
    both = [[*context, record[name]] for name in ("chosen", "rejected")]
    chats = [Chat(messages=[sharegpt_message(turn) for turn in turns]) for turns in both]
    return [last_turn_only(chat_tokens(tokenizer, template, one)) for one in chats]


def labelled(tokenizer: Any, template: str, record: Record) -> list[Tokens]:
    return [last_turn_only(chat_tokens(tokenizer, template, messages_chat(record)))]


def strings(prompt: str, completion: str) -> Expected:
    return lambda tokenizer, _, record: [completion_tokens(tokenizer, record[prompt], record[completion])]


def text(tokenizer: Any, _: str, record: Record) -> list[Tokens]:
    return [completion_tokens(tokenizer, "", record["text"])]


CHAT_TOKENIZERS = ("qwen3", "llama3.1", "mistral-sp")
TOKENIZERS = (*CHAT_TOKENIZERS, "gpt2")

TABLE: dict[str, tuple[str, Expected, tuple[str, ...], dict[str, Any]]] = {
    "alpaca/alpaca_cleaned_first5000.json": ("alpaca", chat(alpaca_chat), CHAT_TOKENIZERS, {}),
    "alpaca/alpaca_zh_demo.json": ("alpaca", chat(alpaca_chat), CHAT_TOKENIZERS, {}),
    "chat/dummy_conversation.json": ("sharegpt", chat(sharegpt_chat), CHAT_TOKENIZERS, {}),
    "chat/glaive_toolcall_en_demo.json": ("sharegpt", chat(sharegpt_chat), ("qwen3",), {}),
    "multilingual/xquad_hi_messages.jsonl": ("messages", chat(messages_chat), CHAT_TOKENIZERS, {}),
    "multilingual/xquad_ar_messages.jsonl": ("messages", chat(messages_chat), CHAT_TOKENIZERS, {}),
    "multilingual/xquad_zh_messages.jsonl": ("messages", chat(messages_chat), CHAT_TOKENIZERS, {}),
    "preference/dpo_en_demo.json": ("preference", pair_of_turns, ("qwen3", "llama3.1"), {}),
    "preference/kto_en_demo.json": ("preference", labelled, ("qwen3", "llama3.1"), {}),
    "rl/gsm8k_test.jsonl": ("prompt-completion", strings("question", "answer"), TOKENIZERS, {}),
    "code/HumanEval.jsonl.gz": (
        "prompt-completion",
        strings("prompt", "canonical_solution"),
        TOKENIZERS,
        {"columns": {"completion": "canonical_solution"}},
    ),
    "pretrain/c4_demo.jsonl": ("text", text, TOKENIZERS, {}),
    "short/banking77_train.csv": ("text", text, TOKENIZERS, {}),
}
CASES = [(file, tokenizer) for file, (_, _, tokenizers, _) in TABLE.items() for tokenizer in tokenizers]


@lru_cache
def tokenizer_and_template(folder: Path) -> tuple[Any, str]:
    file = folder / "chat_template.generation.jinja"
    return AutoTokenizer.from_pretrained(folder), file.read_text() if file.exists() else ""


def records_of(path: Path) -> list[Record]:
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            return [row for row, _ in zip(csv.DictReader(file), range(LIMIT), strict=False)]
    return read_records(path)[:LIMIT]


@pytest.mark.parametrize(("file", "tokenizer_name"), CASES)
def test_ids_and_masks_equal_the_slow_reference(
    shared: Path, tmp_path: Path, file: str, tokenizer_name: str
) -> None:
    name, expected_of, _, options = TABLE[file]
    source, folder = shared / "data" / file, shared / "tokenizers" / tokenizer_name
    config = PackConfig(
        sources=(str(source),),
        tokenizer=str(folder),
        max_length=32768,
        output=str(tmp_path / "packed"),
        limit=LIMIT,
        workers=1,
        **options,
    )
    manifest = pack_dataset(config)
    assert manifest.options["formats"] == [name]  # type: ignore[union-attr]
    reader = PackedReader(tmp_path / "packed")
    found = []
    for row in reader.sequence_table().to_pylist():
        pack = reader[row["pack"]]
        place = slice(row["offset"], row["offset"] + row["length"])
        found.append(Tokens(input_ids=pack.input_ids[place].tolist(), labels=pack.labels[place].tolist()))
    tokenizer, template = tokenizer_and_template(folder)
    expected = [one for record in records_of(source) for one in expected_of(tokenizer, template, record)]
    assert len(found) == len(expected) >= LIMIT
    different = [n for n, both in enumerate(zip(found, expected, strict=True)) if both[0] != both[1]]
    assert not different, f"{len(different)} differ, the first is {different[0]}: " + json.dumps(
        [vars(found[different[0]]), vars(expected[different[0]])]
    )
