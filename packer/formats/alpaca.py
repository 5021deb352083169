"""instruction, input, output: one question (its input after a blank line) and one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.packer.formats.examples import Chat, Columns, Example, Pair, text_of
from padless.packer.formats.messages import TOOLS, tools_of

INSTRUCTION = ("instruction", "prompt", "question", "query")
INPUT = ("input", "context")
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
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return Chat(turns, tools_of(row, columns.find_all(row, "tools", TOOLS)[0]))


def classic(row: Mapping[str, Any], columns: Columns) -> Pair:
    """The same record through the two prompts that the data set was published with."""
    instruction, given, output = _fields(row, columns)
    # replace, not format: braces in the data are text
    head, tail = (CLASSIC_WITH_INPUT if given else CLASSIC).split("{instruction}")
    return Pair(head + instruction + tail.replace("{input}", given), output)


def _fields(row: Mapping[str, Any], columns: Columns) -> tuple[str, str, str]:
    names = columns.find_all(row, "alpaca", INSTRUCTION, INPUT, OUTPUT)
    instruction_name, input_name, output_name = names
    if instruction_name is None or output_name is None:
        columns.value(row, *INSTRUCTION)
        columns.value(row, *OUTPUT)
        raise AssertionError("one of the two raises")
    instruction, output = row[instruction_name], row[output_name]
    given = row[input_name] if input_name is not None else ""
    if type(instruction) is str and type(output) is str and type(given) is str:
        return instruction, given, output
    return text_of(instruction, instruction_name), text_of(given, "input"), text_of(output, output_name)
