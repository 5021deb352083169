"""Turns as data sets write them, checked and in one form: role, content, and what else a template reads.

    {"from": "gpt", "value": "Hi", "train": false}  ->  {"role": "assistant", "content": "Hi"}, untrained

Both ways of naming the keys are understood, turn by turn. What would be lost in silence is refused instead:
content that is neither text nor parts of text and images, and flags that sound like a loss mask but are not
known.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import Any, NamedTuple

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Message
from padless.packer.sources.json_text import MalformedError, parse

CALL = "function_call"
"""The role of a turn that is the JSON of a call."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}
"""The senders that `from` may name, and the roles they play."""

SPELLINGS = {name: role for name, role in ROLES.items() if role in ("user", "assistant", "system")}
"""Other spellings of a `role`; a role that is none of these is for the template to know."""

AS_THEY_ARE = ("user", "assistant", "system", "tool")
"""Roles of turns that need nothing where they have a text and nothing else."""

CALLS = ("tool_calls", "function_call")
"""Names under which data sets keep the calls of a turn, now and before there could be several."""

ARGUMENTS = ("arguments", "parameters")
"""Names under which a call that is JSON keeps what it calls with."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which data sets keep a turn's reasoning; the first with a value counts."""

WEIGHTS = ("weight", "loss_weight")
"""Keys of a turn that say how much it counts in the loss: 0 not at all, 1 as any other."""
FLAGS = ("train", *WEIGHTS)
"""Keys of a turn that say whether it is trained; `train` is 1 or true, 0 or false."""
MOST_WEIGHT = 3.4e38
"""Weights are stored as float32."""

IMAGE_PARTS = ("image", "image_url")
"""Types of content parts that are images, and names for what they show."""
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""What Qwen's own loader lets a part say of its size."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text."""

_LIKE_A_FLAG = re.compile("train|loss|learn|supervis|mask|weight", re.IGNORECASE)


class Turns(NamedTuple):
    """Turns in the form that templates take, and the numbers of those that are not to be trained."""

    messages: list[Message]
    untrained: tuple[int, ...] = ()
    weights: tuple[tuple[int, float], ...] = ()


def turns_of(value: Any, name: str) -> Turns:
    """Checked turns; keys without a value are left out, so that null and missing are the same.

    RecordError naming the turn, the field and what is wrong with it.
    """
    if not isinstance(value, list) or not value:
        raise RecordError(f"{name} must be a list of turns, got {_kind(value)}")
    turns: list[Message] = []
    untrained: list[int] = []
    weights: list[tuple[int, float]] = []
    for number, turn in enumerate(value):
        if type(turn) is dict and len(turn) == 2:  # nearly all: little or nothing to do
            if type(turn.get("content")) is str and turn.get("role") in AS_THEY_ARE:
                turns.append(turn)
                continue
            sender, content = turn.get("from"), turn.get("value")
            if type(sender) is str and type(content) is str and (role := ROLES.get(sender)):
                if role != CALL:
                    turns.append({"role": role, "content": content})
                else:
                    turns.append(_call(content, f"{name}[{number}]"))
                continue
        where = f"{name}[{number}]"
        message, weight = _turn(turn, where)
        turns.append(message)
        if weight == 0:
            untrained.append(number)
        elif weight != 1:
            weights.append((number, weight))
    return Turns(turns, tuple(untrained), tuple(weights))


def _turn(turn: Any, where: str) -> tuple[Message, float]:
    """One turn, and its weight in the loss."""
    if not isinstance(turn, dict):
        raise RecordError(f"{where} must have a role and a content, got {_kind(turn)}")
    turn = {key: item for key, item in turn.items() if item is not None or key == "value"}
    if "role" not in turn and "from" in turn:
        turn = _renamed(turn, where)
    elif "role" not in turn:
        raise RecordError(f"{where} must have a role and a content, got {_kind(turn)}")
    elif type(turn["role"]) is not str:
        raise RecordError(f"{where}.role must be text, got {_kind(turn['role'])}")
    else:
        turn.pop("value", None)
        turn["role"] = SPELLINGS.get(turn["role"].strip().lower(), turn["role"])
    reasoning = next((turn[name] for name in REASONING if name in turn), None)
    if reasoning is not None:  # templates read it under one of two names, as transformers gives it
        if type(reasoning) is not str:
            reasoning = _content(reasoning, f"{where}'s reasoning")
            if type(reasoning) is not str:
                raise RecordError(f"{where}'s reasoning has images; reasoning is text")
            turn["thinking"] = reasoning
        turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    weight = _weight(turn, where)
    if turn.get("tool_calls"):
        _check_calls(turn, where)
        turn.setdefault("content", "")  # null beside calls is empty
    elif "content" not in turn:
        raise RecordError(f"{where} ({turn['role']}) has no content")
    if type(turn["content"]) is not str:
        turn["content"] = _content(turn["content"], f"{where}.content")
    return turn, weight


def _renamed(turn: Message, where: str) -> Message:
    """A turn with from and value as one with role and content."""
    if "value" not in turn:
        raise RecordError(f"{where} must have from and value")
    role = ROLES.get(str(turn["from"]).strip().lower())
    if role is None:
        raise RecordError(f"{where} is from {turn['from']!r}; known are {', '.join(ROLES)}")
    content = "" if turn["value"] is None else turn["value"]
    if type(content) is not str:
        content = _content(content, f"{where}.value")
    # Of the other keys only those that mean something here: templates know no `from`.
    more = {key: item for key, item in turn.items() if key in (*REASONING, *CALLS) or _is_flag(key, item)}
    if role != CALL:
        return {"role": role, "content": content} | more
    if type(content) is not str:
        raise RecordError(f"{where} is a call with images; a call is text")
    return _call(content, where) | more


def _check_calls(turn: Message, where: str) -> None:
    """RecordError for calls that a template would leave out, or print as something else."""
    calls = turn["tool_calls"]
    if turn["role"] in ("user", "system", "tool"):
        raise RecordError(
            f"{where}.tool_calls are of a turn of {turn['role']}; only the assistant calls tools"
        )
    if not isinstance(calls, list):
        raise RecordError(f"{where}.tool_calls must be a list of calls, got {_kind(calls)}")
    for number, call in enumerate(calls):
        function = (call.get("function") or call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or type(function.get("name")) is not str:
            raise RecordError(
                f"{where}.tool_calls[{number}] must be an object with the name of a function, "
                f"got {_kind(function)}"
            )


def _weight(turn: Message, where: str) -> float:
    """A turn's weight in the loss; takes the flags out, which no template is to see."""
    weight = 1.0
    for key in [key for key, item in turn.items() if _is_flag(key, item)]:
        value = turn.pop(key)
        if key not in FLAGS:
            raise RecordError(
                f"{where} has {key!r}, which sounds like a loss mask but is not known; a turn is left out of "
                f"the loss by {', '.join(FLAGS)} with 0 or false"
            )
        number = value if type(value) in (bool, int, float) else -1
        if key not in WEIGHTS and number not in (0, 1):
            raise RecordError(f"{where}.{key} must be 0 or 1 (or false and true), got {value!r}")
        if not (number == 0 or 1 / MOST_WEIGHT <= number <= MOST_WEIGHT):
            raise RecordError(f"{where}.{key} must be a weight from 0 to {MOST_WEIGHT:.1e}, got {value!r}")
        if value and turn["role"] != "assistant":
            raise RecordError(
                f"{where}.{key} asks to train a turn of {turn['role']}; only the assistant's can be"
            )
        weight *= number
    return weight


def _is_flag(key: Any, value: Any) -> bool:
    if key in FLAGS:
        return True
    if type(value) not in (bool, int, float, list) or type(key) is not str:
        return False
    return _sounds_like_a_flag(key)


@lru_cache(1024)  # records share their keys
def _sounds_like_a_flag(key: str) -> bool:
    return bool(_LIKE_A_FLAG.search(key) or difflib.get_close_matches(key.lower(), FLAGS[:1], cutoff=0.8))


def _content(content: Any, where: str) -> str | list[Message]:
    """Content parts as the text they are put together, or where images are among them as parts."""
    if not isinstance(content, list):
        raise RecordError(
            f"{where} must be text or a list of text parts, got {_kind(content)}; "
            "write what is not text as JSON text"
        )
    found: list[Message] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS:
            found.append(_image(part, f"{where}[{number}]"))
        elif kind in TEXT_PARTS and type(part.get("text")) is str:
            found.append({"type": "text", "text": part["text"]})
        else:
            given = f"of type {kind!r}" if kind is not None else _kind(part)
            raise RecordError(
                f"{where}[{number}] is {given}; only parts of text and images are packed "
                '({"type": "text", "text": ...}, {"type": "image", "image": PATH}), no video, sound or files'
            )
    if any(part["type"] == "image" for part in found):
        return found
    return "".join(part["text"] for part in found)


def _image(part: Message, where: str) -> Message:
    """A part that is an image, its path or URL under one name; without, where the record has it elsewhere."""
    if sized := next((name for name in SIZES if part.get(name) is not None), None):
        raise RecordError(
            f"{where} sets {sized} for itself; the size of images follows from preprocessor_config.json, for "
            "all alike"
        )
    value = next((part[name] for name in IMAGE_PARTS + ("path", "url") if part.get(name) is not None), None)
    return {"type": "image"} if value is None else {"type": "image", "image": value}


def _call(text: str, where: str) -> Message:
    """A function_call turn: its JSON becomes tool calls; what is no call stays the answer's text."""
    try:
        calls, _ = parse(text.encode())
    except MalformedError:
        return {"role": "assistant", "content": text}
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and type(call.get("name")) is str for call in calls):
        return {"role": "assistant", "content": text}
    wrapped = []
    for call in calls:
        others = call.keys() - {"name", "id", "type"}
        if others and others.isdisjoint(ARGUMENTS):
            raise RecordError(
                f"{where} is a call of {call['name']} with {', '.join(sorted(others))} and no arguments, so "
                "that would be lost"
            )
        arguments: Any = next((call[name] for name in ARGUMENTS if name in call), {})
        function = {"name": call["name"], "arguments": arguments}
        wrapped.append({"type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": wrapped}


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value)) or 'no keys'}"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "null" if value is None else type(value).__name__
