"""Whether the images that a packed folder tells of are those that its tokens have a place for.

One pass over the shards in numpy, and a text to parse for each sequence with images; the files of the images
are not looked at, which may lie elsewhere by now.
"""

from __future__ import annotations

import numpy as np

from padless.runtime.format import IGNORE_INDEX, IMAGES, FormatError, read_images
from padless.runtime.reader import PackedReader


def images_of_placeholders(reader: PackedReader) -> str:
    """See that every placeholder belongs to an image, every image has its own, and none is trained.

    Raises FormatError naming the sequence, and what reading a batch raises.
    """
    rule = reader.manifest.options.get("image_rule")
    rule = rule if isinstance(rule, dict) else {}
    token, merge = rule.get("token_id"), rule.get("merge_size")
    count = 0
    for batch in reader.batches():
        ids, labels = batch.flat("input_ids"), batch.flat_labels()
        ends = np.cumsum(batch.flat("seq_lengths"), dtype=np.int64)
        within = np.zeros(len(ids), dtype=bool)
        texts = zip(
            batch.flat(IMAGES), ends, batch.flat("seq_lengths"), batch.flat("sequence_ids"), strict=True
        )
        for text, end, length, number in texts:
            if type(text) is not str:
                raise FormatError(f"{IMAGES} is no text for each sequence")
            for image in read_images(text, int(length)):
                mine = slice(end - length + image.start, end - length + image.start + image.tokens)
                within[mine] = True
                count += 1
                if merge is not None and image.merge_size != merge:
                    raise FormatError(
                        f"sequence {number} has {image.tokens} tokens for a grid of {image.grid}, which "
                        f"merges {image.merge_size} x {image.merge_size} patches, not {merge} x {merge}"
                    )
                if (ids[mine] != (ids[mine.start] if token is None else token)).any():
                    raise FormatError(f"sequence {number} has other tokens where image {image.image} stands")
        if (labels[within] != IGNORE_INDEX).any():
            raise FormatError("a placeholder of an image is trained")
        if token is not None and (lost := int(((ids == token) & ~within).sum())):
            raise FormatError(f"{lost:,} placeholders (token {token}) belong to no image")
    return f"{count:,} images, each with its placeholders"
