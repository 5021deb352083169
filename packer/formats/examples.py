"""What a record becomes before it is rendered: a chat, a prompt with its completion, a text, or tokens.

Judged records are one or two of these with the judgement that goes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import RecordError

Message = dict[str, Any]


class Chat(NamedTuple):
    """Turns for a chat template."""

    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = 0
    """How many leading turns are only context."""
    untrained: tuple[int, ...] = ()
    """Numbers of the turns that the record itself leaves out of the loss."""
    weights: tuple[tuple[int, float], ...] = ()
    """(turn, weight) of the turns that the record weighs in the loss, neither 0 nor 1."""
    variables: Mapping[str, Any] = {}
    """The record's own variables for the template."""


class Pair(NamedTuple):
    """A prompt and what follows it, as plain strings."""

    prompt: str
    completion: str


class Text(NamedTuple):
    """A document."""

    text: str


class Tokens(NamedTuple):
    """Ids and unshifted labels (-100 where not trained) that somebody tokenized before."""

    input_ids: list[int]
    labels: list[int] | None
    weights: list[float] | None = None
    """Of each token in the loss, none of them 0 where it is trained; None: all 1."""
    teacher: NDArray[np.void] | None = None
    """A teacher's candidates for each token (packer/teacher.py)."""


Example = Chat | Pair | Text | Tokens
_OF_PIXELS = ("image_grid_thw", "pixel_values", "video_grid_thw", "pixel_values_videos")
"""What processors give beside ids in which they have repeated placeholders."""


class Preference(NamedTuple):
    """A better and a worse answer to the same prompt."""

    chosen: Chat | Pair
    rejected: Chat | Pair
    margin: float = 0.0
    """How much better the chosen one is; 0 where nobody says."""


class Rated(NamedTuple):
    """One answer, and whether it is wanted."""

    example: Chat | Pair
    label: bool


class Rollout(NamedTuple):
    """A sampled answer and what its training needs."""

    example: Chat | Pair | Tokens
    values: Mapping[str, list[float] | float]
    """Columns by token: a number for each, or one for all that are trained."""
    reward: float | None
    group: int
    """-1: none."""


Converted = Example | Preference | Rated | Rollout


def changed(found: Converted, change: Callable[[Any], Any]) -> Any:
    """What a record became, with each of its examples changed."""
    if isinstance(found, Preference):
        return found._replace(chosen=change(found.chosen), rejected=change(found.rejected))
    if isinstance(found, Rated | Rollout):
        return found._replace(example=change(found.example))
    return change(found)


def preceded(chat: Chat, turns: list[Message]) -> Chat:
    """The chat with turns before its own."""
    by = len(turns)
    return chat._replace(
        messages=turns + chat.messages,
        first_trained=chat.first_trained + by if chat.first_trained else 0,
        untrained=tuple(number + by for number in chat.untrained),
        weights=tuple((number + by, weight) for number, weight in chat.weights),
    )


class Columns:
    """Role -> the column that plays it: as named by the user, else the first of its usual names."""

    def __init__(self, named: Mapping[str, str]) -> None:
        self.named = dict(named)
        self._found: dict[tuple[Any, ...], tuple[str | None, ...]] = {}

    def find(self, row: Mapping[str, Any], role: str, *usual: str) -> str | None:
        """The column's name in this row, or None."""
        if role in self.named:
            return self.named[role] if self.named[role] in row else None
        return next((name for name in (role, *usual) if name in row), None)

    def find_all(self, row: Mapping[str, Any], what: str, *roles: tuple[str, ...]) -> tuple[str | None, ...]:
        """`find` for several roles at once; `what` names the set of roles.

        Records of one source share their keys, so nearly every answer is there already.
        """
        key = (what, *row)
        found = self._found.get(key)
        if found is None:
            if len(self._found) > 10_000:  # records that share no keys
                self._found.clear()
            found = self._found[key] = tuple(self.find(row, *names) for names in roles)
        return found

    def value(self, row: Mapping[str, Any], role: str, *usual: str) -> Any:
        """The role's value; RecordError naming the columns that are there."""
        name = self.find(row, role, *usual)
        if name is None:
            wanted = self.named.get(role) or " or ".join((role, *usual))
            raise RecordError(f"no column {wanted}; the record has: {', '.join(map(str, row)) or 'none'}")
        return row[name]


def refuse_pixels(row: Mapping[str, Any]) -> None:
    """RecordError for ids that stand for images or videos: as text a model would learn the placeholders."""
    if name := next((name for name in _OF_PIXELS if row.get(name) not in (None, [])), None):
        raise RecordError(
            f"{name} says that some of its ids stand for images or videos, and ids are packed as text: give "
            "the conversation with its images (messages), or pack_sequences them with image_token_id"
        )


def text_of(value: Any, name: str) -> str:
    """A column that must be text: null counts as empty."""
    if value is None:
        return ""
    if type(value) is not str:
        raise RecordError(f"{name} must be text, got {type(value).__name__}")
    return value
