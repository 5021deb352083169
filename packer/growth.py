"""Whether a chat template's values may grow beyond all bounds: the fast engine bounds none, and gets no such.

minijinja limits the steps of a render and not the size of a value, and forty steps that double a text are
enough, or one that indents it by a large number. A text multiplies only where what was kept is put together
with what was kept, `ns.a = ns.a + ns.a` and not `ns.a = ns.a + turn.content`, or goes through a loop that
writes it or a filter that may double it. So a value that outlives a turn of a loop (in a namespace) or goes
from call to call (of a macro) may take up one value that depends on itself, and others, which every turn
begins anew, may become a few times what they began with. Templates that do more, which nobody has seen, go
through jinja2 alone (sandbox.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from jinja2 import Environment, nodes

_TIMES = 256
"""How many times a value may multiply in what runs straight through."""
_KEEPING = (nodes.Assign, nodes.AssignBlock, nodes.For, nodes.Macro, nodes.CallBlock, nodes.Call)
_WRITTEN = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock)
"""What keeps as much as its loops write."""
_MAKING = (
    *(nodes.Add, nodes.Concat, nodes.Mod, nodes.Call, nodes.Filter),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Output),
)
"""What may make one value of several; a comparison, say, does not."""


_SHRINKING = frozenset(
    (
        *("abs", "bool", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items"),
        *("last", "length", "list", "lower", "lstrip", "max", "min", "reject", "rejectattr", "reverse"),
        *("rstrip", "safe", "select", "selectattr", "sort", "strip", "title", "trim", "unique", "upper"),
        *("endswith", "get", "keys", "split", "splitlines", "startswith", "values"),
    )
)
"""Filters and methods that make no more of a value than there was; others may double it on their own."""
_BY_NUMBER, _BY_INDENT = frozenset(("batch", "format", "slice")), frozenset(("indent", "tojson"))
_INDENT = 64


class Taken(NamedTuple):
    """A name that keeps a value, and the names in what it gets, as often as they stand there."""

    name: str
    names: list[str]
    is_made: bool
    """Whether several values may become one; they do not in a comparison, say."""
    again: list[str]
    """The names that stand in a loop, and so may be taken more than once."""

    def weight(self, among: Set[str]) -> int:
        """How many values of these names become one."""
        count = sum(name in among for name in self.names)
        return count if self.is_made else min(count, 1)

    def grows_by(self, circle: Set[str]) -> bool:
        """Whether a value becomes several times itself where it goes round in a circle."""
        return self.weight(circle) > 1 or (self.is_made and not circle.isdisjoint(self.again))


def may_multiply(environment: Environment, source: str) -> bool:
    """Whether a template may put kept values together again and again."""
    tree = environment.parse(source)
    if any(tree.find_all((nodes.Mul, nodes.Pow))) or any(map(_goes_by_number, tree.find_all(nodes.Filter))):
        return True
    if any(_has_range(loop) for kept in tree.find_all(_WRITTEN) for loop in kept.find_all(nodes.For)):
        return True
    macros = {macro.name: [name.name for name in macro.args] for macro in tree.find_all(nodes.Macro)}
    taken = [*_taken(tree, macros)]
    kept = {one.name for one in taken}
    carried = {name.name for name in tree.find_all(nodes.NSRef)}.union(macros, *macros.values())
    sources: dict[str, set[str]] = {}
    for one in taken:
        sources.setdefault(one.name, set()).update(one.names)
    reached = {name: _reached(name, sources) for name in kept}
    times = 1
    for one in taken:
        circle = {other for other in reached[one.name] if one.name in reached.get(other, ())}
        if circle & carried and one.grows_by(circle):
            return True
        times *= max(one.weight(kept), 1)
    return times > _TIMES


def _taken(tree: nodes.Template, macros: dict[str, list[str]]) -> Iterator[Taken]:
    """What is kept, wherever that is: by name, by turn, by macro and by the arguments of one."""
    for one in tree.find_all(_KEEPING):
        if isinstance(one, nodes.Assign):
            yield from _given(_targets(one.target), [one.node])
        elif isinstance(one, nodes.AssignBlock):
            yield from _given(_targets(one.target), one.body)
        elif isinstance(one, nodes.For):
            yield from _given(_targets(one.target), [one.iter])
        elif isinstance(one, nodes.Macro):
            yield from _given([one.name], one.body)
        elif isinstance(one, nodes.CallBlock):
            yield from _given(["caller"], one.body)
        elif isinstance(one, nodes.Call) and isinstance(one.node, nodes.Name) and one.node.name in macros:
            for value in (*one.args, *(option.value for option in one.kwargs)):
                yield from _given(macros[one.node.name], [value])


def _given(targets: Sequence[str], values: Sequence[nodes.Node]) -> Iterator[Taken]:
    found = [one for value in values for one in (value, *value.find_all((nodes.Name, *_MAKING)))]
    names = [one.name for one in found if isinstance(one, nodes.Name)]
    names += [name for one in found if _may_double(one) for name in _names([one])]
    is_made = any(isinstance(one, _MAKING) for one in found)
    loops = [loop for value in values for loop in (value, *value.find_all(nodes.For))]
    again = [name for loop in loops if isinstance(loop, nodes.For) for name in _names(loop.body)]
    return (Taken(name, names, is_made, again) for name in targets)


def _names(values: Sequence[nodes.Node]) -> list[str]:
    return [name.name for value in values for name in value.find_all(nodes.Name)]


def _may_double(one: nodes.Node) -> bool:
    if isinstance(one, nodes.Filter):
        return one.name not in _SHRINKING
    return (
        isinstance(one, nodes.Call)
        and isinstance(one.node, nodes.Getattr)
        and one.node.attr not in _SHRINKING
    )


def _goes_by_number(one: nodes.Filter) -> bool:
    """Whether a filter makes as much as a number says that may be large."""
    given = [*one.args, *(option.value for option in one.kwargs)]
    if one.name == "map":
        return any(
            isinstance(value, nodes.Const) and value.value in _BY_NUMBER | _BY_INDENT for value in given
        )
    if one.name in _BY_INDENT:
        return any(
            not isinstance(value, (nodes.Const, nodes.Tuple))
            or (isinstance(value, nodes.Const) and isinstance(value.value, int) and value.value > _INDENT)
            for value in given
        )
    return one.name in _BY_NUMBER


def _has_range(loop: nodes.For) -> bool:
    return "range" in _names([loop.iter])


def _targets(target: nodes.Node) -> list[str]:
    found = (target, *target.find_all((nodes.Name, nodes.NSRef)))
    return [one.name for one in found if isinstance(one, (nodes.Name, nodes.NSRef))]


def _reached(name: str, sources: Mapping[str, set[str]]) -> set[str]:
    """The names that a value comes from, over any number of steps."""
    found: set[str] = set()
    new = {name}
    while new:
        new = {other for one in new for other in sources.get(one, ())} - found
        found |= new
    return found
