"""Chat templates: both engines give the same text, and it is transformers' text with its spans."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from chats import GENERATION, TEMPLATES, marks_for, plain_chats, rich_chats, template_of, texts
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from padless.packer.errors import InputError, RecordError
from padless.packer.formats.examples import Chat
from padless.packer.marks import split_marked
from padless.packer.sealed import is_plain
from padless.packer.template import (
    BUILT_IN,
    ChatTemplate,
    built_in,
    load_template,
    mark_generation,
)

MARKS = "\x01\x02\x03"
HELLO = Chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])


def transformers_render(template: ChatTemplate, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
    """The text and the generation spans (in characters) that transformers gives."""
    variables = {
        k: v for k, v in template.variables.items() if k not in ("add_generation_prompt", "documents")
    }
    found: Any = render_jinja_template(
        conversations=[chat.messages],
        tools=chat.tools,
        chat_template=template.source,
        return_assistant_tokens_mask=True,
        **variables,
    )
    texts, spans = found
    return texts[0], spans[0]


@pytest.mark.shared
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_engines_give_the_same_text_for_conversations_of_strings(shared: Path, name: str) -> None:
    template = template_of(shared, name)
    assert template.enable_fast([HELLO], MARKS)

    @settings(max_examples=60, deadline=None)
    @given(chats=st.lists(plain_chats().filter(is_plain), min_size=1, max_size=3))
    def same(chats: list[Chat]) -> None:
        marks = marks_for(template, *chats)
        assert template.render_fast(chats, marks) == "".join(template.render(c, marks) for c in chats)

    same()


@pytest.mark.shared
@pytest.mark.parametrize("name", GENERATION)
def test_marking_keeps_the_text_and_spans_of_transformers(shared: Path, name: str) -> None:
    template = template_of(shared, name)
    takes_tools = name in GENERATION[:2]
    compared = 0

    @settings(max_examples=60, deadline=None)
    @given(chat=rich_chats() if takes_tools else plain_chats())
    def same(chat: Chat) -> None:
        nonlocal compared
        marks = marks_for(template, chat)
        try:
            marked = template.render(chat, marks)
        except RecordError as error:
            with pytest.raises(Exception, match=".") as theirs:
                transformers_render(template, chat)
            assert str(theirs.value) in str(error)
            return
        text, spans = split_marked(marked, marks).one(0)
        assert (text, spans) == transformers_render(template, chat)
        compared += 1

    same()
    assert compared > 20


def test_marks_stand_where_the_generation_tags_did_whatever_the_rules_about_white_space() -> None:
    compared = 0
    for left, right in itertools.product(["{%", "{%-", "{%+"], ["%}", "-%}", "+%}"]):
        for before, behind in itertools.product(
            ["a", "a ", "a\n", "a\n  ", "", "  "], ["b", " b", "\nb", "\n\n b"]
        ):
            opening, closing = f"{left} generation {right}", f"{left} endgeneration {right}"
            source = f"{before}{opening}{behind}{before}{closing}{behind}"
            template = ChatTemplate(source, {}, "here")
            found = split_marked(template.render(HELLO, MARKS), MARKS).one(0)
            assert found == transformers_render(template, HELLO), source
            compared += 1
    assert compared == 9 * 24


def test_a_template_without_generation_blocks_is_not_rewritten() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert mark_generation(source) == source
    assert not ChatTemplate(source, {}, "here").has_marks


def test_a_template_that_the_fast_engine_does_not_know_stays_with_the_reference() -> None:
    template = ChatTemplate("{{ messages[0].content | wordwrap(3) }}", {}, "here")
    assert not template.enable_fast([HELLO], MARKS)
    assert template.fast is None
    assert template.render(HELLO, MARKS) == "Hi\x03"


def test_a_template_on_which_the_engines_differ_stays_with_the_reference() -> None:
    # Python trims \x1c, the other engine does not; the records themselves are plain.
    template = ChatTemplate("{{ ('\x1c' + messages[0].content) | trim }}", {}, "here")
    assert not template.enable_fast([HELLO], MARKS)
    assert template.render(HELLO, MARKS) == "Hi\x03"


@pytest.mark.parametrize(
    "chat",
    [
        Chat(HELLO.messages, [{"name": "f"}]),
        Chat([{"role": "user", "content": ["Hi"]}]),
        Chat([{"role": "user", "content": "Hi", "tool_calls": []}]),
        Chat([{"role": "user", "content": "\x1cHi"}]),
        Chat([{"role": "user", "content": "Hi\x1f \n"}]),
    ],
)
def test_only_turns_of_strings_that_both_engines_trim_alike_are_plain(chat: Chat) -> None:
    assert is_plain(HELLO)
    assert not is_plain(chat)


@given(text=texts)
@settings(deadline=None)
def test_what_a_template_writes_goes_through_unescaped(text: str) -> None:
    assume("\x03" not in text)
    chat = Chat([{"role": "user", "content": text}])
    for source in ("{{ messages[0].content }}", "{{ messages[0]['content'] | tojson }}"):
        template = ChatTemplate(source, {}, "here")
        assert template.render(chat, MARKS) == transformers_render(template, chat)[0] + "\x03"


def test_a_record_that_the_template_refuses_is_an_error_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "here")
    with pytest.raises(RecordError, match="the chat template refuses it: roles must alternate"):
        template.render(HELLO, MARKS)


def test_a_broken_template_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"chat template mine, line 2: .*nosuchtag"):
        ChatTemplate("{{ bos_token }}\n{% nosuchtag %}", {}, "mine")


def test_a_template_that_asks_for_the_date_is_refused_and_told_how() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {}, "here")
    with pytest.raises(InputError, match=r"today's date \(%Y\).*--template-arg"):
        template.render(HELLO, MARKS)


def test_templates_may_not_reach_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {}, "here")
    with pytest.raises(RecordError, match="unsafe"):
        template.render(HELLO, MARKS)


@pytest.mark.parametrize("ending", ["", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"])
def test_the_generation_prompt_is_what_a_template_adds_for_an_answer_to_come(ending: str) -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}<A>{% endif %}" + ending
    assert ChatTemplate(source, {"eos_token": "</s>"}, "here").generation_prompt(HELLO) == "<A>"


def test_a_generation_prompt_in_the_midst_of_a_conversation_is_an_error() -> None:
    template = ChatTemplate(
        "{% if add_generation_prompt %}<A>{% endif %}{{ messages[0].content }}", {}, "here"
    )
    with pytest.raises(RecordError, match="not just added"):
        template.generation_prompt(HELLO)


def test_a_template_is_a_name_a_file_or_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}é", encoding="utf-8")
    assert load_template(None, "own") == "own"
    assert [load_template(name, "own") for name in BUILT_IN] == [built_in(name) for name in BUILT_IN]
    assert load_template(str(file), "own") == "{{ messages }}é"
    file.write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        load_template(str(file), None)
    with pytest.raises(InputError, match="no template 'nope': give a file, or one of chatml, .*, alpaca"):
        load_template("nope", None)
