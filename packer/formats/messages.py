"""`messages`: a list of turns with role and content, as the chat interfaces have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from padless.packer.formats.examples import Chat, Columns, Example, Message, RecordError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which data sets keep a turn's reasoning; the first with a value counts."""


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    name = columns.find(row, "messages")
    if name is None:
        return False
    turns = row[name]
    return not (turns and isinstance(turns, list) and isinstance(turns[0], dict) and "from" in turns[0])


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    return Chat(turns_of(columns.value(row, "messages"), "messages"), tools_of(row, columns))


def turns_of(value: Any, name: str) -> list[Message]:
    """Checked turns; keys without a value are left out, so that null and missing are the same.

    RecordError naming the turn that has no role, or neither content nor tool calls.
    """
    if not isinstance(value, list) or not value:
        raise RecordError(f"{name} must be a list of turns, got {_kind(value)}")
    turns: list[Message] = []
    for number, turn in enumerate(value):
        if not isinstance(turn, dict) or type(turn.get("role")) is not str:
            raise RecordError(f"{name}[{number}] must have a role and a content, got {_kind(turn)}")
        if len(turn) == 2 and type(turn.get("content")) is str:
            turns.append(turn)
            continue
        turn = {key: item for key, item in turn.items() if item is not None}
        reasoning = next((turn[name] for name in REASONING if name in turn), None)
        if reasoning is not None:  # templates read it under one of two names, as transformers gives it
            turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
        if "content" not in turn and not turn.get("tool_calls"):
            raise RecordError(f"{name}[{number}] ({turn['role']}) has no content")
        turns.append(turn)
    return turns


def tools_of(row: Mapping[str, Any], columns: Columns) -> list[Any] | None:
    """The `tools` column, a list or JSON text; None where it is missing or empty."""
    name = columns.find(row, "tools")
    value = row[name] if name else None
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RecordError(f"tools is not valid JSON: {error}") from error
    if not value:
        return None
    return value if isinstance(value, list) else [value]


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value)) or 'no keys'}"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "null" if value is None else type(value).__name__
