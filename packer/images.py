"""Images in conversations: found in the records, measured by their headers, given their tokens.

    {"images": ["cat.jpg"], "messages": [{"role": "user", "content": "<image>What is it?"}, ...]}
    ->  <|vision_start|> <|image_pad|> x 88 <|vision_end|> What is it?

How many tokens an image takes follows from its size by the processor's own rule, so no pixel is decoded: the
template writes one placeholder for each image, and it is repeated once the text is tokenized, as the
processor does it in the text. Images are whole or not there: a conversation is cut at the ends of turns only.
Other processors (fixed tiles, learned queries) have other rules; each would be an entry of PROCESSORS.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.formats.examples import (
    Chat,
    Columns,
    Converted,
    Message,
    Preference,
    Rated,
    RecordError,
    Rollout,
)
from padless.packer.spans import Spanned, join, take
from padless.runtime.format import PackedImage, write_images

if TYPE_CHECKING:
    from padless.packer.prepared import Prepared
    from padless.packer.tokenizer_files import TokenizerFiles

COLUMN = ("images", "image")
"""The column of a record's images, as `find` takes it."""
VIDEOS = ("videos", "video")
TAG = "<image>"
"""Stands in a text where the next image of the column belongs."""
PROCESSORS = tuple(f"Qwen2VLImageProcessor{kind}" for kind in ("", "Fast", "Pil"))
"""Image processors whose rule this is: Qwen2-VL, Qwen2.5-VL and Qwen3-VL share it."""
PLACEHOLDER = "<|image_pad|>"
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

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches in time, height and width of an image of so many pixels.

        The rule is smart_resize of Qwen2-VL's image processor: sides become multiples of patch_size *
        merge_size, and their product lies between min_pixels and max_pixels. Raises RecordError for sides
        that the processor refuses.
        """
        ratio = max(height, width) / min(height, width)
        if ratio > LARGEST_RATIO:
            raise RecordError(
                f"is {height:,} x {width:,} pixels, one side {ratio:,.0f} times the other; the processor takes "
                f"{LARGEST_RATIO}"
            )
        unit = self.patch_size * self.merge_size
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if high * wide > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            high = max(unit, math.floor(height / factor / unit) * unit)
            wide = max(unit, math.floor(width / factor / unit) * unit)
        elif high * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * factor / unit) * unit for side in (height, width))
        return 1, high // self.patch_size, wide // self.patch_size

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Placeholders for a grid of patches."""
        return math.prod(grid) // self.merge_size**2

    def recorded(self) -> dict[str, int]:
        """For the manifest."""
        return dict(vars(self))


def rule_of(files: TokenizerFiles) -> ImageRule | str:
    """The rule of the processor in a tokenizer's folder; or why there is none."""
    if "preprocessor_config.json" in files.contents:
        name = "preprocessor_config.json"
        config = _object(files, name)
    elif "processor_config.json" in files.contents:
        name = "processor_config.json"
        config = _object(files, name).get("image_processor") or {}
    else:
        return f"{files.folder} has no preprocessor_config.json: give the folder of a vision-language model"
    kind = config.get("image_processor_type")
    if kind not in PROCESSORS:
        return f"the image processor in {files.folder} is {kind}; known are {', '.join(PROCESSORS)}"
    size = config.get("size") or {}
    facts: dict[str, Any] = {
        "patch_size": config.get("patch_size", 14),
        "merge_size": config.get("merge_size", 2),
        # The older names go first, as in the processor itself.
        "min_pixels": config.get("min_pixels") or size.get("shortest_edge", 56 * 56),
        "max_pixels": config.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
    }
    for key, value in facts.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{files.folder}/{name} has {key} {value!r}; it is a whole number from 1")
    if config.get("do_resize") is False:
        return f"the image processor in {files.folder} does not resize (do_resize false)"
    text = files.config.get("image_token", PLACEHOLDER)
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


class Placer:
    """Puts the images of a chunk's records into their conversations.

    An image's part then says which of `found` it is: {"type": "image", "image": "3"}; templates write a
    placeholder for it whatever that is.
    """

    def __init__(self, rule: ImageRule | str, folder: str) -> None:
        self.rule = rule
        self.folder = folder
        """Where relative paths begin: a path or a URL."""
        self.found: list[PackedImage] = []
        self._grids: dict[str, tuple[int, int, int]] = {}

    def place(self, found: Converted, row: Mapping[str, Any], columns: Columns) -> Converted:
        """What a record became, with its images; RecordError for one that cannot be read or has no place."""
        name = columns.find(row, *COLUMN)
        given: list[Any] | None = None
        if name is not None:
            value = row[name] if isinstance(self.rule, ImageRule) else row.get(name)
            given = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if isinstance(self.rule, ImageRule) and any(row.get(column) for column in VIDEOS):
            raise RecordError("it has a video, which cannot be packed; give its frames as images, or leave it out")

        def placed(example: Any) -> Any:
            if isinstance(example, Chat):
                return self._chat(example, given)
            if given and isinstance(self.rule, ImageRule):
                raise RecordError(f"{name} go with conversations, and this record is none")
            return example

        if isinstance(found, Preference):
            return Preference(placed(found.chosen), placed(found.rejected))
        if isinstance(found, Rated | Rollout):
            return found._replace(example=placed(found.example))
        one: Converted = placed(found)
        return one

    def _chat(self, chat: Chat, given: list[Any] | None) -> Chat:
        """`given`: what the record's column of images has; None: there is no such column."""
        messages = [_with_parts(turn) if given is not None else turn for turn in chat.messages]
        parts = [part for turn in messages for part in images_in(turn)]
        if not parts and not given:
            return chat
        if not isinstance(self.rule, ImageRule):
            if not parts:  # a column that has nothing to do with the text
                return chat
            raise RecordError(f"it has images, and {self.rule}")
        if not parts and given:
            messages, parts = _in_front(messages, len(given))
        waiting = [part for part in parts if part.get("image") is None]
        if len(waiting) != len(given or ()):
            raise RecordError(
                f"it has {len(given or ()):,} images and {len(waiting):,} places for them ({TAG}, or parts of "
                'type "image"): one place for each'
            )
        rest = iter(given or ())
        numbers: dict[int, str] = {}
        for part in parts:
            numbers[id(part)] = str(len(self.found))
            value = part.get("image")
            self.found.append(self._measured(next(rest) if value is None else value, len(numbers)))
        return chat._replace(
            messages=[
                {
                    **turn,
                    "content": [
                        {"type": "image", "image": numbers[id(p)]} if id(p) in numbers else p
                        for p in turn["content"]
                    ],
                }
                if images_in(turn)
                else turn
                for turn in messages
            ]
        )

    def _measured(self, value: Any, number: int) -> PackedImage:
        assert isinstance(self.rule, ImageRule)
        image = _reference(value, number)
        try:
            if image not in self._grids:
                self._grids[image] = self.rule.grid(*image_size(located(image, self.folder)))
        except RecordError as error:
            raise RecordError(f"image {number} ({image}) {error}") from None
        grid = self._grids[image]
        return PackedImage(image=image, grid=grid, start=0, tokens=self.rule.tokens(grid))


def images_in(turn: Message) -> list[Message]:
    """The parts of a turn that are images."""
    content = turn.get("content")
    return [part for part in content if part["type"] == "image"] if type(content) is list else []


def _with_parts(turn: Message) -> Message:
    """A turn with parts of images where its text has tags."""
    content = turn.get("content")
    if type(content) is not str or TAG not in content:
        return turn
    first, *others = content.split(TAG)
    parts: list[Message] = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**turn, "content": parts}


def _in_front(messages: list[Message], count: int) -> tuple[list[Message], list[Message]]:
    """All images before the first turn of the user, where a record says nothing of their places (as TRL)."""
    number = next((n for n, turn in enumerate(messages) if turn["role"] == "user"), None)
    if number is None:
        raise RecordError(f"it has {count:,} images and no turn of the user to put them into")
    parts: list[Message] = [{"type": "image"} for _ in range(count)]
    turn = messages[number]
    text = [{"type": "text", "text": turn["content"]}] if turn.get("content") else []
    return [*messages[:number], {**turn, "content": [*parts, *text]}, *messages[number + 1 :]], parts


def _reference(value: Any, number: int) -> str:
    """The path or URL that a record gives for an image."""
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            raise RecordError(
                f"image {number} lies in the record itself, and packs have references: write it to a file, and "
                "give its path"
            )
        value = value.get("path") or value.get("url")
    if not isinstance(value, str) or not value:
        raise RecordError(f"image {number} is {type(value).__name__}; it is a path or a URL")
    if value.startswith("data:"):
        raise RecordError(
            f"image {number} is a data: URL, and packs have references: write it to a file, and give its path"
        )
    return value


def located(image: str, folder: str) -> str:
    """Where an image lies; relative paths begin at `folder`, a path or a URL."""
    if "://" in image or os.path.isabs(image):
        return image
    return f"{folder.rstrip('/')}/{image}" if "://" in folder else os.path.join(folder, image)


def image_size(path: str) -> tuple[int, int]:
    """Height and width of an image file, upright as its EXIF data say, from its header alone.

    Raises RecordError where it cannot be read, InputError without the library that does it.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError("images are measured with Pillow: pip install 'padless[vlm]'") from None
    try:
        if "://" in path:
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


def expand(rule: ImageRule, prepared: Prepared, spanned: Spanned, order: list[int]) -> tuple[Spanned, list[int]]:
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
            f"it has {images:,} images, for which the chat template writes no placeholder: give the model's own "
            "template (--template FILE)"
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
