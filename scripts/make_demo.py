"""Make what ships in packer/demo_data: a small instruction set and a small tokenizer.

Run it after a change of `demo_text.py` and commit what it writes; a test holds the committed files
to be what this script gives. The tokenizer is trained on the set itself: 2,048 tokens compress
text they were made for nearly as well as a large vocabulary would (about 4 bytes a token), in a
file of 50 kB instead of megabytes. It is good for nothing but the demo and tests.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import demo_text as text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20
VOCAB_SIZE = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# How many records of each kind, short kinds first; their sum is the size of the set.
RECORDS: tuple[tuple[text.Kind, int], ...] = (
    (text.classify, 40),
    (text.arrange, 40),
    (text.past_tense, 32),
    (text.convert, 34),
    (text.greeting, 8),
    (text.listing, 34),
    (text.snippet, 30),
    (text.explain, 44),
    (text.table, 28),
    (text.arithmetic, 34),
    (text.letter, 20),
    (text.summarize, 20),
    (text.story, 22),
    (text.notes, 6),
    (text.long_story, 6),
    (text.silence, 2),
)

# ChatML. The generation block tells which part of the text the model is to learn: the answer and
# the token that ends it, so that it learns to stop, but not the line break after that.
CHAT_TEMPLATE = """\
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_records(seed: int) -> list[text.Record]:
    """The set, in mixed order; no two records ask the same."""
    dice = text.Dice(seed)
    records: dict[tuple[str, str], text.Record] = {}
    for kind, count in RECORDS:
        wanted = len(records) + count
        while len(records) < wanted:
            made = kind(dice)
            records.setdefault((made["instruction"], made["input"]), made)
    return dice.some(list(records.values()), len(records))


def train_tokenizer(records: list[text.Record]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens; the special ones have the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, TURN_START, TURN_END)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((field for made in records for field in made.values()), trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """What transformers reads beside tokenizer.json: which token is which, and the template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }


def write_demo_data(folder: Path) -> None:
    """Write instructions.jsonl and tokenizer/ below the folder; the same bytes at every run."""
    records = make_records(SEED)
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(made, ensure_ascii=False) + "\n" for made in records)
    files = {
        "instructions.jsonl": lines,
        "tokenizer/tokenizer.json": train_tokenizer(records).to_str() + "\n",
        "tokenizer/tokenizer_config.json": json.dumps(tokenizer_config(), indent=2) + "\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content.encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    shipped = Path(__file__).resolve().parent.parent / "packer" / "demo_data"
    parser.add_argument("--output", type=Path, default=shipped, help="folder to write into")
    write_demo_data(parser.parse_args().output)
