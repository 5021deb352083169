"""The sandbox with its short cuts answers as jinja2's own does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from padless.packer.sandbox import Sandbox

OWN = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
NAMES = ("role", "content", "items", "get", "pop", "update", "keys", "copy", "clear", "format", "append")
ASKED = st.sampled_from([*NAMES, "__class__", "__init__", "_private", "index0", "missing"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ASKED, inner, max_size=3),
    max_leaves=6,
)


def answer(environment: ImmutableSandboxedEnvironment, source: str, value: Any) -> str:
    try:
        return environment.from_string(source).render(x=value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@given(value=VALUES, name=ASKED, then=ASKED)
def test_attributes_of_records_are_what_jinja2_finds(value: Any, name: str, then: str) -> None:
    sandbox = Sandbox()
    for source in (
        f"{{{{ x.{name} }}}}",
        f"{{{{ x['{name}'] }}}}",
        f"{{{{ x.{name} is defined }}}}",
        f"{{{{ x.{name}.{then} is defined }}}}",
        f"{{{{ x | attr('{name}') is defined }}}}",
    ):
        for _ in range(2):  # the second time from what was found the first time
            found, expected = answer(sandbox, source, value), answer(OWN, source, value)
            assert found.split(" at 0x")[0] == expected.split(" at 0x")[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.pop('role') }}",
        "{{ x.update({}) }}",
        "{{ x.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(x) }}",
        "{{ x.items.__self__.role }}",
        "{{ [].append(1) }}",
    ],
)
def test_templates_reach_nothing_that_jinja2_keeps_from_them(source: str) -> None:
    record = {"role": "user"}
    expected = answer(OWN, source, record)
    assert "SecurityError" in expected
    assert [answer(Sandbox(), source, record) for _ in range(2)] == [expected, expected]
    assert record == {"role": "user"}
