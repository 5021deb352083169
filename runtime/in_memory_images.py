"""Images of sequences in memory: found by their placeholders, told to the batch as a folder's collate does.

    input_ids       [a s P P P P P P e b]  and image_grid_thw [[1, 4, 6]]   P: image_token_id
      ->  an image of 6 tokens at 2, from which positions in time, height and width follow

Engines that sample for a vision-language model give ids in which the processor has repeated the placeholders,
and the grids beside them; how many patches share a token follows from the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.collate import tell_images
from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.images import IMAGES, PackedImage
from padless.runtime.varlen_batch import VarlenBatch

GRIDS, PIXELS = "image_grid_thw", "pixel_values"
NAMES = (GRIDS, PIXELS, IMAGES)
"""What a sequence may have of images, and need not where others do."""
_OF_VIDEOS = ("video_grid_thw", "pixel_values_videos", "videos")


def refuse_unseen(sequences: Sequence[Mapping[str, Any]], image_token_id: int | None) -> None:
    """CollateError for images whose placeholder nobody named, and for videos."""
    for number, one in enumerate(sequences):
        if image_token_id is None:
            found = next((name for name in (GRIDS, PIXELS) if name in one), None)
            if found := found or (IMAGES if _given(one.get(IMAGES)) else None):
                raise CollateError(
                    f"sequence {number} has {found}: give image_token_id, the id of the model's placeholder "
                    "(model.config.image_token_id)"
                )
        if found := next((name for name in _OF_VIDEOS if one.get(name) is not None), None):
            raise CollateError(f"sequence {number} has {found}: videos are not packed, give frames as images")


def add_images(
    batch: VarlenBatch, sequences: Sequence[Mapping[str, Any]], numbers: Sequence[int], token: int
) -> None:
    """Tell the batch of these sequences what its placeholders (`token`) stand for; none is trained."""
    ids, lengths = batch["input_ids"].numpy()[0], np.diff(batch["cu_seq_lens_q"].numpy())
    ends = np.cumsum(lengths)
    found, pixels, told = [], [], False
    for one, number, end, length in zip(sequences, numbers, ends.tolist(), lengths.tolist(), strict=True):
        mine = _images_of(ids[end - length : end], one, token, f"sequence {number}")
        found.append(mine)
        told = told or bool(mine and one.get(IMAGES) is not None)
        if mine and one.get(PIXELS) is not None:
            pixels.append(_pixels_of(one[PIXELS], mine, f"sequence {number}"))
    if pixels and len(pixels) < sum(map(bool, found)):
        raise CollateError(f"some sequences with images have {PIXELS} and some have none: give all or none")
    tell_images(batch, lengths, found)
    if pixels:
        if len(widths := {values.shape[1] for values in pixels}) > 1:
            raise CollateError(f"{PIXELS} have {sorted(widths)} values a patch: as many in all")
        batch[PIXELS] = torch.cat(pixels)
    batch["labels"].masked_fill_(batch["input_ids"] == token, IGNORE_INDEX)
    batch["num_targets"] = int((batch["labels"] != IGNORE_INDEX).sum())


def _images_of(ids: Array, one: Mapping[str, Any], token: int, whose: str) -> list[PackedImage]:
    grids = _grids_of(one.get(GRIDS), whose)
    places = np.flatnonzero(ids == token)
    if not len(grids) and not len(places):
        if more := next((name for name in (PIXELS, IMAGES) if _given(one.get(name))), None):
            raise CollateError(f"{whose} has {more}, and neither {GRIDS} nor a placeholder (token {token})")
        return []
    patches = grids.prod(axis=1)
    merge = isqrt(int(patches.sum()) // max(len(places), 1))
    tokens = patches // max(merge, 1) ** 2
    if (
        not len(grids)
        or grids.min() < 1
        or merge < 1
        or int(tokens.sum()) != len(places)
        or ((patches % merge**2).any() or (grids[:, 1:] % merge).any())
    ):
        raise CollateError(
            f"{whose} has {len(places):,} placeholders (token {token}) for {len(grids):,} images of "
            f"{grids.tolist()[:4]} patches: give the ids as the processor expands them, with the grids of "
            "the same call"
        )
    names = one.get(IMAGES)
    if names is None:
        names = [""] * len(grids)
        if one.get(PIXELS) is None:
            raise CollateError(f"{whose} has {GRIDS} and neither {PIXELS} nor {IMAGES} to take pixels from")
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise CollateError(f"{IMAGES} of {whose} must be a list of paths or URLs, one for each grid")
    if len(names) != len(grids):
        raise CollateError(f"{whose} has {len(names):,} {IMAGES} for {len(grids):,} grids: one for each")
    found = []
    for name, grid, count, first in zip(
        names, grids.tolist(), tokens.tolist(), (np.cumsum(tokens) - tokens).tolist(), strict=True
    ):
        start = int(places[first])
        if int(places[first + count - 1]) != start + count - 1:
            raise CollateError(f"{whose} has other tokens within an image of {count:,} tokens at {start:,}")
        found.append(PackedImage(image=name, grid=(grid[0], grid[1], grid[2]), start=start, tokens=count))
    return found


def _given(value: Any) -> bool:
    """Whether a sequence has something by a name: not None, and no empty list."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _grids_of(value: Any, whose: str) -> Array:
    """[images, 3] int64."""
    try:
        grids = np.asarray([] if value is None else value)
        if grids.size and grids.dtype.kind not in "iu":
            raise ValueError(f"they are {grids.dtype}")
        return grids.astype(np.int64).reshape(-1, 3)
    except (ValueError, TypeError, RuntimeError) as problem:
        raise CollateError(
            f"{GRIDS} of {whose} must be whole numbers, (time, height, width) for each image: {problem}"
        ) from None


def _pixels_of(values: Any, images: Sequence[PackedImage], whose: str) -> torch.Tensor:
    try:
        pixels = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError) as problem:
        raise CollateError(f"{PIXELS} of {whose} are no tensor: {problem}") from None
    patches = sum(int(np.prod(image.grid)) for image in images)
    if pixels.ndim != 2 or len(pixels) != patches:
        raise CollateError(
            f"{whose} has {PIXELS} {[*pixels.shape]} for grids of {patches:,} patches: one row for each"
        )
    return pixels
