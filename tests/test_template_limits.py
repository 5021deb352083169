"""What a template may take is limited, in both engines; ordinary templates notice nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from building import DEMO, build
from jinja2.sandbox import ImmutableSandboxedEnvironment

from padless.packer import template, template_limits
from padless.packer.errors import InputError, RecordError
from padless.packer.formats.examples import Chat
from padless.packer.growth import may_multiply
from padless.packer.template import BUILT_IN, ChatTemplate, built_in, mark_generation

MARKS = "\x01\x02\x03"
CHAT = Chat([{"role": "user", "content": "one\ntwo"}, {"role": "assistant", "content": "three"}])
DOUBLES = "{% set ns = namespace(a=messages[0].content) %}"
DOUBLES += "{% for n in range(64) %}{% set ns.a = TWICE %}{% endfor %}{{ ns.a | length }}"
MULTIPLY = {
    "added": DOUBLES.replace("TWICE", "ns.a + ns.a"),
    "joined": DOUBLES.replace("TWICE", "ns.a ~ ns.a"),
    "formatted": DOUBLES.replace("TWICE", "'%s%s' % (ns.a, ns.a)"),
    "by a filter": DOUBLES.replace("TWICE", "[ns.a, ns.a] | join"),
    "by a method": DOUBLES.replace("TWICE", "ns.a.replace('one', ns.a)"),
    "by a name between": DOUBLES.replace(
        "{% set ns.a = TWICE %}", "{% set b = ns.a + ns.a %}{% set ns.a = b %}"
    ),
    "by a block": DOUBLES.replace("{% set ns.a = TWICE %}", "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
    "by a macro": "{% macro m(x, n) %}{% if n %}{{ m(x ~ x, n - 1) }}{% endif %}{% endmacro %}"
    "{{ m('ab', 64) }}",
    "by calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}"
    + "x" * 10_000
    + "{% endif %}{% endmacro %}{{ m(40) | length }}",
    "line by line": "{% set a = 'ab' %}" + "{% set a = a ~ a %}" * 40 + "{{ a | length }}",
    "by a filter with a constant": DOUBLES.replace("TWICE", "ns.a | replace('o', 'oo')"),
    "by JSON in JSON": DOUBLES.replace("TWICE", "('\"' ~ ns.a) | tojson"),
    "letter by letter": DOUBLES.replace("TWICE", "ns.a | list | join('ab')"),
    "by a loop in a block": DOUBLES.replace(
        "{% set ns.a = TWICE %}", "{% set ns.a %}{% for i in messages %}{{ ns.a }}{% endfor %}{% endset %}"
    ),
    "by nesting": "{% set l = messages %}" + "{% set l = [l, l] %}" * 40 + "{{ l | tojson | length }}",
}
AT_ONCE = {
    "repeated": "{{ messages[0].content * 10**9 }}",
    "a list": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ 10**(10**8) > 1 }}",
    "padded": "{{ messages[0].content.ljust(10**9) }}",
    "centred": "{{ messages[0].content | center(10**9) }}",
    "indented": "{{ messages[0].content | indent(10**9) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width given": "{{ '%*d' % (10**9, 1) }}",
    "a form": "{{ '{:1000000000}'.format(1) }}",
    "slices": "{{ messages | slice(10**9) | list | length }}",
    "JSON": "{{ messages | tojson(indent=10**9) }}",
    "HTML repeated": DOUBLES.replace("TWICE", "(ns.a | safe) + (ns.a | safe)"),
    "HTML padded": "{{ ('x' | safe).ljust(10**11) | length }}",
    "HTML escaped": "{{ ('&' * 2**25) | e | length }}",
    "bytes": "{{ ('x'.encode() * 10**11) | length }}",
    "bytes padded": "{{ 'x'.encode().ljust(10**11) | length }}",
    "bytes of a number": "{{ (1).to_bytes(10**11, 'big') | length }}",
    "rounded": "{{ 42.5 | round(10**9, 'ceil') }}",
    "a width in a text": "{{ '{:{w}}'.format(1, w='100000000000') }}",
    "a width in a list": "{{ '{:{w[0]}}'.format(1, w=[10**11]) }}",
    "by name": "{{ ('%(a)s' * 10**5) % {'a': 'x' * 10**7} }}",
    "one by one": "{{ (['x'] * 10**4) | map('center', 10**7) | join | length }}",
    "translated": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) | length }}",
    "wrapped": "{{ ('a ' * 10**6) | wordwrap(1, wrapstring='x' * 10**6) | length }}",
    "literal": "{{ 'x' | center(1000000000) }}",
}


@pytest.mark.parametrize("source", [*MULTIPLY.values(), *AT_ONCE.values()], ids=[*MULTIPLY, *AT_ONCE])
def test_a_template_that_makes_too_much_of_a_record_refuses_it(source: str) -> None:
    with pytest.raises(RecordError, match=r"chat template refuses it: it (makes|indents)"):
        ChatTemplate(source, {}, "here").render(CHAT, MARKS)


@pytest.mark.parametrize("source", MULTIPLY.values(), ids=MULTIPLY)
def test_the_engine_that_bounds_no_value_never_gets_such_a_template(source: str) -> None:
    assert may_multiply(ImmutableSandboxedEnvironment(), source)
    never = source.replace("range(64)", "range(0)").replace(", 64)", ", 0)").replace("m(40)", "m(0)")
    assert not ChatTemplate(never, {}, "here").enable_fast([CHAT], MARKS)


@pytest.mark.parametrize(
    "source",
    [
        *map(built_in, BUILT_IN),
        "{% set ns = namespace(a='') %}{% for m in messages %}{% set ns.a = ns.a + m.content %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro m(t, first) %}{{ t.role }}{{ t.content }}{% endmacro %}{{ m(messages[0], true) }}",
    ],
)
def test_what_templates_are_made_of_goes_through_the_fast_engine(source: str) -> None:
    assert not may_multiply(ImmutableSandboxedEnvironment(), source.replace("generation", "with"))


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "mistral-sp"])
@pytest.mark.shared
def test_published_templates_go_through_the_fast_engine(shared: Path, name: str) -> None:
    for path in (shared / "tokenizers" / name).glob("*.jinja"):
        assert not may_multiply(
            ImmutableSandboxedEnvironment(), mark_generation(path.read_text(encoding="utf-8"))
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | indent(1000000000) }}",
        "{{ messages[0].content | indent(messages | length) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ messages | batch(1000000000, 0) | list | length }}",
        "{% set a %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
    ],
)
def test_nor_one_that_makes_much_by_a_number(source: str) -> None:
    hidden = "{% if messages[0].content == 'now' %}" + source + "{% endif %}{{ messages[0].content }}"
    assert not ChatTemplate(hidden, {}, "here").enable_fast([CHAT], MARKS)


def test_what_the_fast_engine_writes_too_much_of_is_seen_record_by_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "here")
    assert found.enable_fast([CHAT], MARKS)
    monkeypatch.setattr(template, "CHARACTERS", 4)
    with pytest.raises(template_limits.OversizeError):
        found.render_fast([CHAT], MARKS)


@pytest.mark.parametrize("turn, turns", [("one ", 20_000), ("a", 600_000)])
def test_long_conversations_are_rendered_in_time_that_grows_with_them(turn: str, turns: int) -> None:
    """A list that grows turn by turn is not looked through at each, and entries are no sign of growth."""
    grows = "{% set ns = namespace(l=[]) %}{% for m in messages[:20000] %}{% set ns.l = ns.l + [m] %}"
    grows += "{% endfor %}{% for m in messages | list %}{{ m.content }}{% endfor %}"
    chat = Chat([{"role": "user", "content": turn}] * turns)
    started = time.thread_time()
    assert ChatTemplate(grows, {}, "here").render(chat, MARKS) == turn * turns + MARKS[2]
    assert time.thread_time() - started < 20  # a second, and 50 if every list is looked through


def test_a_template_that_lies_too_deep_is_refused() -> None:
    with pytest.raises(InputError, match="chat template here: .* too deep"):
        ChatTemplate("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", {}, "here")


def test_no_memory_is_no_reason_to_drop_a_record() -> None:
    def full() -> None:
        raise MemoryError

    found = ChatTemplate("{{ full() }}", {"full": full}, "here")
    with pytest.raises(InputError, match="chat template here: there is no memory") as problem:
        found.render(CHAT, MARKS)
    assert not isinstance(problem.value, RecordError)


@pytest.mark.parametrize("source", ["{{ lipsum(10**9) }}", "{{ messages | random }}"])
def test_a_template_that_draws_by_chance_is_refused(source: str) -> None:
    with pytest.raises(InputError, match="draws by chance"):
        ChatTemplate(source, {}, "here").render(CHAT, MARKS)


ENDLESS = {
    "turns": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "turns that are left out": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(64) }}",
    "filters": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.05)
    with pytest.raises(
        InputError, match=r"chat template here: it takes more than 0.05 seconds .* --template"
    ):
        ChatTemplate(source, {}, "here").render(CHAT, MARKS)


@pytest.mark.parametrize("spelled", ["", "<|im_end|> "])
def test_the_fast_engine_runs_out_of_steps_and_the_reference_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str
) -> None:
    """A template that goes astray in one record alone, and not in those that were tried."""
    monkeypatch.setattr(template_limits, "SECONDS", 0.2)
    monkeypatch.setattr(template, "FUEL", 2**20)
    astray = tmp_path / "astray.jinja"
    astray.write_text(
        "{% for m in messages %}{% if 'record 399' in m.content %}"
        + ENDLESS["turns"]
        + "{% endif %}{% if m.role == "
        "'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    rows = DEMO.read_text(encoding="utf-8").splitlines()
    rows[-1] = rows[-1].replace('"instruction": "', f'"instruction": "{spelled}record 399 ')
    source_file = tmp_path / "rows.jsonl"
    source_file.write_text("\n".join(rows), encoding="utf-8")
    run = build(source_file, tmp_path / "out", "--template", astray, "--on-bad-record", "drop")
    assert run.code == 2
    assert "rows.jsonl, record 399" in run.err and "astray.jinja" in run.err and "0.2 seconds" in run.err
    assert not (tmp_path / "out" / "manifest.json").exists()
