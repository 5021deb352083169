"""One sampled answer with what its training needs: log-probabilities, advantages, a reward and its group.

    {"prompt_ids": [..], "response_ids": [..], "old_logprobs": [..], "advantages": 0.5, "group_id": 7}
    {"prompt": "..", "response": "..", "advantages": 0.5, "reward": 1, "group_id": 7}

Values by token are one for each id of the response and unshifted. They need the ids that were sampled: a text
that is tokenized again may give others, so beside text only values of the whole answer are taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import xxhash

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat, Columns, Pair, Rollout, Tokens, refuse_pixels
from padless.packer.formats.messages import TOOLS, tools_of
from padless.packer.formats.prompt_completion import COMPLETION, PROMPT, joined

BY_TOKEN = ("old_logprobs", "advantages")
_MASK = "response_mask"
_IGNORED = -100


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    if columns.find(row, "response_ids") is not None:
        return True
    valued = any(columns.find(row, name) is not None for name in BY_TOKEN)
    answered = columns.find(row, *PROMPT) is not None and columns.find(row, *COMPLETION) is not None
    return valued and (answered or columns.find(row, "input_ids") is not None)


def convert(row: Mapping[str, Any], columns: Columns) -> Rollout:
    example, before, size = _example(row, columns)
    values: dict[str, list[float] | float] = {}
    for name in BY_TOKEN:
        column = columns.find(row, name)
        value = row[column] if column is not None else None
        if value is None:
            continue
        if name == "advantages" and not isinstance(value, list):
            values[name] = _number(value, name)
        elif size is None:
            raise RecordError(
                f"{name} are one for each token, and the answer is text: give the response_ids that were "
                "sampled, since the text may be tokenized otherwise"
            )
        else:
            values[name] = [0.0] * before + _list(value, name, size)
    reward = _value(row, columns, "reward")
    group = _value(row, columns, "group_id")
    return Rollout(
        example,
        values,
        None if reward is None else _number(reward, "reward"),
        -1 if group is None else _group(group),
    )


def _example(row: Mapping[str, Any], columns: Columns) -> tuple[Chat | Pair | Tokens, int, int | None]:
    """The tokens or text; how many ids stand before those that lists are of, and how many those are."""
    mask = _value(row, columns, _MASK)
    if any(columns.find(row, name) is not None for name in ("response_ids", "input_ids")):
        refuse_pixels(row)
    if columns.find(row, "response_ids") is not None:
        prompt, answer = _ids(row, columns, "prompt_ids"), _ids(row, columns, "response_ids")
        trained = [1.0] * len(answer) if mask is None else _list(mask, _MASK, len(answer))
        labels = [_IGNORED] * len(prompt) + _masked(answer, trained)
        return Tokens(prompt + answer, labels), len(prompt), len(answer)
    if columns.find(row, "input_ids") is not None:
        ids = _ids(row, columns, "input_ids")
        if mask is None:
            raise RecordError(f"input_ids without a {_MASK}: give it, or prompt_ids and response_ids")
        return Tokens(ids, _masked(ids, _list(mask, _MASK, len(ids)))), 0, len(ids)
    if mask is not None:
        raise RecordError(f"{_MASK} is one for each token, and the answer is text: give the response_ids")
    prompt, answer = columns.value(row, *PROMPT), columns.value(row, *COMPLETION)
    return joined(prompt, answer, tools_of(row, columns.find(row, *TOOLS)), "response"), 0, None


def _masked(ids: list[int], trained: list[float]) -> list[int]:
    if any(one not in (0, 1) for one in trained):
        raise RecordError(f"{_MASK} must be a list of 0 and 1 (or true and false)")
    return [token if one else _IGNORED for token, one in zip(ids, trained, strict=True)]


def _value(row: Mapping[str, Any], columns: Columns, name: str) -> Any:
    column = columns.find(row, name)
    return None if column is None else row[column]


def _ids(row: Mapping[str, Any], columns: Columns, name: str) -> list[int]:
    value = columns.value(row, name)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RecordError(f"{name} must be a list of integers")
    return value


def _list(value: Any, name: str, size: int) -> list[float]:
    if not isinstance(value, list):
        raise RecordError(f"{name} must be a list, a number for each token, got {type(value).__name__}")
    if len(value) != size:
        raise RecordError(f"{name} has {len(value)} entries for {size} tokens: one for each, unshifted")
    return [float(item) if type(item) is bool else _number(item, name) for item in value]


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 3e38:
        raise RecordError(f"{name} must be finite numbers, got {value!r}")
    return float(value)


def _group(value: Any) -> int:
    """A number of 0 or more; a name goes by its hash."""
    if isinstance(value, str):
        return xxhash.xxh3_64_intdigest(value.encode("utf-8", "surrogatepass")) >> 1
    if type(value) is not int or not 0 <= value < 2**63:
        raise RecordError(f"group_id must be a whole number from 0, or a name, got {value!r}")
    return value
