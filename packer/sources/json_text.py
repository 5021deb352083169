"""JSON in bytes to values: orjson first, the standard library for what only that one takes.

orjson refuses lone surrogates (`\\ud8a1`) and NaN, which real files hold; a text that fails is
parsed again by `json`, which is five times slower and also gives the position for the message. Lone
surrogates cannot be written as UTF-8, so each becomes one U+FFFD and is counted.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson

from padless.packer.sources.chunks import BadRecord
from padless.packer.sources.stream import ByteStream

HEAD_BYTES = 1 << 16
_ALL_NOUGHTS = bytes.maketrans(b"123456789", b"000000000")
_NINETEEN = b"0" * 19
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
LONG_DIGITS = re.compile(rb"[0-9]{20}|-[0-9]{19}")
SHORT_TEXT = 4096
"""Bytes that are searched in less time than numpy takes to begin."""
SURROGATE = re.compile("[\ud800-\udfff]")
KINDS = {bool: "true or false", int: "a number", float: "a number", list: "an array"}


class MalformedError(Exception):
    """What is wrong with a JSON text, and at which of its bytes."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


def parse(text: bytes) -> tuple[Any, int]:
    """The value of a JSON text, and how many lone surrogates were replaced in it.

    Raises MalformedError.
    """
    if not has_long_digits(text):
        try:
            return orjson.loads(text), 0
        except orjson.JSONDecodeError:
            pass
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        reason = f"byte 0x{text[error.start]:02x} is not UTF-8"
        raise MalformedError(error.start, reason) from None
    try:
        value = json.loads(decoded)
        return replace_surrogates(value) if SURROGATE_ESCAPE.search(text) else (value, 0)
    except json.JSONDecodeError as error:
        raise MalformedError(len(decoded[: error.pos].encode()), error.msg) from None
    except RecursionError:
        raise MalformedError(0, "nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise MalformedError(0, str(error)) from None


def has_long_digits(text: bytes) -> bool:
    """Whether there may be an integer of more than 64 bits, which orjson makes a float.

    That is 20 digits in a row, or 19 behind a minus. Of a long text one byte in nine is looked at: a run
    of that length holds two neighbours of them.
    """
    if len(text) < SHORT_TEXT:
        return _NINETEEN in text.translate(_ALL_NOUGHTS)
    every = np.frombuffer(text, dtype=np.uint8)[::9]
    digit = (every >= 0x30) & (every <= 0x39)
    places = np.flatnonzero(digit[:-1] & digit[1:]) * 9
    return any(LONG_DIGITS.search(text, max(at - 10, 0), at + 30) for at in places.tolist())


def replace_surrogates(value: Any) -> tuple[Any, int]:
    """The value with each lone surrogate, keys included, as one U+FFFD; and their count."""
    if isinstance(value, str):
        return SURROGATE.subn("\ufffd", value)
    if isinstance(value, list):
        pairs = [replace_surrogates(item) for item in value]
        return [item for item, _ in pairs], sum(count for _, count in pairs)
    if isinstance(value, dict):
        items = [(replace_surrogates(key), replace_surrogates(item)) for key, item in value.items()]
        total = sum(key[1] + item[1] for key, item in items)
        return {key[0]: item[0] for key, item in items}, total
    return value, 0


def as_row(value: Any, line: int | None) -> Any:
    """The value where it can be a record (object or string), otherwise a BadRecord."""
    if isinstance(value, dict | str):
        return value
    found = KINDS.get(type(value), "null")
    return BadRecord(line, f"{found} where a record (an object or a string) was expected")


def sniff(stream: ByteStream) -> str:
    """Which reader a JSON file wants, by its text and not its extension; skips leading blanks.

    "[" begins an array. An object that goes on over several lines is one record, which the array's
    reader takes too. All else is one value a line.
    """
    stream.skip_blank()
    head = stream.peek(HEAD_BYTES)
    if head.startswith(b"["):
        return "json_array"
    first, _, rest = head.partition(b"\n")
    # In a file of one object a line the second line begins with "{" as well.
    if head.startswith(b"{") and rest.strip() and not rest.lstrip().startswith(b"{"):
        try:
            parse(first)
        except MalformedError:
            return "json_array"
    return "jsonl"
