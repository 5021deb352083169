"""How many tokens an image takes: by its size, which its file's header tells, and the processor's own rule.

No pixel is decoded, so a header of some hundred bytes is read for each image. Other processors (fixed tiles,
learned queries) have other rules; what is not in PROCESSORS is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from padless.packer.errors import InputError, RecordError

if TYPE_CHECKING:
    from padless.packer.tokenizer_files import TokenizerFiles

PROCESSORS = tuple(f"Qwen2VLImageProcessor{kind}" for kind in ("", "Fast", "Pil"))
"""Image processors whose rule this is: Qwen2-VL, Qwen2.5-VL and Qwen3-VL share it."""
OF_GLM = tuple(f"{name}ImageProcessor{kind}" for name in ("Glm4v", "Glm46V") for kind in ("", "Fast", "Pil"))
"""Those of GLM-4V and GLM-4.6V: the same rule over as many frames as a patch has."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""In a model's folder; the first that is there counts."""
PLACEHOLDER, PLACEHOLDER_OF_GLM = "<|image_pad|>", "<|image|>"
LARGEST_RATIO = 200
"""Of an image's sides, as the processor refuses it."""
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that exchange height and width."""
_ORIENTATION = 0x0112


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """How many tokens an image takes, by the size of its pixels."""

    token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    frames: int = 0
    """GLM: how often an image's pixels count; its sides are then made a token long first. 0: Qwen."""

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches in time, height and width of an image of so many pixels.

        The rule is smart_resize of Qwen2-VL's image processor, and of GLM-4V's: sides become multiples of
        patch_size * merge_size, and their product lies between min_pixels and max_pixels. Raises RecordError
        for sides that the processor refuses.
        """
        unit = self.patch_size * self.merge_size
        if self.frames and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        ratio = max(height, width) / min(height, width)
        if ratio > LARGEST_RATIO:
            raise RecordError(
                f"is {height:,} x {width:,} pixels, one side {ratio:,.0f} times the other; the processor "
                f"takes {LARGEST_RATIO}"
            )
        times = self.frames or 1
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if times * high * wide > self.max_pixels:
            factor = math.sqrt(times * height * width / self.max_pixels)
            high = max(unit, math.floor(height / factor / unit) * unit)
            wide = max(unit, math.floor(width / factor / unit) * unit)
        elif times * high * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (times * height * width))
            high, wide = (math.ceil(side * factor / unit) * unit for side in (height, width))
        return 1, high // self.patch_size, wide // self.patch_size

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Placeholders for a grid of patches."""
        return math.prod(grid) // self.merge_size**2

    def recorded(self) -> dict[str, int]:
        """For the manifest."""
        return {name: value for name, value in vars(self).items() if name != "frames" or value}


def rule_of(files: TokenizerFiles) -> ImageRule | str:
    """The rule of the processor in a tokenizer's folder; or why there is none."""
    name = next((name for name in PROCESSOR_FILES if name in files.contents), None)
    if name is None:
        return f"{files.folder} has no preprocessor_config.json: give the folder of a vision-language model"
    config = _object(files, name)
    if name == PROCESSOR_FILES[1]:
        config = config.get("image_processor") or {}
    kind = config.get("image_processor_type")
    if kind not in PROCESSORS + OF_GLM:
        return (
            f"the image processor in {files.folder} is {kind}; known are those of Qwen2-VL to Qwen3-VL and "
            f"of GLM-4V ({PROCESSORS[0]}, {OF_GLM[0]}, {OF_GLM[3]}), whose grids tell the tokens"
        )
    size, of_glm = config.get("size") or {}, kind in OF_GLM
    facts: dict[str, Any] = {
        "patch_size": config.get("patch_size", 14),
        "merge_size": config.get("merge_size", 2),
        "min_pixels": size.get("shortest_edge", 112 * 112 if of_glm else 56 * 56),
        "max_pixels": size.get("longest_edge", 28 * 28 * (15000 if of_glm else 1280)),
    }
    if of_glm:
        facts["frames"] = config.get("temporal_patch_size", 2)
    else:  # the older names go first, as in the processor itself
        facts |= {name: config[name] for name in ("min_pixels", "max_pixels") if config.get(name)}
    for key, value in facts.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{files.folder}/{name} has {key} {value!r}; it is a whole number from 1")
    if config.get("do_resize") is False:
        return f"the image processor in {files.folder} does not resize (do_resize false)"
    text = files.config.get("image_token", PLACEHOLDER_OF_GLM if of_glm else PLACEHOLDER)
    token = files.token_id(text) if isinstance(text, str) else None
    if token is None:
        return f"the tokenizer in {files.folder} has no token {text}, which stands for images"
    return ImageRule(token_id=token, **facts)


def _object(files: TokenizerFiles, name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.contents[name])
        if type(found) is dict:
            return found
    except ValueError:
        pass
    raise InputError(f"{files.folder}/{name} is no JSON object: copy it again from the model's folder")


def image_size(path: str | IO[bytes]) -> tuple[int, int]:
    """Height and width of an image (path, URL or open file), upright by its EXIF data, from its header alone.

    Raises RecordError where it cannot be read, InputError without the library that does it.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError("images are measured with Pillow: pip install 'padless[vlm]'") from None
    try:
        if isinstance(path, str) and "://" in path:
            import fsspec

            with fsspec.open(path, "rb") as file, Image.open(file) as image:
                return _upright(image)
        with Image.open(path) as image:
            return _upright(image)
    except FileNotFoundError:
        raise RecordError(
            f"is not there: {path}; relative paths begin where the record's file lies, or at --image-root"
        ) from None
    except Exception as error:  # whatever decoders and file systems raise
        raise RecordError(f"cannot be read: {error}") from None


def _upright(image: Any) -> tuple[int, int]:
    width, height = image.size
    # Of a PNG without such data in front Pillow would decode the pixels to look behind them.
    if image.format in ("JPEG", "MPO", "WEBP") or "exif" in image.info:
        if image.format != "TIFF" and image.getexif().get(_ORIENTATION) in _TURNED:
            return width, height
    return height, width
