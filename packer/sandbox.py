"""jinja2's sandbox with its looks at a record's dicts taken straight: the same answers in half the time.

A chat template is little else than `message.role` and `message.content`. For each, jinja2 tries Python's
attributes before the dict's keys, and asks again whether the attribute is safe. Both answers depend on
types and names alone, so they are found once. transformers' own environment is the reference (the tests
hold both equal).
"""

from __future__ import annotations

from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OF_DICTS = frozenset(dir(dict))


class Sandbox(ImmutableSandboxedEnvironment):
    """As transformers makes it, but for the filters and globals that are the template's own."""

    def __init__(self) -> None:
        self._safe: dict[tuple[type, str], bool] = {}
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`, for a dict without such an attribute straight from its keys."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """jinja2's own answer, asked for once for each type and name."""
        key = (type(obj), attr)
        found = self._safe.get(key)
        if found is None:
            found = self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return found
