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
    preference,
    prompt_completion,
    rollout,
    sharegpt,
    text,
    tokenized,
)
from padless.packer.formats.examples import Columns

FORMATS = {
    "preference": preference,
    "tokenized": tokenized,
    "messages": messages,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "prompt-completion": prompt_completion,
    "rollout": rollout,
    "text": text,
}

MIXED = frozenset({"preference", "prompt-completion", "rollout"})
"""Formats whose records may be chats or plain text, one by one."""


ROLES = (
    *("instruction", "input", "output", "messages", "conversations", "tools", "prompt", "completion"),
    *("text", "input_ids", "labels", *tokenized.MASKS, "loss_weight", "chosen", "rejected", "label"),
    *("prompt_ids", "response_ids", "response_mask", "old_logprobs", "advantages", "reward", "group_id"),
    *("chat_template_kwargs", "images", "system", "history"),
)
"""What a column can be named for (`--column ROLE=NAME`)."""

ROLLOUT = ("rewards", "advantages", "old_logprobs", "completions")
"""Columns that only rollouts have."""

GIVES_WAY = frozenset({"text"})
"""A column of text beside the columns of another format is that record rendered, or notes on it."""


def detect(row: Mapping[str, Any] | str, columns: Columns, source: str) -> str:
    """The format's name for a source whose first record this is; InputError where none or two fit."""
    if isinstance(row, str):
        return "text"
    if not rollout.matches(row, columns) and any(name in row for name in ROLLOUT):
        raise InputError(
            f"{source}: its columns ({', '.join(map(str, row))}) look like rollouts (answers with rewards), "
            "but have not one answer a record: give each its own, as prompt_ids and response_ids or as "
            "prompt and response; to take them as plain records, name another --format "
            f"({', '.join(FORMATS)})"
        )
    fitting = _fitting(row, columns)
    if fitting and "preference" not in fitting and preference.may_be_judged(row, columns):
        raise InputError(
            f"{source}: its label is a number ({', '.join(map(str, row))}), a verdict on the answer or the "
            f"number of a class; say which with --format preference or --format {fitting[0]}"
        )
    if len(fitting) > 1:  # columns that are empty say nothing
        filled = {name: value for name, value in row.items() if value not in (None, "", [])}
        fitting = _fitting(filled, columns) or fitting
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(map(str, row)) or "none"
    if len(fitting) > 1:
        raise InputError(
            f"{source}: its columns ({listed}) fit more than one format; name the one that is meant with "
            f"--format ({' or '.join(fitting)})"
        )
    raise InputError(
        f"{source}: cannot tell its format from its columns ({listed}); "
        f"name it with --format ({', '.join(FORMATS)}) and, where columns have other names, "
        "with --column ROLE=NAME"
    )


def _fitting(row: Mapping[str, Any], columns: Columns) -> list[str]:
    """The formats that the columns fit, but for those that give way to another."""
    if "completion" in columns.named:  # whoever names a completion wants it told from its prompt
        return ["prompt-completion"] if FORMATS["prompt-completion"].matches(row, columns) else []
    found = [name for name, one in FORMATS.items() if one.matches(row, columns)]
    for name in ("rollout", "preference", "tokenized"):  # what it was made from may stand beside it
        if name in found:
            return [name]
    if len(found) > 1:
        found = [name for name in found if name not in GIVES_WAY]
    if {"alpaca", "prompt-completion"}.issubset(found):  # they share names, but not all
        names = {*row, *columns.named}
        is_alpaca = "instruction" in names
        if not (is_alpaca and names & {"prompt", "question", "query"}):
            found.remove("prompt-completion" if is_alpaca else "alpaca")
    return found
