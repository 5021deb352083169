"""Find the assistant's turns in chat templates that do not mark them, in the one full render.

Most templates have no `{% generation %}` blocks, but they all loop over the messages. What such a loop
writes while it is at an assistant's message is that turn, so a mark before and behind each iteration tells
the turns apart whatever the template does to their content (trims it, splits it at `</think>`, drops old
reasoning), at the price of one render. Each turn is then narrowed to what a model would generate:

    <|im_start|>assistant\n  [open] <think>\n\n</think>\n\nHello<|im_end|> [close]  \n
    the generation prompt                 trained                            after the end token

What it writes around every answer is learnt by packer/turns.py. A template that does not do it in this way
is left alone with the reason, and so is a single record: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from padless.packer.errors import InputError, RecordError
from padless.packer.formats.examples import Chat
from padless.packer.template import CLOSE, OPEN, ChatTemplate
from padless.packer.turns import learn, split_turns

_STRINGS = r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?"""
_TAG = re.compile(
    r"\{\#.*?\#\}"
    r"|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
    rf"|\{{\{{{_STRINGS}\}}\}}"
    rf"|\{{%(?P<left>[-+]?)\s*(?P<word>\w+)(?P<rest>{_STRINGS})(?P<right>[-+]?)%\}}",
    re.DOTALL,
)
_ONE_NAME = re.compile(r"\s*(\w+)\s+in\b")
_BLOCKS = frozenset({"for", "if", "with", "block", "autoescape", "macro", "call", "filter", "set", "trans"})
_CAPTURES = frozenset({"macro", "call", "filter", "set"})
"""Blocks whose text is worked on before it is written: marks inside could change it, so none are set."""

_WAY_OUT = "a template with {% generation %} blocks (--template FILE) tells"

_CLOSING = f"if padless_turn %}}{{{{ {CLOSE} }}}}{{% endif %}}{{%"


def mark_turns(source: str) -> str:
    """A template whose loops write a mark before and behind each iteration at an assistant's message.

    Marks are only ever added to the output, so taking them out gives the template's own render. Tags are
    put inside of others' places, so that every rule about white space around them holds as before.
    """
    stack: list[str] = []  # the open blocks; "turns" is a loop that is being marked

    def replace(match: re.Match[str]) -> str:
        word = match["word"]
        if word is None:
            return match[0]
        left, rest, right = match["left"], match["rest"], match["right"]
        closing = f"{{%{left} {_CLOSING} {word}{rest}{right}%}}"
        if word == "for":
            target = _ONE_NAME.match(rest)
            if target is None or "recursive" in rest or not _CAPTURES.isdisjoint(stack):
                stack.append(word)
                return match[0]
            stack.append("turns")
            at_turn = f"{target[1]} is mapping and {target[1]}.role == 'assistant'"
            return (
                f"{{%{left} for{rest}%}}{{{{ {OPEN} if {at_turn} }}}}"
                f"{{% set padless_turn = {at_turn} {right}%}}"
            )
        if word in _BLOCKS and not (word == "set" and "=" in rest):
            stack.append(word)
        elif word in ("break", "continue"):
            innermost = next((block for block in reversed(stack) if block in ("for", "turns")), "")
            return closing if innermost == "turns" else match[0]
        elif word == "else" and stack and stack[-1] == "turns":
            stack[-1] = "for"
            return closing
        elif word.startswith("end") and stack and stack.pop() == "turns":
            return closing
        return match[0]

    return _TAG.sub(replace, source)


class LocatedTemplate(ChatTemplate):
    """A template without generation blocks, that is rendered as if it had them.

    RecordError, from the constructor, where the template does not show its turns.
    """

    def __init__(self, bare: ChatTemplate, special_contents: Sequence[str]) -> None:
        super().__init__(mark_turns(bare.source), bare.variables, bare.name)
        self.source = bare.source
        self.has_marks = True
        self._bare = bare
        self._around = learn(self._raw, bare, special_contents)

    def _raw(self, chat: Chat, marks: str) -> str:
        """The render with whole turns marked."""
        return super().render(chat, marks)

    def render(self, chat: Chat, marks: str) -> str:
        """One conversation through jinja2; RecordError where its turns cannot be told for certain."""
        found = self._narrowed(self._raw(chat, marks), marks, [chat])
        if found.replace(marks[0], "").replace(marks[1], "") != self._bare.render(chat, marks):
            raise RecordError("the chat template renders otherwise once its turns are marked")
        return found

    def render_fast(self, chats: Sequence[Chat], marks: str, opened: Sequence[str] = ()) -> str:
        """Many conversations at once; RecordError where one of them is not certain."""
        return self._narrowed(super().render_fast(chats, marks, opened), marks, chats)

    def _narrowed(self, raw: str, marks: str, chats: Sequence[Chat]) -> str:
        """Marked whole turns to marked answers: from behind the header through the end token."""
        opening, closing, ending = marks[0], marks[1], marks[2]
        headers, tails, no_calls = self._around
        found: list[str] = []
        for text, chat in zip(raw.split(ending)[:-1], chats, strict=True):
            if no_calls and _has_calls(chat):
                raise RecordError(
                    f"it calls tools, and the chat template's way with calls is unclear: {no_calls}; "
                    f"{_WAY_OUT}"
                )
            before, turns = split_turns(text, marks, chat)
            found.append(before)
            for turn, behind in turns:
                header = next((text for text in headers if turn.startswith(text)), None)
                tail = next((tail for tail in tails if turn.endswith(tail.text)), None)
                if header is None or tail is None or len(header) + len(tail.text) > len(turn):
                    raise RecordError(
                        f"the chat template writes an answer as {_short(turn)}, but others between "
                        f"{headers[0]!r} and {tails[0].text!r}, so what to train on in it cannot be told; "
                        f"{_WAY_OUT}"
                    )
                end = len(turn) - len(tail.text) + tail.trained
                found += (header, opening, turn[len(header) : end], closing, turn[end:], behind)
            found.append(ending)
        return "".join(found)


def located(template: ChatTemplate | None, special_contents: Sequence[str]) -> ChatTemplate | None:
    """The template with its assistant's turns located, or as it is, saying why it does not mark them."""
    if template is None or template.has_marks:
        return template
    try:
        return LocatedTemplate(template, special_contents)
    except (RecordError, InputError) as error:
        template.why_unmarked = str(error)
        return template


def _has_calls(chat: Chat) -> bool:
    return any(turn.get("tool_calls") or turn["role"] == "tool" for turn in chat.messages)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:40]} ... {text[-40:]}")
