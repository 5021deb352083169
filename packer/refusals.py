"""Why a chat cannot go through a chat template although the template would take it.

Templates are lenient: most print any role, and many write nothing of a tool call. Each function gives the
reason, or None; nothing is changed, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Set

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat, Message
from padless.packer.template import ChatTemplate

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles that any chat template may be given; others it must name itself."""
ALWAYS = frozenset({"user", "assistant"})
"""Roles that every chat template writes."""

_CALLS = ("tool_calls", "function_call")
_MARKS = "\x01\x02\x03"


class KnownRoles:
    """The roles that a chat template writes; each is asked for once, when it first occurs."""

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template
        self._named = ROLES.union(re.findall(r"""['"](\w+)['"]""", template.source if template else ""))
        self.known = set(ALWAYS)
        self.refused: dict[str, str] = {}
        """Role -> why."""

    def look_at(self, roles: Set[str]) -> None:
        """See that each role is in `known` or `refused`."""
        for role in roles - self.known - self.refused.keys():
            if role not in self._named:
                self.refused[role] = (
                    "which neither padless nor the chat template knows; known are "
                    f"{', '.join(sorted(ROLES))}, and what the template names"
                )
            elif self._is_lost(role):
                self.refused[role] = "of which the chat template writes nothing, so its text would be lost"
            else:
                self.known.add(role)

    def _is_lost(self, role: str) -> bool:
        """Whether the template takes turns of this role, before or behind an answer, and writes none."""
        if self._template is None:
            return False
        turn: Message = {"role": role, "content": "Peculiar words."}
        answered: list[Message] = [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": "an answer"},
        ]
        try:
            return not any(
                turn["content"] in self._template.render(Chat(messages), _MARKS)
                for messages in ([turn, *answered], [*answered, turn])
            )
        except RecordError:  # it wants more of such a turn, or another place, and will say so of the record
            return False


def unknown_role(chat: Chat, roles: KnownRoles) -> str | None:
    """The first turn of a role that is not written."""
    for number, turn in enumerate(chat.messages):
        if turn["role"] in roles.refused:
            return f"messages[{number}] has the role {turn['role']!r}, {roles.refused[turn['role']]}"
    return None


def lost_calls(chat: Chat, template_source: str) -> str | None:
    """The first turn that calls tools, where the template writes nothing of calls."""
    for name in _CALLS:
        if name in template_source:
            continue
        for number, turn in enumerate(chat.messages):
            if turn.get(name):
                return (
                    f"messages[{number}] calls tools, but the chat template writes no {name}, so they would "
                    "be lost; take the tokenizer's own template, or a file (--template FILE)"
                )
    return None


def unclear_turns(chat: Chat, spans: int) -> str | None:
    """Trained spans in a render that are not one for each of the assistant's turns."""
    answers = sum(turn["role"] == "assistant" for turn in chat.messages)
    if spans == answers:
        return None
    return (
        f"not all of its turns are to be trained, but the chat template writes {spans} trained spans for "
        f"{answers} turns of the assistant, so which is of which cannot be told"
    )
