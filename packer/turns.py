"""What a chat template writes around the assistant's answers, learnt from a few made-up conversations.

Two conversations that differ in their answers alone are rendered with whole turns marked (see
packer/locate.py); what both turns begin and end with is the template's:

    <|im_start|>assistant\n first <|im_end|>\n
    <|im_start|>assistant\n OTHER <|im_end|>\n
    header                        tail

This costs a dozen renders of one line, once a build. Where they leave a choice, the answer is Unclear with
the reason: a mask that is off by a token is worse than none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat, Message
from padless.packer.template import ChatTemplate

Render = Callable[[Chat, str], str]
"""(conversation, marks) -> its render, each turn of the assistant between the first two marks."""

_MARKS = "\x01\x02\x03"
_QUESTION, _RESULT = "What is it?", "sunny"
_ANSWERS = ("first", "OTHER")
"""They begin and end differently, so nothing that two turns share is of the answers."""


class Unclear(RecordError):
    """A template does not show which part of its text is the assistant's."""


class Tail(NamedTuple):
    """What is written behind an answer, and how many of its characters are trained."""

    text: str
    trained: int


class Around(NamedTuple):
    """What a template writes around its answers; headers and tails longest first."""

    headers: list[str]
    tails: list[Tail]
    no_calls: str | None
    """Why answers that call tools are unclear; None where they are not."""


class Edges(NamedTuple):
    """A turn, whatever its answer says: the text before it, how it begins and ends, the text behind it."""

    before: str
    start: str
    end: str
    behind: str


def split_turns(text: str, marks: str, chat: Chat) -> tuple[str, list[tuple[str, str]]]:
    """One record's text before its first turn, and each turn of the assistant with the text behind it."""
    # Marks around nothing are of loops that only look through the messages.
    before, *pieces = text.replace(marks[:2], "").split(marks[0])
    turns: list[tuple[str, str]] = []
    for piece in pieces:
        turn, closed, behind = piece.partition(marks[1])
        if not closed or marks[1] in behind:
            raise Unclear("the chat template loops over messages within its loop over messages")
        if not turn.isspace():
            turns.append((turn, behind))
        elif turns:
            turns[-1] = (turns[-1][0], turns[-1][1] + turn + behind)
        else:
            before += turn + behind
    expected = [turn["role"] for turn in chat.messages].count("assistant")
    if len(turns) != expected:
        raise Unclear(
            f"the chat template writes {len(turns)} turns of the assistant where there are {expected}"
        )
    return before, turns


def learn(render: Render, bare: ChatTemplate, special_contents: Sequence[str]) -> Around:
    """Look at plain answers and at tool calls; Unclear where not even plain answers are clear."""
    prompt = bare.generation_prompt(Chat([{"role": "user", "content": _QUESTION}]))
    specials = re.compile("|".join(map(re.escape, special_contents)) or r"(?!)")
    eos = str(bare.variables.get("eos_token", ""))
    headers: set[str] = set()
    tails: set[Tail] = set()
    for one, other in zip(*map(_plain, _ANSWERS), strict=True):
        for edges in _compared(render, bare, one, other):
            headers.add(_header(prompt, edges, is_call=False))
            tails.add(_tail(edges, specials, eos))
    no_calls: str | None = "it refuses them"
    for one, other in zip(*map(_calls, _ANSWERS), strict=True):
        try:
            for edges in _compared(render, bare, one, other):
                headers.add(_header(prompt, edges, is_call=True))
                if not any(edges.end.endswith(tail.text) for tail in tails):
                    tails.add(_call_tail(edges, specials))
        except Unclear as error:
            no_calls = str(error)
            break
        except RecordError:  # it has no tools, or wants their arguments otherwise
            continue
        no_calls = None
    return Around(
        sorted(headers, key=len, reverse=True),
        sorted(tails, key=lambda tail: len(tail.text), reverse=True),
        no_calls,
    )


def _plain(answer: str) -> list[Chat]:
    turns: list[Message] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": answer},
    ]
    return [Chat(turns), Chat(turns * 2)]


def _calls(answer: str) -> list[Chat]:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": answer, "description": "", "parameters": parameters}}
    result = {"role": "tool", "name": answer, "tool_call_id": "call00001", "content": _RESULT}
    found: list[Chat] = []
    for arguments in ({answer: answer}, f'{{"{answer}": "{answer}"}}'):
        function = {"name": answer, "arguments": arguments}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        turns: list[Message] = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        reply = {"role": "assistant", "content": answer}
        found += [Chat(turns, [tool]), Chat([*turns, result, reply], [tool])]
    return found


def _compared(render: Render, bare: ChatTemplate, one: Chat, other: Chat) -> list[Edges]:
    """The edges of each turn of the assistant in two conversations that differ in their answers alone."""
    both = []
    for chat in (one, other):
        plain = bare.render(chat, _MARKS).removesuffix(_MARKS[2])
        before, turns = split_turns(render(chat, _MARKS).removesuffix(_MARKS[2]), _MARKS, chat)
        if before + "".join(turn + behind for turn, behind in turns) != plain:
            raise Unclear("it renders otherwise once its turns are marked")
        if any(_QUESTION in turn or _RESULT in turn for turn, _ in turns):
            raise Unclear("it writes other turns together with the assistant's")
        both.append((before, turns))
    (before, turns), (_, others) = both
    found: list[Edges] = []
    for (turn, behind), (other_turn, _) in zip(turns, others, strict=True):
        if turn == other_turn:
            raise Unclear("its loop over messages does not write what they say")
        start = os.path.commonprefix([turn, other_turn])
        end = os.path.commonprefix([turn[::-1], other_turn[::-1]])[::-1]
        found.append(Edges(before, start, end, behind))
        before = behind
    return found


def _header(prompt: str, edges: Edges, *, is_call: bool) -> str:
    """What of a turn's beginning is there already when an answer is generated."""
    start = edges.start
    if not prompt:
        if start.strip() and not is_call:
            raise Unclear(
                f"it writes {start!r} before each answer, but nothing where add_generation_prompt asks "
                "for the beginning of one, so where answers begin cannot be told"
            )
        return ""
    if start.startswith(prompt):
        return prompt
    if prompt.startswith(start) and (start or edges.before.endswith(prompt)):
        return start
    raise Unclear(f"its answers begin with {start!r}, but its generation prompt is {prompt!r}")


def _tail(edges: Edges, specials: re.Pattern[str], eos: str) -> Tail:
    """What of a turn's end is trained: through its end token, else all but the white space at its end."""
    end = edges.end
    places = [match.span() for match in specials.finditer(end)]
    if len(places) > 1:
        places = [(start, stop) for start, stop in places if end[start:stop] == eos]
        if len(places) != 1:
            raise Unclear(f"it writes several special tokens behind each answer: {end!r}")
    trained = places[0][1] if places else len(end.rstrip())
    if not trained:
        raise Unclear(
            "it writes no end token behind an answer (or only outside of its loop over messages), so a "
            "model would not learn to stop"
        )
    return Tail(end, trained)


def _call_tail(edges: Edges, specials: re.Pattern[str]) -> Tail:
    """A call's end token; what stands before it is of the call's own form."""
    *_, last = [None, *specials.finditer(edges.end)]
    if last is None or edges.end[last.end() :].strip():
        raise Unclear(f"it ends them with {edges.end!r}, which has no end token")
    return Tail(edges.end[last.start() :], len(last[0]))
