"""Records to ids and labels the slow, obvious way, by transformers: what the packer must equal.

Independent of the packer by design: nothing of padless is imported, and speed is of no concern. A
record becomes messages (or a prompt and its completion), transformers renders and encodes it once,
and the mask is transformers' own where there is one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

IGNORED = -100

Record = dict[str, Any]
Message = dict[str, Any]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One sequence: ids, and unshifted labels of the same length."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """What a chat template is given."""

    messages: list[Message]
    tools: list[Record] | None = None


def alpaca_chat(record: Record) -> Chat:
    """instruction, then input after a blank line if there is one; the output answers."""
    question = record["instruction"]
    if record["input"]:
        question = question + "\n\n" + record["input"]
    return Chat(
        messages=[
            {"role": "user", "content": question},
            {"role": "assistant", "content": record["output"]},
        ]
    )


def messages_chat(record: Record) -> Chat:
    """Messages are taken as they are."""
    return Chat(messages=record["messages"])


def sharegpt_message(turn: Record) -> Message:
    """`from` and `value` to role and content; a function call is an assistant turn without text."""
    if turn["from"] == "function_call":
        call = json.loads(turn["value"])
        function = {"name": call["name"], "arguments": call["arguments"]}
        calls = [{"type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def sharegpt_chat(record: Record) -> Chat:
    """`conversations`, and `tools` as JSON text; an empty list of tools is no tools."""
    tools = json.loads(record["tools"]) if "tools" in record else []
    messages = [sharegpt_message(turn) for turn in record["conversations"]]
    return Chat(messages=messages, tools=tools or None)


def chosen_chat(record: Record) -> Chat:
    """A preference pair's better half: the conversation with the chosen answer."""
    turns = [*record["conversations"], record["chosen"]]
    return Chat(messages=[sharegpt_message(turn) for turn in turns])


def chat_tokens(tokenizer: Any, template: str, chat: Chat) -> Tokens:
    """A chat through a template with generation blocks; the assistant's turns are trained."""
    encoded = tokenizer.apply_chat_template(
        chat.messages,
        tools=chat.tools,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    trained = [bool(mark) for mark in encoded["assistant_masks"]]
    return _labelled(encoded["input_ids"], trained)


def completion_tokens(tokenizer: Any, prompt: str, completion: str) -> Tokens:
    """Prompt and completion encoded as one text, then the end token; the completion is trained.

    A token that lies across the seam is part of the completion: what it adds is predicted with it.
    The begin token is there where the tokenizer puts one.
    """
    encoded = tokenizer(prompt + completion, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    trained = [end > len(prompt) for _, end in offsets]
    return _labelled([*ids, tokenizer.eos_token_id], [*trained, True])


def _labelled(ids: list[int], trained: list[bool]) -> Tokens:
    labels = [token if on else IGNORED for token, on in zip(ids, trained, strict=True)]
    # Nothing comes before a sequence's first token, so nothing can predict it.
    return Tokens(input_ids=ids, labels=[IGNORED, *labels[1:]])


def last_turn_only(tokens: Tokens) -> Tokens:
    """The same sequence with only its last run of trained tokens trained."""
    labels = list(tokens.labels)
    place = len(labels) - 1
    while labels[place] == IGNORED:
        place -= 1
    while labels[place] != IGNORED:
        place -= 1
    return Tokens(input_ids=tokens.input_ids, labels=[IGNORED] * place + labels[place:])
