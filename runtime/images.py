"""What a pack says of its images: a reference, the grid of patches and the place among the tokens of each.

A pack has no pixels. Its column `images` has a text for each sequence, empty where it has none, else JSON:

    [{"grid": [1, 16, 22], "image": "photos/cat.jpg", "start": 15, "tokens": 88}]

so that positions in time, height and width follow from the pack alone, without a model's token ids, and the
order of the pixels is that of the tokens. The price is a text to parse for each sequence with images, about a
thousandth of what it takes to decode one of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from padless.runtime.errors import BatchError

IMAGES = "images"
"""The column's name."""


@dataclass(frozen=True, kw_only=True)
class PackedImage:
    """One image of a sequence."""

    image: str
    """The path or URL that the record gives."""
    grid: tuple[int, int, int]
    """Patches in time (1 for an image), height and width, before any are merged: `image_grid_thw`."""
    start: int
    """Its first token within the sequence."""
    tokens: int
    """Its tokens, all placeholders; patches of a square are merged into each."""

    @property
    def merge_size(self) -> int:
        """The side of the square of patches that share a token."""
        return isqrt(self.grid[0] * self.grid[1] * self.grid[2] // self.tokens)


def write_images(images: Sequence[PackedImage]) -> str:
    """The column's text for a sequence, in ASCII; "" without images."""
    if not images:
        return ""
    found = [{"grid": i.grid, "image": i.image, "start": i.start, "tokens": i.tokens} for i in images]
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def read_images(text: str, length: int) -> list[PackedImage]:
    """The images of a sequence of `length` tokens, in their order.

    Raises BatchError for what `write_images` does not write: no such JSON, a grid that does not give the
    tokens, images that overlap or leave the sequence.
    """
    if not text:
        return []
    end = 0
    found: list[PackedImage] = []
    try:
        for one in json.loads(text):
            grid, start, tokens = one["grid"], one["start"], one["tokens"]
            if type(one["image"]) is not str or not all(type(n) is int for n in (*grid, start, tokens)):
                raise ValueError("a value of another kind")
            t, height, width = grid
            image = PackedImage(image=one["image"], grid=(t, height, width), start=start, tokens=tokens)
            if min(t, height, width, tokens) < 1 or t * height * width != tokens * image.merge_size**2:
                raise ValueError(f"a grid of {t} x {height} x {width} patches for {tokens} tokens")
            if height % image.merge_size or width % image.merge_size:
                raise ValueError(f"a grid of {t} x {height} x {width} patches, {image.merge_size} merged")
            if not end <= start <= length - tokens:
                raise ValueError(f"an image at {start} to {start + tokens} of {length} tokens")
            end = start + tokens
            found.append(image)
    except (ValueError, TypeError, KeyError) as problem:
        raise BatchError(
            f"{IMAGES} has {text[:80]!r} for a sequence of {length} tokens, which does not tell of images "
            f"({problem}); build the folder again"
        ) from None
    return found


def image_positions(
    lengths: NDArray[np.integer], images: Sequence[Sequence[PackedImage]]
) -> NDArray[np.int64]:
    """[4, T] positions of T tokens in N sequences, each from its own start: of text, time, height and width.

    `lengths` [N]; `images` those of each sequence. Row 0 counts the tokens, by which transformers tells
    sequences apart; the others are multimodal rotary positions as Qwen2-VL has them (arXiv 2409.12191,
    section 2.1; get_rope_index of transformers): text counts on alike in all three, an image's tokens stand
    at their place in the grid, and what follows counts on behind the largest of its sides.
    """
    total = int(lengths.sum())
    ends = np.cumsum(lengths, dtype=np.int64)
    text = np.arange(total, dtype=np.int64) - np.repeat(ends - lengths, lengths)
    found = np.repeat(text[None], 4, axis=0)
    for end, length, mine in zip(ends.tolist(), lengths.tolist(), images, strict=True):
        for image in mine:
            start = end - length + image.start
            stop = start + image.tokens
            times, height, width = image.grid
            height, width = height // image.merge_size, width // image.merge_size
            first = int(found[1, start])
            grid = np.indices((times, height, width)).reshape(3, -1)
            found[1:, start:stop] = first + grid
            found[1:, stop:end] -= image.tokens - max(height, width)
    return found
