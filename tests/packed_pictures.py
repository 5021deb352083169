"""Records with pictures, packed with a vision tokenizer, and what folders tell of their images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from building import (
    assert_verified,
    build,
    built,
    sequences_of,
    write_lines,
)
from pictures import (
    IMAGE_PAD,
    QWEN25,
    VISION_END,
    VISION_START,
    vision_tokenizer,
)
from toys import ASSISTANT, END, NEWLINE, START, USER

from padless.runtime.format import PackedImage, read_images
from padless.runtime.reader import PackedReader

HEAD, TAIL = [START, USER, NEWLINE], [END, NEWLINE]
ANSWER = [START, ASSISTANT, NEWLINE, 20, END, NEWLINE]


def see(tokens: int) -> list[int]:
    """An image of so many tokens."""
    return [VISION_START, *[IMAGE_PAD] * tokens, VISION_END]


def packed(folder: Path, rows: list[Any], *options: object) -> list[tuple[list[int], list[int]]]:
    """Rows packed with the vision tokenizer; ids and labels of the sequences in their order."""
    source = write_lines(folder / "rows.jsonl", rows)
    built(source, folder / "packed", *with_tokenizer(folder), *options)
    assert_verified(folder / "packed")
    return [sequence for _, sequence in sorted(sequences_of(folder / "packed").items())]


def with_tokenizer(folder: Path, processor: dict[str, Any] | None = QWEN25) -> list[object]:
    tokenizer = vision_tokenizer(folder / "tokenizer", processor=processor)
    return ["--tokenizer", tokenizer, "--max-length", 64, "--max-drop-share", 1]


def refused(folder: Path, rows: list[Any], *options: object) -> str:
    """What is said where the rows cannot be packed."""
    source = write_lines(folder / "rows.jsonl", rows)
    run = build(source, folder / "refused", *with_tokenizer(folder), *options)
    assert run.code == 2 and "Traceback" not in run.err, (run.out, run.err)
    assert not (folder / "refused").exists()
    return run.err


def images_of(folder: Path) -> dict[int, list[PackedImage]]:
    """By its number: what the folder tells of each sequence's images."""
    return {
        int(number): read_images(text, int(length))
        for one in PackedReader(folder)
        for number, text, length in zip(one.sequence_ids, one.extras["images"], one.seq_lengths, strict=True)
    }
