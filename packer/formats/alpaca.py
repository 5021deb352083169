"""instruction, input, output: one question (its input after a blank line) and one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.formats.examples import Chat, Columns, Example, Pair, text_of

INSTRUCTION = ("instruction", "prompt", "question", "query")
OUTPUT = ("output", "response", "answer", "completion")

CLASSIC_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
CLASSIC = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    return bool(columns.find(row, *INSTRUCTION)) and bool(columns.find(row, *OUTPUT))


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    instruction, given, output = _fields(row, columns)
    question = f"{instruction}\n\n{given}" if given else instruction
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": output}])


def classic(row: Mapping[str, Any], columns: Columns) -> Pair:
    """The same record through the two prompts that the data set was published with."""
    instruction, given, output = _fields(row, columns)
    prompt = CLASSIC_WITH_INPUT if given else CLASSIC
    # replace, not format: braces in the data are text
    head, tail = prompt.split("{instruction}")
    return Pair(head + instruction + tail.replace("{input}", given), output)


def _fields(row: Mapping[str, Any], columns: Columns) -> tuple[str, str, str]:
    given = columns.find(row, "input")
    return (
        text_of(columns.value(row, *INSTRUCTION), "instruction"),
        text_of(row[given], "input") if given else "",
        text_of(columns.value(row, *OUTPUT), "output"),
    )
