"""Every record's ids and labels equal what transformers gives, on real text and real tokenizers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_reference import (
    Chat,
    Record,
    Tokens,
    alpaca_chat,
    chat_tokens,
    chosen_chat,
    completion_tokens,
    messages_chat,
    sharegpt_chat,
)
from transformers import AutoTokenizer

from padless.packer import PackConfig, pack_dataset
from padless.runtime.reader import PackedReader

pytestmark = pytest.mark.shared

LIMIT = 1000
MAX_LENGTH = 16384  # above the longest record of all files, so that each stays whole


def read_records(path: Path) -> list[Record]:
    """The records of a JSON array, JSONL or gzipped JSONL, by the standard library."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    if text.startswith("["):
        found: list[Record] = json.loads(text)
        return found
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def packed_tokens(folder: Path) -> list[Tokens]:
    """Each record's tokens in the order of the records, cut out of the packs by the table."""
    reader = PackedReader(folder)
    found: list[Tokens] = []
    for row in reader.sequence_table().to_pylist():
        assert (row["status"], row["record"], row["part"]) == ("whole", len(found), 0)
        pack = reader[row["pack"]]
        place = slice(row["offset"], row["offset"] + row["length"])
        found.append(
            Tokens(
                input_ids=pack.input_ids[place].tolist(),
                labels=pack.labels[place].tolist(),
            )
        )
    return found


def build(source: Path, tokenizer: Path, output: Path, **options: Any) -> list[Tokens]:
    """Pack a file and read its records back."""
    pack_dataset(
        PackConfig(
            sources=(str(source),),
            tokenizer=str(tokenizer),
            max_length=MAX_LENGTH,
            workers=1,
            output=str(output),
            **options,
        )
    )
    return packed_tokens(output)


def assert_equal(packed: list[Tokens], expected: list[Tokens]) -> None:
    """Both lists hold the same sequences, and there was something to compare."""
    assert len(packed) == len(expected) > 100
    assert all(any(label != -100 for label in tokens.labels) for tokens in expected)
    different = [i for i, pair in enumerate(zip(packed, expected, strict=True)) if pair[0] != pair[1]]
    assert not different, f"{len(different)} records differ, the first is {different[0]}"


@pytest.mark.parametrize(
    ("tokenizer_name", "template_name"),
    [
        ("qwen3", "chatml.generation.jinja"),
        ("llama3.1", "chat_template.generation.jinja"),
        ("mistral-sp", "chat_template.generation.jinja"),
    ],
)
def test_alpaca_equals_transformers(
    shared: Path, tmp_path: Path, tokenizer_name: str, template_name: str
) -> None:
    # scripts/bench_pack.py compares all 52,002; those with an empty output are here too.
    everything = read_records(shared / "data/alpaca/alpaca_data.json")
    records = [
        record
        for number, record in enumerate(everything)
        if number < 500 or number % 13 == 0 or not record["output"]
    ]
    folder = shared / "tokenizers" / tokenizer_name
    template = folder / template_name
    source = tmp_path / "alpaca.json"
    source.write_text(json.dumps(records))
    packed = build(source, folder, tmp_path / "packed", template=str(template), train_on="assistant")
    tokenizer, text = AutoTokenizer.from_pretrained(folder), template.read_text()
    assert_equal(packed, [chat_tokens(tokenizer, text, alpaca_chat(record)) for record in records])


CHATS: dict[str, tuple[str, Callable[[Record], Chat], dict[str, Any]]] = {
    "sharegpt": ("chat/dummy_conversation.json", sharegpt_chat, {}),
    "tool calls": ("chat/glaive_toolcall_en_demo.json", sharegpt_chat, {}),
    "messages": ("preference/kto_en_demo.json", messages_chat, {}),
    "chosen of a pair": (
        "preference/dpo_en_demo.json",
        chosen_chat,
        {
            "format": "prompt-completion",
            "columns": {"prompt": "conversations", "completion": "chosen"},
        },
    ),
    "hindi": ("multilingual/xquad_hi_messages.jsonl", messages_chat, {}),
    "arabic": ("multilingual/xquad_ar_messages.jsonl", messages_chat, {}),
    "chinese": ("multilingual/xquad_zh_messages.jsonl", messages_chat, {}),
}


@pytest.mark.parametrize("case", CHATS)
def test_chats_equal_transformers(shared: Path, tmp_path: Path, case: str) -> None:
    file, to_chat, options = CHATS[case]
    source, folder = shared / "data" / file, shared / "tokenizers/qwen3"
    template = folder / "chat_template.generation.jinja"
    packed = build(
        source,
        folder,
        tmp_path / "packed",
        template=str(template),
        train_on="assistant",
        limit=LIMIT,
        **options,
    )
    tokenizer, text = AutoTokenizer.from_pretrained(folder), template.read_text()
    records = read_records(source)[:LIMIT]
    assert_equal(packed, [chat_tokens(tokenizer, text, to_chat(record)) for record in records])


@pytest.mark.parametrize("tokenizer_name", ["qwen3", "llama3.1", "gpt2", "mistral-sp"])
@pytest.mark.parametrize(
    ("file", "prompt", "completion"),
    [
        ("code/HumanEval.jsonl.gz", "prompt", "canonical_solution"),
        ("rl/gsm8k_test.jsonl", "question", "answer"),
    ],
)
def test_completions_equal_one_encode_and_the_end_token(
    shared: Path, tmp_path: Path, tokenizer_name: str, file: str, prompt: str, completion: str
) -> None:
    source, folder = shared / "data" / file, shared / "tokenizers" / tokenizer_name
    packed = build(
        source,
        folder,
        tmp_path / "packed",
        format="prompt-completion",
        columns={"prompt": prompt, "completion": completion},
        limit=LIMIT,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    records = read_records(source)[:LIMIT]
    assert_equal(
        packed,
        [completion_tokens(tokenizer, record[prompt], record[completion]) for record in records],
    )
