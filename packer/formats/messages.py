"""`messages`: a list of turns with role and content, as the chat interfaces have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.formats.conversation import turns_of
from padless.packer.formats.examples import Chat, Columns, Example, RecordError
from padless.packer.sources.json_text import MalformedError, parse


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    name = columns.find(row, "messages")
    if name is None:
        return False
    turns = row[name]
    return not (turns and isinstance(turns, list) and isinstance(turns[0], dict) and "from" in turns[0])


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    turns = turns_of(columns.value(row, "messages"), "messages")
    return Chat(turns.messages, tools_of(row, columns), untrained=turns.untrained, weights=turns.weights)


def tools_of(row: Mapping[str, Any], columns: Columns) -> list[Any] | None:
    """The `tools` column, a list or JSON text; None where it is missing or empty."""
    name = columns.find(row, "tools")
    value = row[name] if name else None
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value, _ = parse(value.encode())
        except MalformedError as error:
            raise RecordError(f"tools is not valid JSON: {error} at byte {error.position:,}") from error
    if not value:
        return None
    tools = value if isinstance(value, list) else [value]
    return [
        {key: item for key, item in tool.items() if item is not None} if isinstance(tool, dict) else tool
        for tool in tools
    ]
