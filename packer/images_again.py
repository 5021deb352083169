"""Whether the images of a finished folder are still those that it was made with.

A folder does not say where on this machine its images lay, and has references and no checksums of them; what
decides its bytes is how many patches each gives. So a second run measures them again, from their headers. The
records that were dropped are not looked at: those whose image was missing stay so until `--force`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from padless.packer.config import PackConfig
from padless.packer.errors import RecordError
from padless.packer.image_rule import ImageRule, image_size
from padless.packer.images import image_folder, located
from padless.packer.sources import SourceFile
from padless.runtime.format import IMAGES, Manifest, PackedImage, read_embedded, read_images
from padless.runtime.reader import PackedReader


def changed_image(
    config: PackConfig, files: Sequence[SourceFile], manifests: Mapping[str, Manifest], rule: ImageRule
) -> str | None:
    """The first image of the splits of a finished folder that is another one; None: all are as before."""
    folders = [image_folder(config.image_root, number, file.path) for number, file in enumerate(files)]
    seen: set[tuple[int, str]] = set()
    for name, manifest in manifests.items():
        sources = {source.path for source in manifest.sources}
        for source, image in _images(os.path.join(config.output, name), manifest):
            lies_in = read_embedded(image.image)
            if (source, image.image) in seen or (lies_in is not None and lies_in.source in sources):
                continue  # a source's own bytes have a checksum
            seen.add((source, image.image))
            try:
                grid = rule.grid(*image_size(located(image.image, folders[source])))
            except RecordError as problem:
                return f"image {image.image} {problem}"
            if grid != image.grid:
                before, now = (f"{high} x {wide}" for _, high, wide in (image.grid, grid))
                return f"image {image.image} had {before} patches, now {now}"
    return None


def _images(folder: str, manifest: Manifest) -> Iterator[tuple[int, PackedImage]]:
    """The images of a folder's packs, each with the number of its source."""
    if not any(column.name == IMAGES for column in manifest.extras):
        return
    reader = PackedReader(folder)
    sources = reader.sequence_columns("source")["source"]
    for batch in reader.batches():
        lengths, numbers = batch.flat("seq_lengths").tolist(), batch.flat("sequence_ids").tolist()
        for text, length, number in zip(batch.flat(IMAGES), lengths, numbers, strict=True):
            for image in read_images(text, length):
                yield int(sources[number]), image
