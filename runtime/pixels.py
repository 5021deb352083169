"""The pixels of a batch's images, made by the model's own image processor from where the images lie.

    batch = with_pixels(batch, AutoImageProcessor.from_pretrained(model), root="photos")
    loss = model(**batch.to("cuda").model_inputs()).loss

They are made in the loader's process, image by image, after packing: what a folder has is which images, in
which order, and how many tokens each has. An image that has changed since shows here and stops the training,
since its tokens would be another number.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import torch

from padless.runtime.errors import CollateError
from padless.runtime.images import IMAGES, read_embedded
from padless.runtime.varlen_batch import VarlenBatch

__all__ = ["images_in", "open_image", "with_pixels"]


def with_pixels(
    batch: VarlenBatch,
    processor: Any,
    *,
    root: str = "",
    load: Callable[[str], Any] | None = None,
) -> VarlenBatch:
    """The batch with `pixel_values` [patches, values], the images one after the other; itself without images.

    `processor` is an image processor of transformers, or what has one as `image_processor`; `root` a folder
    or URL where relative paths begin. `load` gives the picture (PIL, RGB) of a reference, in place of
    `open_image`. Raises CollateError for an image that cannot be read, or whose grid is not the one that was
    packed.
    """
    images = batch.get(IMAGES) or []
    if not images:
        return batch
    process = getattr(processor, "image_processor", processor)
    pictures = []
    for image in images:
        try:
            pictures.append(open_image(image, root) if load is None else load(image))
        except Exception as problem:  # whatever decoders and file systems raise
            raise CollateError(f"image {image} of a batch cannot be read: {problem}") from problem
    made = process(images=pictures, return_tensors="pt")
    grids = torch.as_tensor(made["image_grid_thw"])
    packed = batch["image_grid_thw"].cpu()
    if grids.shape != packed.shape or not torch.equal(grids.to(packed.dtype), packed):
        apart = [n for n, (a, b) in enumerate(zip(grids.tolist(), packed.tolist(), strict=False)) if a != b]
        number = apart[0] if apart else 0
        raise CollateError(
            f"image {images[number]} has a grid of {grids[number].tolist()} patches and was packed with "
            f"{packed[number].tolist()}: it has changed, or the processor is not the one in the folder's "
            "tokenizer/; build again, or give that one"
        )
    return VarlenBatch({**batch, "pixel_values": torch.as_tensor(made["pixel_values"])})


def open_image(image: str, root: str = "") -> Any:
    """The picture at a path or URL: RGB, upright by its EXIF data, as transformers' load_image gives it.

    Raises whatever Pillow and the file system raise.
    """
    from PIL import Image, ImageOps

    if read_embedded(image) is not None and not os.path.exists(os.path.join(root, image)):
        raise ValueError("it lies in the records: give load=images_in(dataset)")
    if "://" in image or "://" in root:
        import fsspec

        with fsspec.open(image if "://" in image else f"{root.rstrip('/')}/{image}", "rb") as file:
            with Image.open(file) as opened:
                return ImageOps.exif_transpose(opened).convert("RGB")
    with Image.open(os.path.join(root, image)) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")


def images_in(dataset: Any) -> Callable[[str], Any]:
    """For `load` of `with_pixels`: images that lie in the one source that was packed, opened by `datasets`.

    `dataset` gives rows by their number, their images as pictures or as {"bytes", "path"}.
    """
    from PIL import Image, ImageOps

    def load(image: str) -> Any:
        place = read_embedded(image)
        if place is None:
            return open_image(image)
        found = dataset[place.row][place.column]
        found = found[place.number] if isinstance(found, list) else found
        if isinstance(found, dict):
            found = Image.open(io.BytesIO(found["bytes"]))
        return ImageOps.exif_transpose(found).convert("RGB")

    return load
