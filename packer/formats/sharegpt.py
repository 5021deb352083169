"""`conversations`: turns with `from` and `value`, under the role names that are in use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from padless.packer.formats.examples import Chat, Columns, Example, Message, RecordError
from padless.packer.formats.messages import tools_of, turns_of

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
    "function_call": "function_call",
    "tool_call": "function_call",
}


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    return columns.find(row, "conversations", "conversation") is not None


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    turns = turns_from(columns.value(row, "conversations", "conversation"), "conversations")
    system = row.get("system")
    if isinstance(system, str) and system and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return Chat(turns, tools_of(row, columns))


def turns_from(value: Any, name: str) -> list[Message]:
    """from/value turns as role/content turns; turns that have a role already pass through."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return turns_of(value, name)
    if not isinstance(value, list) or not value:
        raise RecordError(f"{name} must be a list of turns with from and value")
    turns: list[Message] = []
    for number, turn in enumerate(value):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise RecordError(f"{name}[{number}] must have from and value")
        role = ROLES.get(str(turn["from"]).strip().lower())
        if role is None:
            raise RecordError(f"{name}[{number}] is from {turn['from']!r}; known are {', '.join(ROLES)}")
        content = "" if turn["value"] is None else turn["value"]
        if type(content) is not str:
            raise RecordError(f"{name}[{number}].value must be text, got {type(content).__name__}")
        turns.append(_call(content) if role == "function_call" else {"role": role, "content": content})
    return turns


def _call(text: str) -> Message:
    """A function_call turn: its JSON becomes tool calls; what is no call stays the answer's text."""
    try:
        calls = json.loads(text)
    except ValueError:
        return {"role": "assistant", "content": text}
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return {"role": "assistant", "content": text}
    wrapped = [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": wrapped}
