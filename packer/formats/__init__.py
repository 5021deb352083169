"""Record formats: a new one is a file with `matches` and `convert`, and a line in FORMATS.

FORMATS is ordered, most specific first: `detect` takes the first that matches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.errors import InputError
from padless.packer.formats import (
    alpaca,
    messages,
    prompt_completion,
    sharegpt,
    text,
    tokenized,
)
from padless.packer.formats.examples import Columns

FORMATS = {
    "tokenized": tokenized,
    "messages": messages,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "prompt-completion": prompt_completion,
    "text": text,
}

MIXED = frozenset({"prompt-completion"})
"""Formats whose records may be chats or plain text, one by one."""


def detect(row: Mapping[str, Any] | str, columns: Columns, source: str) -> str:
    """The format's name for a source whose first record this is; InputError where none fits."""
    if isinstance(row, str):
        return "text"
    if "completion" in columns.named:
        order = ["prompt-completion"]  # whoever names a completion wants it told from its prompt
    elif "instruction" in row or "instruction" in columns.named:
        order = [name for name in FORMATS]
    else:
        order = [name for name in FORMATS if name != "alpaca"]
    for name in order:
        if FORMATS[name].matches(row, columns):
            return name
    raise InputError(
        f"{source}: cannot tell its format from its columns ({', '.join(map(str, row)) or 'none'}); "
        f"name it with --format ({', '.join(FORMATS)}) and, where columns have other names, "
        "with --column ROLE=NAME"
    )
