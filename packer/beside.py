"""What columns beside a format's own say of a record: a system text, earlier turns, template variables.

    {"instruction": ..., "output": ..., "system": "Be brief.", "history": [["Hi", "Hello"]]}
    {"messages": [...], "chat_template_kwargs": {"enable_thinking": false}}

They belong to any format that gives a chat. A pair of strings has no place for a system text or earlier
turns, and a record that would lose them is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from padless.packer.config import is_templates_own
from padless.packer.errors import RecordError
from padless.packer.formats.conversation import turns_of
from padless.packer.formats.examples import (
    Chat,
    Columns,
    Converted,
    Message,
    Pair,
    changed,
    preceded,
    text_of,
)

KWARGS = ("chat_template_kwargs",)
"""A record's own variables for the chat template."""
SYSTEM = ("system", "system_prompt")
"""What the assistant is told before the conversation; a conversation that begins with its own keeps that."""
HISTORY = ("history",)
"""The conversation before a question and its answer: pairs of the two, or turns."""
WHOLE = frozenset({"messages", "sharegpt", "text", "tokenized"})
"""Formats whose records are the whole conversation, or none: what else is called history is none of it."""

Convert = Callable[[Any, Columns], Converted]


def with_columns(convert: Convert, name: str, rows: list[Any], columns: Columns) -> Convert:
    """The conversion of a format, with the columns that stand beside it in some of these records."""
    own = [*(() if name in WHOLE else (HISTORY,)), SYSTEM, KWARGS]
    if name in ("text", "tokenized"):
        own = [KWARGS]
    usual = {columns.named.get(roles[0], one) for roles in own for one in roles}
    if all(type(row) is not dict or usual.isdisjoint(row) for row in rows):
        return convert

    def converted(row: Any, columns: Columns) -> Converted:
        found = convert(row, columns)
        if type(row) is not dict:
            return found
        for roles in own:
            given = _given(row, roles, columns)
            if given is not None:
                found = _ADDED[roles](found, row[given], given)
        return found

    return converted


def _given(row: Mapping[str, Any], roles: tuple[str, ...], columns: Columns) -> str | None:
    """The column that says something, of those that may; RecordError where two say different things."""
    role = roles[0]
    names = (columns.named[role],) if role in columns.named else roles
    filled = [name for name in names if row.get(name) not in (None, "", [])]
    if len({str(row[name]) for name in filled}) > 1:
        raise RecordError(
            f"{' and '.join(filled)} say different things; --column {role}=NAME names the one that is meant"
        )
    return filled[0] if filled else None


def with_system(found: Converted, value: Any, name: str) -> Any:
    """With a system turn first, where a chat has none."""
    text = text_of(value, name)

    def led(example: Any) -> Any:
        if isinstance(example, Chat):
            is_led = example.messages[0]["role"] == "system"
            return example if is_led else preceded(example, [{"role": "system", "content": text}])
        return _without_place(example, name, SYSTEM[0], "a system text")

    return changed(found, led) if text.strip() else found


def with_history(found: Converted, value: Any, name: str) -> Any:
    """With the turns of the conversation so far before a chat's own, as context of what it trains."""
    try:
        turns = _history(value, name)
    except RecordError as problem:
        raise RecordError(f"{problem}; --column {HISTORY[0]}= leaves the column out") from None

    def continued(example: Any) -> Any:
        if isinstance(example, Chat):
            return preceded(example, turns)._replace(first_trained=len(turns) + example.first_trained)
        return _without_place(example, name, HISTORY[0], "earlier turns")

    return changed(found, continued)


def with_variables(found: Converted, value: Any, name: str) -> Any:
    """With its own variables for the chat template: an object, or one as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RecordError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{name} must be an object of template variables, got {type(value).__name__}")
    taken = next(filter(is_templates_own, value), None)
    if taken is not None:
        raise RecordError(f"{name} sets {taken!r}, which padless gives the template itself")
    # Columnar files give every key to every record; one without a value is not there.
    variables = {key: item for key, item in value.items() if item is not None}

    def varied(example: Any) -> Any:
        return example._replace(variables=variables) if isinstance(example, Chat) else example

    return changed(found, varied)


_ADDED: Mapping[tuple[str, ...], Callable[[Converted, Any, str], Any]] = {
    SYSTEM: with_system,
    HISTORY: with_history,
    KWARGS: with_variables,
}


def _history(value: Any, name: str) -> list[Message]:
    """Turns out of pairs of a question and its answer, or out of turns."""
    if isinstance(value, list) and all(isinstance(item, list) for item in value):
        messages: list[Message] = []
        for number, pair in enumerate(value):
            if len(pair) != 2 or not all(type(text) is str for text in pair):
                raise RecordError(f"{name}[{number}] must be a question and its answer, two texts")
            messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        return messages
    turns = turns_of(value, name)
    if turns.untrained or turns.weights:
        raise RecordError(f"{name} says what is trained; that is for the turns of messages")
    return turns.messages


def _without_place(example: Any, name: str, role: str, what: str) -> Any:
    if isinstance(example, Pair):
        raise RecordError(
            f"{name} gives {what}, and a prompt that is a string has no place for it: ask for a chat "
            f"template (--template chatml), or leave the column out with --column {role}="
        )
    return example


def as_chat(example: Converted) -> Any:
    """Pairs of strings as two turns each, when a template was asked for."""
    return changed(example, _two_turns)


def _two_turns(example: Any) -> Any:
    if not isinstance(example, Pair):
        return example
    return Chat(
        [
            {"role": "user", "content": example.prompt},
            {"role": "assistant", "content": example.completion},
        ]
    )
