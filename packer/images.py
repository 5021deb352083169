"""The images of conversations: found in the records, measured, and put where the template looks for them.

    {"images": ["cat.jpg"], "messages": [{"role": "user", "content": "<image>What is it?"}, ...]}
    ->  [{"type": "image", "image": "0"}, {"type": "text", "text": "What is it?"}]

Image 0 is kept beside the conversation with its path and grid; templates write a placeholder for it whatever
it is called. The common spellings are understood; where a record says nothing of a place, images stand before
the user's first turn, as TRL has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat, Columns, Converted, Message, Preference, Rated, Rollout
from padless.packer.image_rule import ImageRule, image_size
from padless.packer.sources.embedded import FIELDS, OUTSIDE, UNREADABLE
from padless.runtime.format import PackedImage, embedded_image

COLUMN = ("images", "image")
"""The column of a record's images, as `find` takes it."""
VIDEOS = ("videos", "video")
TAG = "<image>"
"""Stands in a text where the next image of the column belongs."""
_TAG_OF_VIDEOS = "<video>"
_NO_VIDEOS = "it has a video, which cannot be packed; give its frames as images, or leave it out"


class Placer:
    """Puts the images of a chunk's records into their conversations.

    An image's part then says which of `found` it is: {"type": "image", "image": "3"}; templates write a
    placeholder for it whatever that is.
    """

    def __init__(self, rule: ImageRule | str, folder: str, source: str) -> None:
        self.rule = rule
        self.source = source
        self.folder = folder
        """Where relative paths begin: a path or a URL."""
        self.found: list[PackedImage] = []
        self._grids: dict[str, tuple[int, int, int]] = {}

    def place(self, found: Converted, row: Mapping[str, Any], columns: Columns, number: int) -> Converted:
        """What record `number` of a table became, with its images.

        RecordError for an image that cannot be read or has no place.
        """
        name = columns.find(row, *COLUMN)
        given: list[Any] | None = None
        if name is not None:
            value = row[name] if isinstance(self.rule, ImageRule) else row.get(name)
            given = value if isinstance(value, list) else [] if value in (None, "") else [value]
            given = [self._embedded(one, number, name, place) for place, one in enumerate(given)]
        videos = any(row.get(column) for column in VIDEOS)
        if videos and isinstance(self.rule, ImageRule):
            raise RecordError(_NO_VIDEOS)

        def placed(example: Any) -> Any:
            if videos and _TAG_OF_VIDEOS in str(example):  # a model of text would learn the tag
                raise RecordError(_NO_VIDEOS)
            if isinstance(example, Chat):
                return self._chat(example, given)
            if given and isinstance(self.rule, ImageRule):
                raise RecordError(f"{name} go with conversations, and this record is none")
            return example

        if isinstance(found, Preference):
            return found._replace(chosen=placed(found.chosen), rejected=placed(found.rejected))
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
                f"it has {len(given or ()):,} images and {len(waiting):,} places for them ({TAG}, or parts "
                'of type "image"): one place for each'
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

    def _embedded(self, value: Any, number: int, column: str, place: int) -> Any:
        """An image of a table, by where it lies; anything else as it is."""
        if not isinstance(value, Mapping) or set(value) != set(FIELDS) or value["height"] == OUTSIDE:
            return value
        image = embedded_image(self.source, number, column, place)
        if value["height"] == UNREADABLE:
            raise RecordError(f"image {place + 1} ({image}) cannot be read: its bytes are no image")
        if isinstance(self.rule, ImageRule):
            try:
                self._grids[image] = self.rule.grid(value["height"], value["width"])
            except RecordError as error:
                raise RecordError(f"image {place + 1} ({image}) {error}") from None
        return image

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
                f"image {number} lies in the record itself, and packs have references: write it to a file, "
                "and give its path"
            )
        value = value.get("path") or value.get("url")
    if not isinstance(value, str) or not value:
        kind = "an empty text" if value == "" else type(value).__name__
        raise RecordError(f"image {number} is {kind}; it is a path or a URL")
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


def image_folder(root: str | tuple[str, ...] | None, source: int, path: str) -> str:
    """Where the relative paths of a source begin, which lies at a path: `--image-root`, if it is given."""
    if root is None:
        return os.path.dirname(path)
    return root[source] if isinstance(root, tuple) else root
