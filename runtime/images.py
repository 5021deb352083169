"""What a pack says of its images: a reference, the grid of patches and the place among the tokens of each.

A pack has no pixels. Its column `images` has a text for each sequence, empty where it has none, else JSON:

    [{"grid": [1, 16, 22], "image": "photos/cat.jpg", "start": 15, "tokens": 88}]

so that positions in time, height and width follow from the pack alone, without a model's token ids, and the
order of the pixels is that of the tokens. The price is a text to parse for each sequence with images, about a
thousandth of what it takes to decode one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from padless.runtime.errors import BatchError

_EMBEDDED = re.compile(r"(.*)#(\d+)/([^/]+)/(\d+)", re.DOTALL)
IMAGES = "images"
"""The column's name."""


@dataclass(frozen=True, kw_only=True)
class PackedImage:
    """One image of a sequence."""

    image: str
    """The path or URL that the record gives; of an image in a table what `embedded_image` makes."""
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


class Embedded(NamedTuple):
    """Where an image lies in the records themselves."""

    source: str
    """The source, as the manifest names it."""
    row: int
    column: str
    number: int
    """From 0, among the images of the column's cell."""


def embedded_image(source: str, row: int, column: str, number: int) -> str:
    """What stands for an image that lies in a table: `data/train.parquet#12/images/0`."""
    return f"{source}#{row}/{column}/{number}"


def read_embedded(image: str) -> Embedded | None:
    """Where an image lies in the records; None where it is a path or a URL."""
    found = _EMBEDDED.fullmatch(image)
    return None if found is None else Embedded(found[1], int(found[2]), found[3], int(found[4]))


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
