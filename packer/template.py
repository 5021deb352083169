"""Chat templates: one render of a conversation, with the trained spans marked in it.

`{% generation %}` blocks are rewritten so that the render itself carries a mark before and after each
(three control characters that nothing in the chunk contains; see packer/marks.py). jinja2, sandboxed,
is the reference: what transformers does (packer/sandbox.py). minijinja is 2 to 4 times faster and renders a
whole chunk at once, but only records of texts take it (packer/sealed.py tells which), and only with a
template on which a sample of the real input came out equal.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from padless.packer.errors import InputError, RecordError
from padless.packer.formats.examples import Chat
from padless.packer.sealed import Sealed, sealed, trims_alike, unsealed
from padless.packer.template_limits import CHARACTERS, FUEL, OversizeError, TooSlowError

BUILT_IN = ("chatml", "llama3", "mistral", "gemma", "phi", "qwen", "deepseek")
"""Templates that come along, for chats of text; each is templates/NAME.jinja and marks its answers."""
CLASSIC = "alpaca"
"""The name that asks for the two classic alpaca prompts instead of a chat template."""

_GENERATION = re.compile(r"([ \t]*)\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
OPEN, CLOSE = "padless_open", "padless_close"
"""Variables of a template that hold the first two marks."""
_END, _BATCH = "padless_end", "padless_batch"


def built_in(name: str) -> str:
    """The text of a template of BUILT_IN."""
    folder = os.path.join(os.path.dirname(__file__), "templates")
    with open(os.path.join(folder, f"{name}.jinja"), encoding="utf-8") as file:
        return file.read()


def load_template(option: str | None, own: str | None) -> str | None:
    """The template's text: a built-in name, a file, or (None) the tokenizer's own."""
    if option is None:
        return own
    if option in BUILT_IN:
        return built_in(option)
    if not os.path.isfile(option):
        raise InputError(f"no template {option!r}: give a file, or one of {', '.join([*BUILT_IN, CLASSIC])}")
    try:
        with open(option, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"template {option} is not UTF-8: {error}") from error


def mark_generation(source: str) -> str:
    """Replace generation blocks by a mark, a scope, and a mark, keeping every rule about white space.

    The tag's place is taken by an expression; what `lstrip_blocks` would have removed before the tag is
    removed here, and the scope's own tag behind it still swallows the newline that `trim_blocks` does.
    """

    def replace(match: re.Match[str]) -> str:
        indent, left, end, right = match.groups()
        if not left and (match.start() == 0 or source[match.start() - 1] == "\n"):
            indent = ""
        dash = "-" if left == "-" else ""
        name, tag = (CLOSE, "endwith") if end else (OPEN, "with")
        return f"{indent}{{{{{dash} {name} }}}}{{% {tag} {right}%}}"

    return _GENERATION.sub(replace, source)


class ChatTemplate:
    """A template and its two engines; `render` gives marked text, `[open] trained [close] ... [end]`."""

    def __init__(self, source: str, variables: Mapping[str, Any], name: str) -> None:
        self.source = source
        self.name = name
        self.variables = {**variables, "add_generation_prompt": False, "documents": None}
        self.has_marks = bool(_GENERATION.search(source))
        self.why_unmarked = "it has no {% generation %} blocks"
        self.fixed_text = source + "".join(str(value) for value in variables.values())
        """What every render may contain besides the record: marks are chosen outside it."""
        self._marked = mark_generation(source)
        self._slow = self._jinja2()
        self.fast: Any = None
        self.fast_takes_calls = False
        """Whether the fast engine takes conversations with tools and calls, too."""

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that shares no memory: engines are made anew there, the same as here."""
        return {**self.__dict__, "_slow": None, "fast": self.fast is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._slow = self._jinja2()
        self.fast = self._minijinja() if state["fast"] else None

    def _jinja2(self) -> Any:
        from jinja2 import TemplateError

        from padless.packer.sandbox import Sandbox

        environment = Sandbox(filters={"tojson": _tojson})
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _no_clock
        environment.globals["lipsum"] = environment.filters["random"] = _no_chance
        try:
            return environment.from_string(self._marked)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f", line {line}" if line else ""
            raise InputError(f"chat template {self.name}{where}: {error}") from error
        except RecursionError:
            raise InputError(f"chat template {self.name}: its expressions or blocks lie too deep") from None

    def enable_fast(self, sample: Sequence[Chat], marks: str) -> bool:
        """Use minijinja from now on if it renders the sample as jinja2 does.

        Conversations with tools or calls take it if those in the sample, if any, came out equal too.
        """
        opened: list[str] = []
        plain: list[Chat] = []
        calling: list[tuple[Chat, Chat]] = []
        for chat in sample:
            view = sealed(chat, opened) if trims_alike(chat) else None
            if view is chat:
                plain.append(chat)
            elif view is not None:
                calling.append((chat, view))
        try:
            self.fast = self._minijinja()
            self.fast_takes_calls = self._agree(calling, marks, opened)
            if not (self._agree([(chat, chat) for chat in plain], marks, []) and (plain or calling)):
                self.fast = None
        except Exception:  # anything it does not know: the reference stays
            self.fast = None
        return self.fast is not None

    def _agree(self, chats: Sequence[tuple[Chat, Chat]], marks: str, opened: list[str]) -> bool:
        """Whether both engines give the same text for all that the reference does not refuse."""
        expected: list[str] = []
        views: list[Chat] = []
        for chat, view in chats:
            try:
                expected.append(self.render(chat, marks))
                views.append(view)
            except OversizeError:  # the fast engine would make it
                return False
            except RecordError:
                continue
        try:
            return not views or self.render_fast(views, marks, opened) == "".join(expected)
        except Exception:  # it refuses one, looks into what is sealed, or asks for what the engine has not
            return False

    def _minijinja(self) -> Any:
        import minijinja

        from padless.packer.growth import may_multiply

        if may_multiply(self._slow.environment, self._marked):
            raise OversizeError("its values may grow with every turn, and the fast engine bounds none")
        environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda name: None,
            filters={"tojson": _tojson_of_texts},
            tests={"sequence": _is_sequence},
            globals={"raise_exception": _raise, "strftime_now": _no_clock},
        )
        environment.fuel = FUEL
        source = re.sub(r"\r?\n\Z", "", self._marked)  # as the engines do at a template's end
        environment.add_template(
            "batch",
            f"{{% for messages, tools in {_BATCH} %}}{{{{ '' }}}}{source}{{{{ {_END} }}}}{{% endfor %}}",
        )
        return environment

    def render(self, chat: Chat, marks: str) -> str:
        """One conversation through jinja2; RecordError with the template's own words where it refuses."""
        return self._text(chat, {**self.variables, **_marks(marks)}) + marks[2]

    def _text(self, chat: Chat, variables: Mapping[str, Any]) -> str:
        self._slow.environment.spent.begin(chat)
        try:
            if chat.variables:
                variables = {**variables, **chat.variables}
            text: str = self._slow.render(messages=chat.messages, tools=chat.tools, **variables)
        except TooSlowError as error:
            raise TooSlowError(
                f"chat template {self.name}: {error}; give another with --template, or leave the record out"
            ) from None
        except OversizeError as error:
            raise OversizeError(f"the chat template refuses it: {error}") from None
        except InputError:
            raise
        except MemoryError:  # of which another machine has more: no reason to drop a record
            raise InputError(f"chat template {self.name}: there is no memory for what it makes") from None
        except Exception as error:  # template code fails in any way that Python code can
            problem = str(error) or type(error).__name__
            raise RecordError(f"the chat template refuses it: {problem}") from error
        return text

    def generation_prompt(self, chat: Chat) -> str:
        """What it adds where an answer is to be generated; RecordError where it does not simply add it."""
        text = self._text(chat, self.variables)
        asked = self._text(chat, {**self.variables, "add_generation_prompt": True})
        # Some end the conversation with the end token where no answer is asked for.
        for given in (text, text.removesuffix(str(self.variables.get("eos_token", "")))):
            if asked.startswith(given):
                return asked[len(given) :]
        raise RecordError("its generation prompt is not just added to the conversation")

    def render_fast(self, chats: Sequence[Chat], marks: str, opened: Sequence[str] = ()) -> str:
        """Many conversations at once, as `sealed` gives them with `opened`, each followed by the end mark.

        Raises OpenedError where the template looked into what is sealed; OversizeError where it wrote so
        much that the limit of a record may be passed; what the engine raises where the template refuses one.
        """
        batch = [(chat.messages, chat.tools) for chat in chats]
        found: str = self.fast.render_template("batch", **{_BATCH: batch}, **self.variables, **_marks(marks))
        if len(found) > CHARACTERS:
            raise OversizeError("one of them may be too large, which is seen record by record")
        if opened:
            raise OpenedError("the template looks into tools or arguments")
        return found


class OpenedError(Exception):
    """A template did more with a sealed value than to write it as JSON."""


def _marks(marks: str) -> dict[str, str]:
    return {OPEN: marks[0], CLOSE: marks[1], _END: marks[2]}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing escaped for HTML."""
    if type(value) is Sealed:
        value = value.value
    return _writer(ensure_ascii, indent, tuple(separators) if separators else None, sort_keys).encode(value)


@lru_cache(64)
def _writer(
    ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> json.JSONEncoder:
    # Values are JSON that was read, so there are no circles in them to look out for.
    return json.JSONEncoder(
        check_circular=False,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=unsealed,
    )


def _tojson_of_texts(value: Any, *args: Any, **options: Any) -> str:
    """`_tojson` for the fast engine, in which what is undefined looks like null: jinja2 tells them apart."""
    if value is None:
        raise TypeError("null or undefined")
    return _tojson(value, *args, **options)


def _is_sequence(value: Any) -> bool:
    """As jinja2 has it: whatever has a length and parts. The fast engine leaves texts and dicts out."""
    if value is None:
        raise TypeError("null or undefined")
    return type(value) in (str, list, dict, Sealed)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _no_clock(form: str) -> str:
    raise InputError(
        f"the chat template asks for today's date ({form}), so the same data would pack differently "
        "tomorrow; give the date with --template-arg (often date_string=...)"
    )


def _no_chance(*given: Any, **options: Any) -> None:
    raise InputError("the chat template draws by chance, so the same data would pack differently each time")
