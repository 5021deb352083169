"""The TRL way of packing alpaca or sharegpt records, a whole process: the peer of bench_pack.py.

Only the public API of datasets, transformers and TRL: one record at a time through
`apply_chat_template`, the assistant's mask folded into the labels, then `pack_dataset`. Nothing is
in it that the job does not need. TRL's own trainer hands the tokenizer to `map`, which pickles it
for its fingerprint and again for every process: seconds with a large vocabulary. `--tuned` spares
the peer that by loading the tokenizer where it is needed, and so makes it look as good as it can.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer
from trl import pack_dataset

ROLES = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool"}


def to_messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record's turns: those of its conversation, or an alpaca question (its input after a blank line)."""
    if "conversations" in record:
        return [_message(turn["from"], turn["value"]) for turn in record["conversations"]]
    question = record["instruction"]
    if record["input"]:
        question += "\n\n" + record["input"]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": record["output"]},
    ]


def _message(speaker: str, text: str) -> dict[str, Any]:
    if speaker != "function_call":
        return {"role": ROLES[speaker], "content": text}
    call = json.loads(text)
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@cache
def load_tokenizer(folder: str) -> Any:
    """The tokenizer, once a process."""
    return AutoTokenizer.from_pretrained(folder)


def tokenize(record: dict[str, Any], tokenizer: Any, template: str) -> dict[str, list[int]]:
    """Ids and unshifted labels of one record, -100 where the assistant does not speak.

    `tokenizer` is a tokenizer, or the folder to load it from.
    """
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    encoded = tokenizer.apply_chat_template(
        to_messages(record),
        tools=json.loads(record["tools"]) or None if record.get("tools") else None,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    labels = [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "labels": labels}


def main() -> None:
    """Load, tokenize, pack and save; with --dump also the tokens before packing, as Parquet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--template", type=Path, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dump", type=Path)
    options = parser.parse_args()

    datasets.disable_progress_bars()
    # num_proc=1 would start a pool for its one process; None works in this one.
    num_proc = options.processes if options.processes > 1 else None
    tokenizer = options.tokenizer if options.tuned else load_tokenizer(options.tokenizer)
    records = datasets.load_dataset("json", data_files=str(options.input), split="train")
    sequences = records.map(
        tokenize,
        fn_kwargs={"tokenizer": tokenizer, "template": options.template.read_text()},
        remove_columns=records.column_names,
        num_proc=num_proc,
    )
    packs = pack_dataset(
        sequences,
        seq_length=options.max_length,
        strategy="bfd",
        map_kwargs={"num_proc": num_proc},
    )
    packs.save_to_disk(str(options.output))
    if options.dump:
        sequences.to_parquet(str(options.dump))


if __name__ == "__main__":
    main()
