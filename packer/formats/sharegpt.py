"""`conversations`: turns with `from` and `value`, under the role names that are in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.formats.conversation import turns_of
from padless.packer.formats.examples import Chat, Columns, Example
from padless.packer.formats.messages import TOOLS, tools_of

TURNS = ("conversations", "conversation", "messages")


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    if columns.find(row, "conversations", "conversation") is not None:
        return True
    turns = row.get("messages")  # the same turns under the other name
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    name, tools = columns.find_all(row, "sharegpt", TURNS, TOOLS)
    value = row[name] if name is not None else columns.value(row, *TURNS)
    turns, untrained, weights = turns_of(value, "conversations")
    return Chat(turns, tools_of(row, tools), untrained=untrained, weights=weights)
