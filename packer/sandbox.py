"""jinja2's sandbox for chat templates: the answers of transformers' own, quicker, and within limits.

A chat template is little else than `message.role` and `message.content`. For each, jinja2 tries Python's
attributes before the dict's keys, and asks again whether the attribute is safe. Both answers depend on
types and names alone, so they are found once. transformers' own environment is the reference (the tests
hold both equal).

Templates come along with tokenizers from anywhere, so what one render may take is limited: the processor's
time is looked at in turns of loops and at calls, and whatever is written or put together has a greatest size
(template_limits.py). The price is half the time of a render. It stops mistakes and what is known of
intent; it is no jail for whoever may write templates: run what nobody vouches for where it can do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from padless.packer.template_limits import (
    CHARACTERS,
    ENTRY,
    HOLDING,
    LARGE,
    TEXTS,
    Spent,
    most_of_call,
    most_of_operator,
)

_OF_DICTS = frozenset(dir(dict))
_GROWING = (*TEXTS, int)
"""Types whose methods may make much out of little."""
_TURN, _CONCAT, _MADE = "padless_turn", "padless_concat", "padless_made"


class Sandbox(ImmutableSandboxedEnvironment):
    """As transformers makes it, but for the globals that are the template's own."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """`filters` in place of jinja2's, or beside them."""
        self._safe: dict[tuple[type, str], bool] = {}
        self.spent = Spent()
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.code_generator_class = _Captured
        found = {**self.filters, **(filters or {})}
        self.filters = {name: self._limited(name, given) for name, given in found.items()}
        self.filters |= {
            _TURN: _turn_of(self.spent),
            _CONCAT: _concat_of(self.spent),
            _MADE: self._made,
        }

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

    # -- limits ----------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found = super()._parse(source, name, filename)
        _Counted().visit(found)
        found.set_environment(self)
        return found

    def concat(self, pieces: Iterable[str]) -> str:
        """What a render writes, from its pieces."""
        found, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > CHARACTERS:
                self.spent.may_make(size)
            found.append(piece)
        return "".join(found)

    def captured(self, text: str) -> str:
        """A piece that goes into a macro's result or a block that is kept, counted."""
        self.spent.captured(len(text))
        return text

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        """jinja2's, if what comes out is not too large."""
        __self.spent.turn()
        owner = getattr(__obj, "__self__", None)
        if owner is None and hasattr(__obj, "__wrapped__"):  # the sandbox's own `format`, before Python's
            owner = getattr(__obj.__wrapped__, "__self__", None)
        if type(owner) is str or isinstance(owner, _GROWING):
            __self._may_make(most_of_call(__obj.__name__, owner, (*args, *kwargs.values())))
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator != "+":
            self._may_make(most_of_operator(operator, left, right))
        found = self.binop_table[operator](left, right)
        if operator != "+" or type(found) not in (list, tuple):
            return self._made(found)
        self.spent.holds_both(left, right, found)
        return found

    def _may_make(self, size: int) -> None:
        if size > CHARACTERS:
            self.spent.may_make(size)

    def _made(self, value: Any) -> Any:
        """A value that was put together, if it is not too large."""
        if type(value) is str or isinstance(value, TEXTS):
            if len(value) > LARGE:
                self.spent.is_large(len(value))
        elif type(value) in HOLDING:
            self.spent.holds(value)
        return value

    def _taken(self, values: Iterable[Any]) -> Iterator[Any]:
        """What a filter takes one by one, if all of it is not too large."""
        size = 0
        for value in values:
            size += ENTRY + (len(value) if isinstance(value, TEXTS) else 0)
            if size > CHARACTERS:
                self.spent.may_make(size)
            yield value

    def _limited(self, name: str, given: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is called if what comes out is not too large."""
        first = 1 if hasattr(given, "jinja_pass_arg") else 0

        @wraps(given)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.spent.turn()
            if len(args) > first and type(args[first]) is GeneratorType:  # of `map`, say, for `join`
                args = (*args[:first], self._taken(args[first]), *args[first + 1 :])
            if len(args) + len(kwargs) > first + 1:
                self._may_make(most_of_call(name, args[first], (*args[first + 1 :], *kwargs.values())))
            return self._made(given(*args, **kwargs))

        return limited


def _turn_of(spent: Spent) -> Callable[..., bool]:
    @pass_context  # or it would be done once, when the template is compiled
    def turn(context: Context, value: bool) -> bool:
        spent.turn()
        return value

    return turn


def _concat_of(spent: Spent) -> Callable[..., str]:
    def concat(parts: list[Any]) -> str:
        texts = [*map(str, parts)]
        if (size := sum(map(len, texts))) > CHARACTERS:
            spent.may_make(size)
        return "".join(texts)

    return concat


class _Counted(NodeTransformer):
    """Counts turns of loops, also those that an `if` leaves out, and what `~`, `[]` and `{}` put together."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(True), _TURN), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_filter(nodes.Const(True), _TURN), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._made(node, [*node.items])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return node if node.ctx == "store" else self._made(node, [*node.items])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._made(node, [pair.value for pair in node.items])

    def _made(self, node: nodes.Expr, values: list[nodes.Expr]) -> nodes.Expr:
        self.generic_visit(node)
        return node if all(isinstance(value, nodes.Const) for value in values) else _filter(node, _MADE)


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno or 1)


class _Captured(CodeGenerator):
    """Counts what macros and blocks write to be kept (jinja2's native types hook in at the same places)."""

    _captures = False

    def visit_Output(self, node: nodes.Output, frame: Any) -> None:
        self._captures = frame.buffer is not None
        super().visit_Output(node, frame)

    def _output_const_repr(self, group: Any) -> str:
        found = super()._output_const_repr(group)
        return f"environment.captured({found})" if self._captures else found

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        if self._captures:
            self.write("environment.captured(")
        super()._output_child_pre(node, frame, finalize)

    def _output_child_post(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        super()._output_child_post(node, frame, finalize)
        if self._captures:
            self.write(")")
