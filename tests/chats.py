"""Conversations to draw for property tests, and the chat templates to render them with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from padless.packer.formats.examples import Chat
from padless.packer.marks import choose_marks, leaves
from padless.packer.template import ChatTemplate, built_in
from padless.packer.tokenizer_files import TokenizerFiles, read_files

OWN = ("qwen3/own", "llama3.1/own", "mistral-sp/own", "qwen3/chatml.jinja")
"""Templates without generation blocks: a tokenizer's own, or a file."""

GENERATION = (
    "qwen3/chat_template.generation.jinja",
    "llama3.1/chat_template.generation.jinja",
    "mistral-sp/chat_template.generation.jinja",
    "qwen3/chatml.generation.jinja",
    "qwen3/built-in",
)
TEMPLATES = OWN + GENERATION

_EDGES = [
    "",
    "",
    " ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\x0b",
    "\x0c",
    "\x85",
    "\xa0",
    "\u2003",
    "\u2028",
    "\u200b",
]
_PIECES = [
    "yes",
    "I'll",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
    "{{ messages }}",
    "{% if %}",
    "<a&b>'\"",
    "e\u0301",
    "\u0958",
    "\U0001f469\u200d\U0001f467",
    "\u4e2d\u6587",
]


@lru_cache
def files_of(shared: Path, tokenizer: str) -> TokenizerFiles:
    return read_files(str(shared / "tokenizers" / tokenizer))


@lru_cache
def template_of(shared: Path, name: str) -> ChatTemplate:
    """A template of TEMPLATES, with its tokenizer's named tokens."""
    tokenizer, _, file = name.partition("/")
    files = files_of(shared, tokenizer)
    if file == "own":
        source = files.own_template()
        assert source is not None
    elif file == "built-in":
        source = built_in("chatml")
    else:
        source = (shared / "tokenizers" / name).read_text(encoding="utf-8")
    return ChatTemplate(source, files.named_tokens(), name)


def marks_for(template: ChatTemplate, *chats: Chat) -> str:
    """Three marks that neither the template nor the chats contain."""
    marks = choose_marks([template.fixed_text, *(leaf for chat in chats for leaf in leaves(chat))])
    assert marks is not None
    return marks


# U+0001 to U+0008 stay free, so that there always are marks; the engines trim U+001C to U+001F differently.
letters = st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02\x03\x04\x05\x06\x07\x08")
_pieces = st.one_of(st.text(letters, max_size=6), st.sampled_from(_PIECES))
texts = st.builds(
    lambda edges, pieces: edges[0] + "".join(pieces) + edges[1],
    st.tuples(st.sampled_from(_EDGES), st.sampled_from(_EDGES)),
    st.lists(_pieces, max_size=4),
)


@st.composite
def plain_chats(draw: st.DrawFn) -> Chat:
    """One to three questions with their answers, perhaps a system turn, perhaps the last unanswered."""
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        messages.append({"role": "assistant", "content": draw(texts)})
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(texts)})
    return Chat(messages)


_names = st.text("abcdefgh_", min_size=1, max_size=8)
_values = st.recursive(
    st.one_of(texts, st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_names, inner, max_size=2)),
    max_leaves=4,
)
_arguments = st.dictionaries(_names, _values, max_size=3)


@st.composite
def rich_chats(draw: st.DrawFn) -> Chat:
    """A plain chat in which answers may have reasoning, and may call a tool before they are given."""
    chat = draw(plain_chats())
    messages: list[dict[str, Any]] = []
    called = False
    for turn in chat.messages:
        turn = dict(turn)
        if turn["role"] == "assistant":
            if draw(st.booleans()):
                calls = []
                for _ in range(draw(st.sampled_from([1, 1, 2]))):
                    function = {"name": draw(_names), "arguments": draw(_arguments)}
                    calls.append({"type": "function", "function": function})
                messages.append({"role": "assistant", "content": draw(texts), "tool_calls": calls})
                messages.append({"role": "tool", "content": draw(texts)})
                called = True
            if draw(st.booleans()):
                turn["reasoning_content"] = draw(texts)
        messages.append(turn)
    tools = None
    if called:
        parameters = {"type": "object", "properties": draw(_arguments)}
        function = {"name": draw(_names), "description": draw(texts), "parameters": parameters}
        tools = [{"type": "function", "function": function}]
    return Chat(messages, tools)
