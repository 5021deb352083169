"""Why a chat cannot go through a chat template although the template would take it.

Templates are lenient: most print any role, and many write nothing of a tool call. Each function gives the
reason, or None; nothing is changed, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Set

from padless.packer.formats.examples import Chat

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles that any chat template may be given; others it must name itself."""


def known_roles(template_source: str) -> frozenset[str]:
    """ROLES, and every word that the template has in quotes."""
    return ROLES.union(re.findall(r"""['"](\w+)['"]""", template_source))


def unknown_role(chat: Chat, known: Set[str]) -> str | None:
    """The first turn of a role that is not known."""
    for number, turn in enumerate(chat.messages):
        if turn["role"] not in known:
            return (
                f"messages[{number}] has the role {turn['role']!r}, which neither padless nor the chat "
                f"template knows; known are {', '.join(sorted(ROLES))}, and what the template names"
            )
    return None


def lost_calls(chat: Chat, template_source: str) -> str | None:
    """The first turn that calls tools, where the template writes nothing of calls."""
    if "tool_calls" in template_source:
        return None
    for number, turn in enumerate(chat.messages):
        if turn.get("tool_calls"):
            return (
                f"messages[{number}] calls tools, but the chat template writes no tool_calls, so they would "
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
