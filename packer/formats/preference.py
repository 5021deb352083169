"""Judged answers: pairs of a better and a worse one, or single ones with a label.

    {"prompt": ..., "chosen": ..., "rejected": ...}                 two sequences, tied by pair_id
    {"chosen": [turns], "rejected": [turns], "margin": 1.5}         the prompt is the turns that they share
    {"prompt": ..., "completion": ..., "label": true}               one sequence with its label
    {"messages": [turns], "label": true}                            the same; its last turn is judged

A prompt is never guessed out of two strings, unless they are written as dialogues that say whose turn it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from padless.packer.errors import RecordError
from padless.packer.formats import messages, prompt_completion, sharegpt
from padless.packer.formats.examples import Chat, Columns, Converted, Message, Pair, Preference, Rated
from padless.packer.formats.messages import TOOLS, tools_of
from padless.packer.formats.prompt_completion import PROMPT, joined

LABEL = ("label", "kto_tag")
_MOST_MARGIN = 3e38
"""It is stored as float32."""
_TURN_MARK = "\n\nAssistant:"
"""Where an answer begins in dialogues that are one string (Anthropic's HH-RLHF)."""


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    if "completion" in columns.named:  # whoever names one wants it told from its prompt
        return False
    pair = [columns.find(row, role) for role in ("chosen", "rejected")]
    if all(name is not None and row[name] not in (None, "", []) for name in pair):
        return True
    name = columns.find(row, *LABEL)
    return name is not None and type(row[name]) is bool and _single(row, columns) is not None


def may_be_judged(row: Mapping[str, Any], columns: Columns) -> bool:
    """Whether the label of a single answer is 0 or 1: a verdict, or the number of a class."""
    name = columns.find(row, *LABEL)
    return name is not None and _is_number_of_verdict(row[name]) and _single(row, columns) is not None


def _is_number_of_verdict(label: Any) -> bool:
    return type(label) is int and label in (0, 1)


def convert(row: Mapping[str, Any], columns: Columns) -> Converted:
    if columns.find(row, "chosen") is None and columns.find(row, *LABEL) is not None:
        return _rated(row, columns)
    chosen, rejected = columns.value(row, "chosen"), columns.value(row, "rejected")
    name = columns.find(row, *LABEL)
    if name is not None and (type(row[name]) is bool or _is_number_of_verdict(row[name])):
        raise RecordError(
            f"it has {name} {row[name]!r} beside chosen and rejected, whose names say which is better, so it "
            "would count for nothing: leave it out, or give single answers with a label each"
        )
    tools = tools_of(row, columns.find(row, *TOOLS))
    prompt, chosen, rejected = _prompt(row, columns, chosen, rejected)
    margin = columns.find(row, "margin")
    return Preference(
        joined(prompt, chosen, tools, "chosen"),
        joined(prompt, rejected, tools, "rejected"),
        0.0 if margin is None or row[margin] is None else _margin(row[margin]),
    )


def _margin(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _MOST_MARGIN:
        raise RecordError(f"margin must be a finite number, got {value!r}")
    return float(value)


def _prompt(row: Mapping[str, Any], columns: Columns, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The prompt, and the two answers without it."""
    name = columns.find(row, *PROMPT)
    prompt = row[name] if name is not None else None
    answers = (chosen, rejected)
    if all(_is_conversation(answer) for answer in answers):
        shared = _shared_turns(chosen, rejected)
        if not shared:
            raise RecordError("chosen and rejected are conversations that do not begin with the same turn")
        said = [str(turn.get("content", turn.get("value"))).strip() for turn in chosen[:shared]]
        if isinstance(prompt, str) and prompt.strip() not in said:
            raise RecordError("chosen and rejected are whole conversations, but the prompt is not in them")
        if isinstance(prompt, list) and prompt and chosen[: len(prompt)] != prompt:
            raise RecordError("chosen and rejected are whole conversations that do not begin with the prompt")
        return chosen[:shared], chosen[shared:], rejected[shared:]
    if prompt is not None:
        return prompt, chosen, rejected
    if all(isinstance(answer, str) for answer in answers):
        shared = os.path.commonprefix([chosen, rejected]).rfind(_TURN_MARK)
        if shared >= 0:
            end = shared + len(_TURN_MARK)
            return chosen[:end], chosen[end:], rejected[end:]
    raise RecordError(
        f"no column {' or '.join(PROMPT[:3])}, and chosen and rejected are not both conversations with the "
        f"prompt in them; the record has: {', '.join(map(str, row))}"
    )


def _is_conversation(answer: Any) -> bool:
    """Whether it begins before the assistant's answer."""
    if not isinstance(answer, list) or not answer or not isinstance(answer[0], dict):
        return False
    first: Message = answer[0]
    role = str(first.get("role", first.get("from"))).strip().lower()
    return role in ("user", "human", "system")


def _shared_turns(chosen: list[Any], rejected: list[Any]) -> int:
    """How many leading turns are the same in both, leaving each at least one."""
    most = min(len(chosen), len(rejected)) - 1
    return next((n for n in range(most) if chosen[n] != rejected[n]), most)


def _single(row: Mapping[str, Any], columns: Columns) -> Any:
    """The format that reads the one answer of a labelled record."""
    formats = (prompt_completion, messages, sharegpt)
    return next((one for one in formats if one.matches(row, columns)), None)


def _rated(row: Mapping[str, Any], columns: Columns) -> Rated:
    label = columns.value(row, *LABEL)
    if type(label) is not bool and not _is_number_of_verdict(label):
        raise RecordError(f"label must be true or false (or 1 or 0), got {label!r}")
    one = _single(row, columns)
    if one is None:
        raise RecordError(
            f"no prompt and completion, and no messages; the record has: {', '.join(map(str, row))}"
        )
    example: Chat | Pair = one.convert(row, columns)
    if isinstance(example, Chat) and not example.first_trained:  # the last turn is the one that was judged
        if example.messages[-1]["role"] != "assistant":
            raise RecordError("the last turn is not the assistant's, so there is no answer to judge")
        example = example._replace(first_trained=len(example.messages) - 1)
    return Rated(example, bool(label))
