"""Placeholders repeated as their images ask, and what the folder tells of the images of each sequence.

    <|vision_start|> <|image_pad|> <|vision_end|>  ->  <|vision_start|> <|image_pad|> x 88 <|vision_end|>

The processor does it in the text; here it is done to the ids, which come out the same, since a placeholder is
a token of its own. Images are whole or not there: a conversation is cut at the ends of turns only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from padless.packer.image_rule import ImageRule
from padless.packer.spans import Spanned, join, take
from padless.runtime.format import write_images

if TYPE_CHECKING:
    from padless.packer.prepared import Prepared


def expand(
    rule: ImageRule, prepared: Prepared, spanned: Spanned, order: list[int]
) -> tuple[Spanned, list[int]]:
    """Encoded examples with each placeholder repeated as its image asks; `order` [texts]: their numbers.

    Examples whose placeholders are not as many as their images become bad records, and are left out.
    `prepared.images` is told where each image begins.
    """
    is_image = spanned.ids == rule.token_id
    if not is_image.any() and not prepared.images:
        return spanned, order
    before = np.concatenate([[0], np.cumsum(is_image)])
    counts = np.diff(before[spanned.offsets])
    wanted = np.array([len(prepared.images.get(number, ())) for number in order], dtype=np.int64)
    if (wrong := np.flatnonzero(counts != wanted)).size:
        for place in wrong.tolist():
            prepared.bad(order[place], _mismatch(int(wanted[place]), int(counts[place])))
            prepared.images.pop(order[place], None)
        right = np.flatnonzero(counts == wanted).tolist()
        return expand(rule, prepared, join([take(spanned, n) for n in right]), [order[n] for n in right])
    images = [image for number in order for image in prepared.images.get(number, ())]
    repeats = np.ones(len(spanned.ids), dtype=np.int64)
    repeats[is_image] = [image.tokens for image in images]
    places = np.concatenate([[0], np.cumsum(repeats)])
    found = Spanned(
        np.repeat(spanned.ids, repeats),
        places[spanned.offsets],
        spanned.span_text,
        places[spanned.span_start],
        places[spanned.span_end],
    )
    starts = places[:-1][is_image] - np.repeat(found.offsets[:-1], counts)
    moved = (replace(image, start=start) for image, start in zip(images, starts.tolist(), strict=True))
    for number, count in zip(order, counts.tolist(), strict=True):
        if count:
            prepared.images[number] = [next(moved) for _ in range(count)]
    return found, order


def _mismatch(images: int, placeholders: int) -> str:
    if images and not placeholders:
        return (
            f"it has {images:,} images, for which the chat template writes no placeholder: give the model's "
            "own template (--template FILE)"
        )
    return f"it has {placeholders:,} placeholders of images in its text, and {images:,} images: one for each"


class ImageTexts:
    """The texts of a chunk's sequences for the column of images, until their lines are final."""

    def __init__(self, prepared: Prepared, lines: NDArray[np.void]) -> None:
        """Number the lines that have images by their place among the texts, from 1."""
        self._texts: list[bytes] = []
        pictured = np.isin(lines["record"], list(prepared.images)) & (lines["length"] > 0)
        for line in np.flatnonzero(pictured).tolist():
            length = int(lines["length"][line])
            mine = [i for i in prepared.images[int(lines["record"][line])] if i.start + i.tokens <= length]
            self._texts.append(write_images(mine).encode("ascii"))
            lines["images"][line] = len(self._texts)

    def settle(self, lines: NDArray[np.void]) -> bytes:
        """The texts of the lines that were kept, one after the other; lines then have their bytes."""
        mine = np.where(lines["length"] > 0, lines["images"], 0)
        texts = [self._texts[number - 1] for number in mine[mine > 0].tolist()]
        lines["images"] = 0
        lines["images"][mine > 0] = [len(text) for text in texts]
        return b"".join(texts)
