"""Tools and calls in the fast template engine: written as JSON or not at all, whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import TEMPLATES, files_of, marks_for, plain_chats, rich_chats, template_of
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer.errors import RecordError
from padless.packer.formats.examples import Chat
from padless.packer.locate import located
from padless.packer.sealed import Sealed, sealed, trims_alike
from padless.packer.template import ChatTemplate, OpenedError

MARKS = "\x01\x02\x03"
ARGUMENTS = {"days": 3, "exact": True, "at": None, "parts": [1.0, {"a": "é<&>'"}], "big": 2**70}


def calling(arguments: Any = ARGUMENTS) -> Chat:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    return Chat(messages, [{"name": "f", "parameters": ARGUMENTS}])


def views_of(chats: list[Chat], opened: list[str]) -> list[Chat]:
    views = [sealed(chat, opened) for chat in chats]
    assert None not in views
    return [view for view in views if view is not None]


def fast_on(source: str, *, with_calls: bool = True) -> ChatTemplate:
    """A template whose fast engine has seen a conversation, and perhaps one with calls."""
    template = ChatTemplate(source, {}, "here")
    sample = [Chat([{"role": "user", "content": "Hi"}])]
    template.enable_fast([*sample, calling()] if with_calls else sample, MARKS)
    return template


@pytest.mark.shared
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_engines_give_the_same_text_for_calls_or_the_fast_one_gives_none(shared: Path, name: str) -> None:
    template = template_of(shared, name)
    assert template.enable_fast([Chat([{"role": "user", "content": "Hi"}])], MARKS)
    compared = 0

    @settings(max_examples=60, deadline=None)
    @given(chats=st.lists(st.one_of(rich_chats(), plain_chats()), min_size=1, max_size=3))
    def same(chats: list[Chat]) -> None:
        nonlocal compared
        opened: list[str] = []
        chats = [chat for chat in chats if trims_alike(chat) and sealed(chat, opened) is not None]
        marks = marks_for(template, *chats)
        try:
            found = template.render_fast(views_of(chats, opened), marks, opened)
        except Exception:  # looked into, or refused: such records take the reference
            return
        assert found == "".join(template.render(chat, marks) for chat in chats)
        compared += 1

    same()
    assert compared > 10


@pytest.mark.shared
@pytest.mark.parametrize("marked", ["bare", "located"])
@pytest.mark.parametrize("name", ["qwen3/own", "llama3.1/own"])
def test_templates_that_write_calls_as_json_take_the_fast_engine(
    shared: Path, name: str, marked: str
) -> None:
    template: ChatTemplate | None = template_of(shared, name)
    if marked == "located":
        template = located(template, files_of(shared, name.split("/")[0]).special_contents)
    assert template is not None and template.has_marks == (marked == "located")
    chat = calling()
    assert template.enable_fast([chat], MARKS) and template.fast_takes_calls
    opened: list[str] = []
    found = template.render_fast(views_of([chat, chat], opened), MARKS, opened)
    assert found == 2 * template.render(chat, MARKS)
    assert json.dumps(ARGUMENTS, ensure_ascii=False) in found


LOOKS = (
    *("x", "x.days", "x['days']", "x | length", "x | items | list", "x.items() | list", "x.get('days')"),
    *(
        "x.keys() | list",
        "x if x else 'none'",
        "not x",
        "x and 1",
        "x is iterable",
        "x == {}",
    ),
    *("x | string", "x ~ 'a'", "x | dictsort", "x | list", "x | first", "x | default('a')", "'days' in x"),
    *(
        "x | default('a', true)",
        "x == tools[0]",
        "[x]",
        "{'a': x}",
        "x | upper",
        "x | join(',')",
        "x | pprint",
    ),
    *("x | tojson ~ x", "x.days + 1", "x | map('upper') | list", "[x] | sort | list", "x | attr('days')"),
    *("x | replace('a', 'b')", "'%s' % x", "namespace(a=x).a", "x | safe", "x | escape", "dict(x)"),
)


@pytest.mark.parametrize("expression", LOOKS)
def test_a_template_that_looks_into_arguments_is_noticed(expression: str) -> None:
    place = "messages[1].tool_calls[0].function.arguments"
    source = f"{{% if messages | length > 1 %}}{{% set x = {place} %}}{{{{ {expression} }}}}{{% endif %}}"
    template = fast_on(source, with_calls=False)
    assert template.fast is not None and template.fast_takes_calls  # the sample had no calls
    opened: list[str] = []
    with pytest.raises(Exception, match=".") as error:
        template.render_fast(views_of([calling()], opened), MARKS, opened)
    assert opened or not isinstance(error.value, OpenedError)
    assert not fast_on(source).fast_takes_calls


TESTS = (
    "mapping",
    "sequence",
    "string",
    "number",
    "boolean",
    "none",
    "defined",
    "undefined",
    "true",
    "false",
)


@pytest.mark.parametrize(
    "value", ["x", "x.function", "x.missing", "x['role']", "messages", "messages[0]", "messages[0].content"]
)
@pytest.mark.parametrize("test", [*TESTS, "integer", "float"])
def test_a_question_about_a_type_has_the_same_answer_in_both_engines(test: str, value: str) -> None:
    # Of what is sealed only the type can be asked for without being noticed, and what it has not.
    value = value.replace("x.function", "messages[1].tool_calls[0].function.arguments")
    value = value.replace("x", "tools[0]", 1)
    source = f"{{% if tools %}}{{{{ 'yes' if {value} is {test} else 'no' }}}}{{% endif %}}"
    template = fast_on(source)
    if test == "sequence" and value in ("tools[0].missing", "tools[0]['role']"):
        assert (
            not template.fast_takes_calls
        )  # undefined, which jinja2 takes for one, and null, which it does not
        return
    assert template.fast_takes_calls
    opened: list[str] = []
    chat = calling()
    found = template.render_fast(views_of([chat], opened), MARKS, opened)
    assert found == template.render(chat, MARKS)


def test_what_is_undefined_is_not_written_as_null() -> None:
    template = fast_on("{{ messages[0].content }}{{ messages[0].name | tojson if messages[1] }}")
    chat = Chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    with pytest.raises(RecordError, match="not JSON serializable"):
        template.render(chat, MARKS)
    with pytest.raises(Exception, match="null or undefined"):
        template.render_fast([chat], MARKS)


@pytest.mark.parametrize(
    "calls",
    [
        [{"type": "function", "function": {"name": "f"}}],
        [{"type": "function", "function": {"arguments": {}}}],
        [{"type": "function", "function": "f"}],
        [{"type": "function", "function": {"name": 1, "arguments": {}}}],
        [{"type": "function", "function": {"name": "f", "arguments": [1]}}],
        [{"type": "function", "function": {"name": "f", "arguments": {}}, "index": 0}],
        ["f"],
        {"name": "f", "arguments": {}},
    ],
)
def test_calls_of_another_form_are_left_to_the_reference(calls: Any) -> None:
    chat = Chat([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert sealed(chat, []) is None


@pytest.mark.parametrize(
    "chat",
    [
        Chat([{"role": "user", "content": "Hi", "priority": 1}]),
        Chat([{"role": "user", "content": "Hi"}], ["f"]),
        Chat([{"role": "user", "content": "Hi"}], variables={"enable_thinking": False}),
    ],
)
def test_conversations_with_other_than_texts_are_left_to_the_reference(chat: Chat) -> None:
    assert sealed(chat, []) is None


def test_the_record_itself_is_left_as_it_is() -> None:
    chat, same = calling(), calling()
    view = sealed(chat, [])
    assert view is not None and view.tools is not None
    assert type(view.tools[0]) is Sealed
    assert chat == same
    assert sealed(calling("{}")._replace(tools=None), []) == calling("{}")._replace(tools=None)
