"""`messages`: a list of turns with role and content, as the chat interfaces have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.errors import RecordError
from padless.packer.formats.conversation import turns_of
from padless.packer.formats.examples import Chat, Columns, Example
from padless.packer.sources.json_text import MalformedError, parse

TOOLS = ("tools",)
"""The role of the column, as `find` takes it."""


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    name = columns.find(row, "messages")
    if name is None:
        return False
    turns = row[name]
    return not (turns and isinstance(turns, list) and isinstance(turns[0], dict) and "from" in turns[0])


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    name, tools = columns.find_all(row, "messages", ("messages",), TOOLS)
    turns = turns_of(row[name] if name is not None else columns.value(row, "messages"), "messages")
    return Chat(turns.messages, tools_of(row, tools), untrained=turns.untrained, weights=turns.weights)


def tools_of(row: Mapping[str, Any], name: str | None) -> list[Any] | None:
    """The column of tools by its name, a list or JSON text; None where it is missing or empty."""
    value = row[name] if name is not None else None
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
    if not all(isinstance(tool, dict) for tool in tools):
        raise RecordError("tools must be a list of objects, each of them a function's schema")
    return [{key: item for key, item in tool.items() if item is not None} for tool in tools]
