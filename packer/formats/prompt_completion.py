"""prompt and completion (or question and answer): both strings, or both turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.errors import RecordError
from padless.packer.formats.conversation import turns_of
from padless.packer.formats.examples import Chat, Columns, Example, Pair, text_of
from padless.packer.formats.messages import TOOLS, tools_of

PROMPT = ("prompt", "question", "query", "conversations", "messages")
COMPLETION = ("completion", "answer", "response", "output")


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    return bool(columns.find(row, *PROMPT)) and bool(columns.find(row, *COMPLETION))


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    prompt, completion = columns.value(row, *PROMPT), columns.value(row, *COMPLETION)
    return joined(prompt, completion, tools_of(row, columns.find(row, *TOOLS)), "completion")


def joined(prompt: Any, completion: Any, tools: list[Any] | None, name: str) -> Chat | Pair:
    """A prompt and its completion, called `name` in messages, as a pair of strings or as one chat."""
    if not isinstance(prompt, list) and not isinstance(completion, (list, dict)):
        return Pair(text_of(prompt, "prompt"), text_of(completion, name))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(completion, dict):  # one turn that is not in a list
        completion = [completion]
    context, reply = turns_of(prompt, "prompt"), turns_of(completion, name)
    if not any(turn["role"] == "assistant" for turn in reply.messages):
        raise RecordError(f"the {name} has no assistant turn")
    before = len(context.messages)
    return Chat(
        context.messages + reply.messages,
        tools,
        first_trained=before,
        untrained=context.untrained + tuple(before + number for number in reply.untrained),
        weights=context.weights + tuple((before + number, weight) for number, weight in reply.weights),
    )
