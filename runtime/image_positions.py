"""Positions in time, height and width for packed tokens, from what the pack tells of its images.

    sequence  a [img 2 x 3] b     text    0 1 2 3 4 5 6 7
                                  time    0 1 1 1 1 1 1 4
                                  height  0 1 1 1 2 2 2 4
                                  width   0 1 2 3 1 2 3 4

A model would find the images by their token ids and start anew at each row of the batch; here the places are
known, and every sequence starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from padless.runtime.images import PackedImage


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
