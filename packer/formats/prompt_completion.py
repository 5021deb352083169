"""prompt and completion (or question and answer): both strings, or both turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.formats.examples import Chat, Columns, Example, Pair, RecordError, text_of
from padless.packer.formats.messages import tools_of
from padless.packer.formats.sharegpt import turns_from

PROMPT = ("prompt", "question", "query", "conversations", "messages")
COMPLETION = ("completion", "answer", "response")


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    return bool(columns.find(row, *PROMPT)) and bool(columns.find(row, *COMPLETION))


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    prompt, completion = columns.value(row, *PROMPT), columns.value(row, *COMPLETION)
    if not isinstance(prompt, list) and not isinstance(completion, (list, dict)):
        return Pair(text_of(prompt, "prompt"), text_of(completion, "completion"))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(completion, dict):  # one turn that is not in a list
        completion = [completion]
    context, reply = turns_from(prompt, "prompt"), turns_from(completion, "completion")
    if not any(turn["role"] == "assistant" for turn in reply):
        raise RecordError("the completion has no assistant turn")
    return Chat(context + reply, tools_of(row, columns), first_trained=len(context))
