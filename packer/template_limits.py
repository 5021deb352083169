"""What one render of a chat template may take: a processor's time, and characters.

A template that goes round without an end, or doubles a text forty times, must not take the machine with it,
whether by mistake or by intent. Time is that of the thread, so that a busy machine changes nothing; a render
that takes too long ends the build and is never a dropped record, for the bytes would depend on the machine.
Sizes are the same everywhere, so a record that grows too large is one that the template refuses.

Where Python makes a value in one step, its size is told before, from what goes in: repeats, paddings,
replacements, joins and formats are all that makes much out of little.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from padless.packer.errors import InputError, RecordError
from padless.packer.formats.examples import Chat
from padless.packer.marks import leaves

SECONDS = 60.0
"""Of a processor, for one record."""
CHARACTERS, TIMES = 2**26, 8
"""Written, or in one value: so many, and so many times the record's own."""
FUEL = 2**25
"""Steps of the fast engine for a chunk, about a second; jinja2 then says which record it was."""
ENTRY = 64
"""Characters that an entry of a list or dict counts for."""
_BITS = 2**16
"""Of a whole number."""
_INDENT = 64
HOLDING = (list, tuple, dict)
"""Types of values that hold others."""
TEXTS = (str, bytes)
"""Types of values that are characters, those of HTML among them."""
_LOOKED, LARGE = 256, 2**20
"""Steps from look to look, and a value that takes so long to make that each is a step of its own."""


class OversizeError(RecordError):
    """A template makes too much of a record."""


class TooSlowError(InputError):
    """A template takes too long for a record."""


class Spent(threading.local):
    """What the render under way in a thread has taken."""

    _chat: Chat | None = None
    _end: float | None = None
    _most = CHARACTERS
    _turns = _kept = _added = 0

    def begin(self, chat: Chat) -> None:
        """A render begins."""
        self._chat, self._most = chat, CHARACTERS
        self._turns = self._kept = self._added = 0
        self._end = None

    def turn(self) -> None:
        """A small step; raises TooSlowError."""
        self._turns += 1
        if not self._turns % _LOOKED:
            self.look()

    def look(self) -> None:
        """See how long it has been since the first look, which most renders never come to."""
        now = time.thread_time()  # which takes longer than a short render
        if self._end is None:
            self._end = now + SECONDS
        elif now > self._end:
            raise TooSlowError(f"it takes more than {SECONDS:g} seconds of a processor for one record")

    def captured(self, size: int) -> None:
        """So many characters more are kept; raises OversizeError."""
        self._kept += size
        if self._kept > CHARACTERS:
            self.may_make(self._kept)

    def is_large(self, size: int) -> None:
        """A large text was made; raises OversizeError and TooSlowError."""
        self.look()
        self.may_make(size)

    def holds_both(self, left: Any, right: Any, value: Any) -> None:
        """See the same of `left + right`: a list that grows by an entry is looked through now and then."""
        self._added += self.holds(min(left, right, key=len))
        if self._added > CHARACTERS or len(value) > CHARACTERS // ENTRY:
            self.holds(value)
            self._added = 0

    def holds(self, value: Any) -> int:
        """See that a list or dict is not too large, with all that it holds; raises OversizeError.

        Returns what it counts for.
        """
        size, rest = 0, [value]
        while rest:  # what is held twice counts twice: it is written twice
            one = rest.pop()
            held = one.values() if type(one) is dict else one
            size += ENTRY * len(held)
            for entry in held:
                if type(entry) in HOLDING:
                    rest.append(entry)
                elif isinstance(entry, TEXTS):
                    size += len(entry)
            if size > CHARACTERS:
                self.may_make(size)
        if size > LARGE:
            self.look()
        return size

    def may_make(self, size: int) -> None:
        """Raise OversizeError for a size above the limit, which goes by the record where it is long."""
        if size <= self._most:
            return
        texts = leaves(self._chat) if self._chat else []
        own = sum(map(len, texts))
        self._most = CHARACTERS + TIMES * (own + ENTRY * len(texts))
        if size > self._most:
            raise OversizeError(
                f"it makes {size:,} characters of a record of {own:,}, the limit is {self._most:,}"
            )


def most_of_operator(operator: str, left: Any, right: Any) -> int:
    """How large `left operator right` may become, where that is more than both together, else 0.

    Raises OversizeError for whole numbers that have no place in a template.
    """
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, (*TEXTS, list, tuple)):
                return len(value) * max(times, 0)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str):
        return _of_format(left, "%", right if isinstance(right, tuple) else (right,))
    return 0


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise OversizeError(f"it makes a number of {bits:,} bits, the limit is {_BITS:,}")


def most_of_call(name: str, value: Any, arguments: Sequence[Any]) -> int:
    """The same of a text's method, or of a filter on a value: those that make much out of little."""
    if name in _BY_NUMBER:
        lines = 1
        if isinstance(value, str) and name in ("indent", "expandtabs"):
            lines += value.count("\n") + value.count("\t")
        numbers = [given if isinstance(given, int) else _size(given) for given in arguments]
        return lines * sum(map(abs, numbers))
    if name in ("translate", "wordwrap") and isinstance(value, str):
        given = [
            one for found in arguments for one in (found.values() if isinstance(found, dict) else [found])
        ]
        return (len(value) + 1) * max(map(_size, given), default=0)
    if name == "round":
        _check_bits(4 * max((abs(n) for n in arguments if isinstance(n, int)), default=0))  # by 10**n
    if name == "tojson" and max((n for n in arguments if isinstance(n, int)), default=0) > _INDENT:
        raise OversizeError(f"it indents JSON by more than {_INDENT} characters")
    if name == "replace" and len(arguments) > 1 and isinstance(value, TEXTS):
        text: Any = value
        times: int = text.count(arguments[0]) if isinstance(arguments[0], type(value)) else len(value) + 1
        return times * _size(arguments[1])
    if name == "join":
        items, between = (value, "") if not isinstance(value, TEXTS) else ((), value)
        for given in arguments:
            items, between = (given, between) if isinstance(given, (list, tuple)) else (items, given)
        if isinstance(items, (list, tuple)):
            return sum(map(_size, items)) + len(items) * _size(between)
    if name in ("format", "format_map") and isinstance(value, str):
        return max(_of_format(value, "%", arguments), _of_format(value, "{", arguments))
    return 0


_BY_NUMBER = ("center", "ljust", "rjust", "zfill", "indent", "expandtabs", "batch", "slice", "to_bytes")


def _of_format(form: str, sign: str, values: Sequence[Any]) -> int:
    longest = max(map(_written, values), default=0)
    widths = sum(int(digits) for digits in re.findall(r"\d{1,18}", form))
    widths += sum(abs(value) for value in values if isinstance(value, int))  # "%*d", "{:{}}"
    if sign == "{" and re.search(r"\{[^}]*\{", form):  # whose width may be a text, or in a list
        widths += sum(int(digits) for digits in re.findall(r"\d{1,18}", str(values)))
    return form.count(sign) * longest + widths


def _written(value: Any) -> int:
    """How long a value may be that is written as Python does."""
    if not isinstance(value, HOLDING):
        return _size(value)
    entries = value.values() if isinstance(value, dict) else value
    return len(value) * ENTRY + sum(map(_written, entries))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (*TEXTS, *HOLDING)) else 0
