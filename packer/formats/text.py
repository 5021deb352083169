"""Plain documents: a text source's records, or a `text` column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.formats.examples import Columns, Example, Text, text_of


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    return columns.find(row, "text", "content") is not None


def convert(row: Mapping[str, Any] | str, columns: Columns) -> Example:
    if isinstance(row, str):
        return Text(row)
    return Text(text_of(columns.value(row, "text", "content"), "text"))
