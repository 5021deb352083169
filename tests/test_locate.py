"""Templates without generation blocks: their turns are located as if they had them, or refused."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from building import TOKENIZER, build, built, sequences_of, write_lines
from chats import files_of, marks_for, plain_chats, rich_chats, template_of
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer.errors import RecordError
from padless.packer.formats import FORMATS, detect
from padless.packer.formats.examples import Chat, Columns
from padless.packer.locate import LocatedTemplate, located, mark_turns
from padless.packer.marks import split_marked
from padless.packer.sealed import is_plain
from padless.packer.template import ChatTemplate

MARKS = "\x01\x02\x03"
SPECIALS = ["<|end|>", "<eos>", "<bos>"]
TOKENIZERS = ("qwen3", "llama3.1", "mistral-sp")
DPO = {"prompt": "conversations", "completion": "chosen"}
DATA: dict[str, tuple[str, dict[str, str]]] = {
    "alpaca": ("alpaca/alpaca_data.json", {}),
    "chats": ("chat/dummy_conversation.json", {}),
    "tool calls": ("chat/glaive_toolcall_en_demo.json", {}),
    "kto": ("preference/kto_en_demo.json", {}),
    "chosen": ("preference/dpo_en_demo.json", DPO),
    "rejected": ("preference/dpo_en_demo.json", {**DPO, "completion": "rejected"}),
    "hindi": ("multilingual/xquad_hi_messages.jsonl", {}),
    "arabic": ("multilingual/xquad_ar_messages.jsonl", {}),
    "chinese": ("multilingual/xquad_zh_messages.jsonl", {}),
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def chats_of(path: Path, columns: dict[str, str], limit: int) -> list[Chat]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else []
    rows = [json.loads(line) for line in lines] or json.loads(text)
    named = Columns(columns)
    # Labelled chats too, for the turns that they have.
    name = "messages" if "messages" in rows[0] else detect(rows[0], named, path.name)
    convert = FORMATS[name].convert
    chats = [convert(row, named) for row in rows[:limit]]
    assert all(isinstance(chat, Chat) for chat in chats)
    return chats  # type: ignore[return-value]


def located_own(shared: Path, tokenizer: str) -> ChatTemplate:
    own = template_of(shared, f"{tokenizer}/own")
    found = located(own, files_of(shared, tokenizer).special_contents)
    assert isinstance(found, LocatedTemplate), own.why_unmarked
    return found


@pytest.mark.shared
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_located_template_that_travelled_renders_the_same(shared: Path, tokenizer: str) -> None:
    template = located_own(shared, tokenizer)
    chats = [Chat([user("a question"), answer(f"answer {n}")]) for n in range(4)]
    template.enable_fast(chats, MARKS)
    found = pickle.loads(pickle.dumps(template))
    assert [found.render(chat, MARKS) for chat in chats] == [template.render(chat, MARKS) for chat in chats]
    assert template.fast is not None and found.fast is not None
    assert found.render_fast(chats, MARKS) == template.render_fast(chats, MARKS)


def located_text(source: str, **variables: str) -> ChatTemplate:
    """A small template, located; it must be possible."""
    template = ChatTemplate(source, variables, "here")
    found = located(template, SPECIALS)
    assert found is not None
    assert isinstance(found, LocatedTemplate), template.why_unmarked
    return found


def trained(template: ChatTemplate, chat: Chat) -> list[str]:
    """What is trained of a chat, span by span."""
    text, spans = split_marked(template.render(chat, MARKS), MARKS).one(0)
    return [text[start:end] for start, end in spans]


def render_or_refusal(template: ChatTemplate, chat: Chat, marks: str) -> str:
    try:
        return template.render(chat, marks)
    except RecordError as error:
        return f"refused: {error}"


# -- against templates with generation blocks ---------------------------------------------------


@pytest.mark.shared
@pytest.mark.parametrize("case", DATA)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_turns_are_those_of_the_template_with_generation_blocks(
    shared: Path, tokenizer: str, case: str
) -> None:
    file, columns = DATA[case]
    chats = chats_of(shared / "data" / file, columns, 1000)
    expected = template_of(shared, f"{tokenizer}/chat_template.generation.jinja")
    found = located_own(shared, tokenizer)
    marks = marks_for(expected, *chats)
    compared = 0
    for chat in chats:
        text = render_or_refusal(found, chat, marks)
        assert text == render_or_refusal(expected, chat, marks)
        compared += not text.startswith("refused")
    assert compared > 100
    plain = [chat for chat in chats if is_plain(chat)]
    assert found.enable_fast(plain[:32], marks)
    assert found.render_fast(plain, marks) == "".join(expected.render(chat, marks) for chat in plain)


@pytest.mark.shared
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_turns_of_any_conversation_are_those_of_the_template_with_generation_blocks(
    shared: Path, tokenizer: str
) -> None:
    expected = template_of(shared, f"{tokenizer}/chat_template.generation.jinja")
    found = located_own(shared, tokenizer)
    assert found.enable_fast([Chat([user("Hi"), answer("Hello")])], MARKS)
    compared = 0

    @settings(max_examples=80, deadline=None)
    @given(chat=st.one_of(plain_chats(), rich_chats()))
    def same(chat: Chat) -> None:
        nonlocal compared
        marks = marks_for(expected, chat)
        text = render_or_refusal(found, chat, marks)
        assert text == render_or_refusal(expected, chat, marks)
        if is_plain(chat):
            assert found.render_fast([chat, chat], marks) == text + text
        compared += not text.startswith("refused")

    same()
    assert compared > 20


@pytest.mark.shared
def test_a_build_needs_no_template_with_generation_blocks(shared: Path, tmp_path: Path) -> None:
    sources = [
        write_lines(
            tmp_path / f"{number}.jsonl", json.loads((shared / "data" / DATA[case][0]).read_text())[:100]
        )
        for number, case in enumerate(("alpaca", "tool calls"))
    ]
    folder = shared / "tokenizers" / "qwen3"
    more = (sources[1], "--tokenizer", folder, "--max-length", 16384, "--workers", 1)
    built(sources[0], tmp_path / "own", *more)
    marked = folder / "chat_template.generation.jinja"
    built(sources[0], tmp_path / "marked", *more, "--template", marked)
    found = sequences_of(tmp_path / "own")
    assert len(found) == 200
    assert found == sequences_of(tmp_path / "marked")


def test_templates_that_ship_with_trl_are_located_or_refused_with_a_reason() -> None:
    # Some forty models' own templates; what their tokenizers call special is told by its looks.
    folder = Path(str(importlib.resources.files("trl"))) / "chat_templates"
    looks = re.compile(r"<[|｜][^|｜<>\s]*[|｜]>|</?s>|<(?:start|end)_of_turn>|<turn\|>")
    chat = Chat([user("Q1"), answer("first A"), user("Q2"), answer("second A"), user("Q3")])
    done = 0
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, path.name)
        if template.has_marks:
            continue
        found = located(template, sorted({*looks.findall(source), "<s>", "</s>"}, key=len, reverse=True))
        if found is template:
            assert "generation %}" not in template.why_unmarked, path.name
            continue
        assert found is not None
        one, two = trained(found, chat)
        assert ("first A" in one, "second A" in two) == (True, True), path.name
        for span in (one, two):
            assert "Q" not in span
            assert span.endswith((">", "|>")), path.name
        done += 1
    assert done > 15


# -- how templates write turns ------------------------------------------------------------------

HEAD, FOOT = "{% for m in messages %}", "{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
CHAT = Chat([user(" q "), answer(" one "), user("q"), answer("two</t>\nthree")])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            "{{ '<A>' if m.role == 'assistant' else '<U>' }}{{ m.content }}<|end|>\n",
            [" one <|end|>", "two</t>\nthree<|end|>"],
            id="as it is",
        ),
        pytest.param(
            "{{ '<A>' if m.role == 'assistant' }}{{ m.content | trim }}<|end|>",
            ["one<|end|>", "two</t>\nthree<|end|>"],
            id="trimmed",
        ),
        pytest.param(
            "{{ '<A>' if m.role == 'assistant' }}{{ m.content.split('</t>')[-1].lstrip('\n') }}<|end|>",
            [" one <|end|>", "three<|end|>"],
            id="split",
        ),
        pytest.param(
            "{% if m.role == 'assistant' %}<A>{% if loop.last and not m.content.startswith('<t>') %}<t></t>"
            "{% endif %}{% endif %}{{ m.content }}<|end|>",
            [" one <|end|>", "<t></t>two</t>\nthree<|end|>"],
            id="something of its own before the last",
        ),
        pytest.param(
            "{% if m.role == 'user' %}{{ m.content }}{% continue %}{% endif %}<A>{{ m.content }}"
            "{% if m.role == 'assistant' %}<|end|>\n{% continue %}{% endif %}never",
            [" one <|end|>", "two</t>\nthree<|end|>"],
            id="continue",
        ),
        pytest.param(
            "{% set role = m['role'] %}{% set text %}{{ m['content'] }}{% endset %}"
            "{{ ('<A>' if role == 'assistant') ~ text | trim }}{{ eos_token }}",
            ["one<eos>", "two</t>\nthree<eos>"],
            id="through a block",
        ),
        pytest.param(
            "{% macro said(x) %}{% for w in x.split(' ') %}{{ w }}{% endfor %}{% endmacro %}"
            "{{ '<A>' if m.role == 'assistant' }}{{ said(m.content) }}<|end|>",
            ["one<|end|>", "two</t>\nthree<|end|>"],
            id="through a macro with a loop",
        ),
        pytest.param(
            "{{ '<A>' if m.role == 'assistant' }}{{ m.content }}\n### End\n",
            [" one \n### End", "two</t>\nthree\n### End"],
            id="an end that is no special token",
        ),
        pytest.param(
            "{{ '<A>' if m.role == 'assistant' }}{{ m.content }}<|end|>{{ eos_token }}{{ bos_token }}",
            [" one <|end|><eos>", "two</t>\nthree<|end|><eos>"],
            id="several special tokens, one of them the end token",
        ),
        pytest.param(
            "{{ '<A>' if m.role == 'assistant' }}{{ m.content }}"
            "{# {% for x in y %} #}{% raw %}{% endfor %}{% endraw %}{{ '{% endfor %}' }}<|end|>",
            [" one {% endfor %}{% endfor %}<|end|>", "two</t>\nthree{% endfor %}{% endfor %}<|end|>"],
            id="tags that are none",
        ),
    ],
)
def test_a_turn_is_what_its_iteration_writes(body: str, expected: list[str]) -> None:
    template = located_text(HEAD + body + FOOT, eos_token="<eos>", bos_token="<bos>")
    assert trained(template, CHAT) == expected


def test_a_header_written_with_the_question_is_not_of_the_answer() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{{ '<A>' if m.role == 'user' else '<|end|>' }}{% endfor %}"
    )
    assert trained(located_text(source), CHAT) == [" one <|end|>", "two</t>\nthree<|end|>"]


def test_a_loop_that_only_looks_marks_nothing() -> None:
    look = "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %} {% set ns.n = ns.n + 1 %}{% endfor %}"
    source = look + HEAD + "{{ '<A>' if m.role == 'assistant' }}{{ m.content }}<|end|>" + FOOT
    assert trained(located_text(source), CHAT) == [" one <|end|>", "two</t>\nthree<|end|>"]


def test_the_end_token_of_calls_may_be_another_one() -> None:
    source = (
        HEAD + "{{ '<A>' if m.role == 'assistant' }}{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}()<eos>{% else %}<|end|>{% endif %}\n" + FOOT
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    chat = Chat([user("q"), answer("", tool_calls=calls), {"role": "tool", "content": "r"}, answer("a")])
    assert trained(located_text(source), chat) == ["f()<eos>", "a<|end|>"]


def test_marking_turns_keeps_every_rule_about_white_space() -> None:
    compared = 0
    chat = Chat([user("q"), answer("a"), {"role": "tool", "content": "t"}])
    sides = list(itertools.product(["{%", "{%-", "{%+"], ["%}", "-%}", "+%}"]))
    for (left, right), (left_2, right_2) in itertools.product(sides, sides):
        for space in ("", " ", "\n", "\n  "):
            source = space.join(
                [
                    f"x{space}{left} for m in messages {right}",
                    f"y{space}{left_2} if m.role == 'tool' {right_2}",
                    f"{left} continue {right}",
                    "{% endif %}",
                    f"{{{{ m.content }}}}{space}{left_2} else {right_2}",
                    f"n{space}{left} endfor {right_2}",
                    "z",
                ]
            )
            marked = ChatTemplate(mark_turns(source), {}, "marked").render(chat, MARKS)
            assert "\x01" in marked
            bare = marked.replace("\x01", "").replace("\x02", "")
            assert bare == ChatTemplate(source, {}, "bare").render(chat, MARKS), source
            compared += 1
    assert compared == 81 * 4


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            HEAD + "{{ '<A>' if m.role == 'assistant' }}{{ m.content }}\n" + FOOT,
            "no end token behind an answer",
        ),
        (HEAD + "<A>{{ m.content }}{% if not loop.last %}<|end|>{% endif %}" + FOOT, "no end token"),
        (HEAD + "[{{ m.role }}] {{ m.content }}<|end|>{% endfor %}", "nothing where add_generation_prompt"),
        (
            HEAD + "<B>{{ m.content }}<|end|>" + FOOT,
            "answers begin with '<B>', but its generation prompt is '<A>'",
        ),
        (HEAD + "<A>{{ m.content }}<|end|><bos>" + FOOT, "several special tokens behind each answer"),
        (
            "{{ messages | map(attribute='content') | join('<|end|>') }}",
            "0 turns of the assistant where there",
        ),
        ("{% set x %}" + HEAD + "<A>{{ m.content }}<|end|>" + FOOT + "{% endset %}{{ x | trim }}", "0 turns"),
        (HEAD + "<|end|>{% endfor %}{{ messages[-1].content }}", "does not write what they say"),
        (
            HEAD + "{{ messages[loop.index0 - 1].content }}{{ m.content }}<|end|>" + FOOT,
            "together with the assist",
        ),
        (
            HEAD + "{{ m.content }}<|end|>{% endfor %}" + HEAD + "{{ m.content }}{% endfor %}",
            "2 turns of the ass",
        ),
        (HEAD + "{{ m.content }}" + HEAD + "{{ m.content }}{% endfor %}{% endfor %}", "loop over messages"),
        ("{{ raise_exception('no') }}", "the chat template refuses it: no"),
        ("{{ strftime_now('%Y') }}", "today's date"),
    ],
)
def test_a_template_that_does_not_show_its_turns_is_left_as_it_is_with_the_reason(
    source: str, reason: str
) -> None:
    template = ChatTemplate(source, {"eos_token": "<eos>"}, "here")
    assert located(template, SPECIALS) is template
    assert reason in template.why_unmarked


def test_a_template_with_generation_blocks_is_left_as_it_is() -> None:
    template = ChatTemplate("{% generation %}{{ messages }}{% endgeneration %}", {}, "here")
    assert located(template, SPECIALS) is template
    assert located(None, SPECIALS) is None


def test_a_record_whose_turns_are_left_out_is_refused() -> None:
    source = "{% for m in messages[-4:] %}{{ '<A>' if m.role == 'assistant' }}{{ m.content }}<|end|>" + FOOT
    template = located_text(source)
    assert len(trained(template, CHAT)) == 2
    with pytest.raises(RecordError, match="2 turns of the assistant where there are 3"):
        template.render(Chat([*CHAT.messages, user("q"), answer("a")]), MARKS)


def test_a_record_whose_answer_is_written_in_another_way_is_refused() -> None:
    source = HEAD + "{{ '<B>' if m.secret else '<A>' }}{{ m.content }}<|end|>" + FOOT
    template = located_text(source)
    with pytest.raises(RecordError, match=r"writes an answer as '<B>x<\|end\|>', but others between '<A>'"):
        template.render(Chat([user("q"), answer("x", secret="yes")]), MARKS)


def test_calls_are_refused_where_the_template_writes_nothing_of_them() -> None:
    template = located_text(HEAD + "<A>{{ m.content }}<|end|>" + FOOT)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    with pytest.raises(RecordError, match="calls tools.*unclear: its loop over messages does not write"):
        template.render(Chat([user("q"), answer("", tool_calls=calls)]), MARKS)


def test_many_at_once_are_refused_where_one_of_them_is() -> None:
    template = located_text(HEAD + "{{ '<B>' if m.secret else '<A>' }}{{ m.content }}<|end|>" + FOOT)
    assert template.enable_fast([CHAT], MARKS)
    assert template.render_fast([CHAT], MARKS) == template.render(CHAT, MARKS)
    with pytest.raises(RecordError, match="others between"):
        template.render_fast([CHAT, Chat([user("q"), answer("x", secret="yes")])], MARKS)


def test_a_build_says_why_turns_cannot_be_told_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(HEAD + "<A>{{ m.content }}\n" + FOOT, encoding="utf-8")
    source = write_lines(tmp_path / "in.jsonl", [{"messages": [user("q"), answer("a")]}])
    run = build(source, tmp_path / "out", "--tokenizer", TOKENIZER, "--template", file)
    assert run.code == 2
    message = " ".join(run.err.split())
    assert "no end token behind an answer" in message
    assert "{% generation %}" in message
    assert "--train-on all" in message
    assert built(source, tmp_path / "out", "--template", file, "--train-on", "all")["kept_records"] == 1


def test_where_everything_is_trained_turns_need_not_be_told(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    turn = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}!{% else %}{{ m.content }}<|im_end|>{% endif %}"
    file.write_text(HEAD + "<A>" + turn + FOOT, encoding="utf-8")
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    rows = [{"messages": [user("q"), answer("", tool_calls=calls)]}]
    source = write_lines(tmp_path / "in.jsonl", rows)
    run = build(source, tmp_path / "out", "--template", file)
    assert run.code == 2
    assert "calls tools" in run.err
    assert built(source, tmp_path / "out", "--template", file, "--train-on", "all")["kept_records"] == 1
