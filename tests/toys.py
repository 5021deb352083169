"""Toy tokenizers whose ids can be read: word wN is id N, so that expected ids stand in the tests.

    "<|im_start|>user\\nw10<|im_end|>\\n"  ->  [3, 7, 6, 10, 4, 6]

Words are split on spaces, newlines and the characters `< | >`; without those three a control token that is
spelled in a text would be found in the vocabulary whole, where real tokenizers have only its pieces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from building import build, built, sequence_table, sequences_of, write_lines
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BOS, EOS, START, END, UNK, NEWLINE, USER, ASSISTANT, SYSTEM = range(10)
NAMES = [
    "<pad>",
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "\n",
    "user",
    "assistant",
    "system",
]
SPECIAL = NAMES[:5]

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Role, newline, content, end token, newline: a turn of one word is 6 tokens."""

EXAMPLE_IDS = [START, USER, NEWLINE, 10, END, NEWLINE, START, ASSISTANT, NEWLINE, 20, END, NEWLINE]

Sequence = tuple[list[int], list[int]]
"""ids and labels."""


def word_tokenizer(
    folder: Path,
    *,
    template: str | None = CHAT,
    begin: str = "",
    end: str = "",
    pad: str = "<pad>",
    bos: str | None = "<bos>",
    words: tuple[str, ...] = (),
) -> Path:
    """A folder with the word-level tokenizer; `begin` and `end` are put around texts encoded on their own.

    `words` are further words, with ids from 100 on.
    """
    vocab = {name: number for number, name in enumerate(NAMES)}
    vocab |= {f"w{number}": number for number in range(10, 100)}
    vocab |= {word: 100 + number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Split(Regex(r"[\n<|>]"), "isolated"),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    around = [name for name in (begin, end) if name]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(word for word in (begin, "$A", end) if word),
            special_tokens=[(name, vocab[name]) for name in around],
        )
    return _save(folder, tokenizer, template, pad, bos)


def byte_tokenizer(
    folder: Path, *merges: tuple[str, str], template: str | None = CHAT, added: tuple[str, ...] = ()
) -> Path:
    """A folder with a byte-level BPE over the 256 bytes and just these merges; `added` are further tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate([*SPECIAL, *letters])}
    spelled = [tuple(part.replace("\n", "Ċ").replace(" ", "Ġ") for part in pair) for pair in merges]
    for left, right in spelled:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [(left, right) for left, right in spelled]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in added])
    return _save(folder, tokenizer, template, "<pad>", "<bos>")


def _save(folder: Path, tokenizer: Tokenizer, template: str | None, pad: str, bos: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<eos>", "pad_token": pad, "unk_token": "<unk>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    if bos is not None:
        config["bos_token"] = bos
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def turns(*contents: str) -> list[dict[str, str]]:
    """Contents as the turns of user and assistant, one after the other."""
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """A record of `turns`."""
    return {"messages": turns(*contents), **more}


def packed(folder: Path, rows: list[Any], tokenizer: Path, *options: object) -> list[Sequence]:
    """Rows as JSON lines, packed; the ids and labels of the sequences in their order."""
    source = write_lines(folder / "rows.jsonl", rows)
    return packed_file(source, folder / "packed", tokenizer, *options)


def packed_file(source: Path, output: Path, tokenizer: Path, *options: object) -> list[Sequence]:
    """A file, packed: the ids and labels of the sequences in their order."""
    built(source, output, *_options(tokenizer, options))
    return [sequence for _, sequence in sorted(sequences_of(output).items())]


def refused(folder: Path, rows: list[Any], tokenizer: Path, *options: object) -> str:
    """What is said where the rows cannot be packed; the output must not have come to be."""
    output = folder / "refused"
    run = build(write_lines(folder / "rows.jsonl", rows), output, *_options(tokenizer, options))
    assert run.code == 2, (run.out, run.err)
    assert "Traceback" not in run.err
    assert not output.exists()
    return run.err


def _options(tokenizer: Path, options: tuple[object, ...]) -> list[object]:
    return ["--tokenizer", tokenizer, "--max-length", 64, "--max-drop-share", 1, *options]


def targets(sequences: list[Sequence]) -> list[list[int]]:
    """The trained ids of each sequence; a label must be its token."""
    for ids, labels in sequences:
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return [[label for label in labels if label != -100] for _, labels in sequences]


def fates(output: Path) -> list[tuple[str, str | None]]:
    """Status and reason of every line of the sequence table."""
    table = sequence_table(output)
    return list(zip(table["status"], table["reason"], strict=True))
