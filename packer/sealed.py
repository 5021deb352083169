"""What of a conversation the fast template engine gets to see: texts; anything else only sealed.

jinja2 and minijinja print numbers, null and dicts in ways of their own, so a record takes the fast one only
where all that a template can see is text. Tools and the arguments of calls are anything, but nearly every
template does one thing with them: it hands them to `tojson`, which is ours in both engines. So they go in as
parcels that `tojson` alone can open:

    {"name": "f", "arguments": {"days": 3}}  ->  {"name": "f", "arguments": Sealed({"days": 3})}

Whatever else a template does with one (reads, prints, counts or compares it) is noticed, and jinja2 does the
work instead. What is not noticed is a question about its type, which is answered as a dict's, and one for a
key that it has not.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from padless.packer.formats.examples import Chat
from padless.packer.marks import leaves

TRIMMED_DIFFERENTLY = "\x1c\x1d\x1e\x1f"
_TRIMMED_DIFFERENTLY = re.compile(f"[{TRIMMED_DIFFERENTLY}]")
"""Python's strip removes these, the other engine's trim leaves them."""


class Sealed:
    """A dict that only `unsealed` reads; `opened` gets an entry where anybody else tries."""

    __slots__ = ("opened", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: dict[Any, Any], opened: list[str]) -> None:
        self.value = value
        self.opened = opened

    def _open(self, *_: Any) -> NoReturn:
        self.opened.append("")
        raise TypeError("it is sealed")

    # What a dict has not, both engines take for undefined: no look inside is needed to tell.
    def __getitem__(self, key: Any) -> NoReturn:
        if key in self.value or hasattr(dict, str(key)):
            self.opened.append(str(key))
        raise KeyError(key)

    def __getattr__(self, name: str) -> NoReturn:
        if name in self.value or hasattr(dict, name):
            self.opened.append(name)
        raise AttributeError(name)

    def __str__(self) -> str:  # an error here would be printed where nobody can catch it
        self.opened.append("")
        return ""

    # The engine takes what has __getitem__ and items for a mapping; through the others it would read.
    items = keys = values = get = _open
    __iter__ = __len__ = __bool__ = __contains__ = _open
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _open
    __repr__ = __str__


def unsealed(value: object) -> Any:
    """The dict in a parcel; TypeError, as `json.dumps` wants it, where it is none."""
    if type(value) is Sealed:
        return value.value
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def sealed(chat: Chat, opened: list[str]) -> Chat | None:
    """The conversation as the fast engine may see it; None where that cannot be.

    A conversation of texts is given back as it is. A call must have the form that templates expect, since
    the engines treat what is missing in ways of their own too.
    """
    if chat.variables:
        return None
    messages = chat.messages
    for number, turn in enumerate(messages):
        for key, value in turn.items():
            if type(value) is str:
                continue
            if key != "tool_calls" or type(value) is not list:
                return None
            calls = [_sealed_call(call, opened) for call in value]
            if None in calls:
                return None
            if messages is chat.messages:
                messages = list(messages)
            messages[number] = {**messages[number], key: calls}
    tools: list[Any] | None = None
    if chat.tools is not None:
        if not all(type(tool) is dict for tool in chat.tools):
            return None
        tools = [Sealed(tool, opened) for tool in chat.tools]
    elif messages is chat.messages:
        return chat
    return chat._replace(messages=messages, tools=tools)


def trims_alike(chat: Chat) -> bool:
    """Whether the engines trim its texts alike, wherever a template does so."""
    # Anywhere in them: white space may stand around it, and templates split what they trim.
    return not any(_TRIMMED_DIFFERENTLY.search(text) for text in leaves(chat))


def is_plain(chat: Chat) -> bool:
    """Whether all of it is turns of texts that both engines trim alike."""
    return sealed(chat, []) is chat and trims_alike(chat)


def _sealed_call(call: Any, opened: list[str]) -> dict[str, Any] | None:
    """A call with its arguments sealed: {"name", "arguments"}, or that as the `function` of a dict."""
    if type(call) is not dict:
        return None
    function = call.get("function", call)
    if type(function) is not dict or type(function.get("name")) is not str or "arguments" not in function:
        return None
    if type(function["arguments"]) is dict:
        function = {**function, "arguments": Sealed(function["arguments"], opened)}
    found = {**call, "function": function} if "function" in call else function
    both = [*found.values(), *function.values()]
    if all(type(value) is str or type(value) is Sealed or value is function for value in both):
        return found
    return None
