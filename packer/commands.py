"""`pack-dataset` as a whole: its commands in the order of its help, and how a run ends."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option

from padless.packer.errors import OptionError
from padless.packer.options import with_options
from padless.packer.terminal import tell_error, tell_interrupted
from padless.runtime.format import PadlessError

COMMANDS = {
    **{"build": "build", "repack": "repack", "report": "look", "inspect": "look", "verify": "look"},
    **{"export": "look", "estimate": "estimate", "push": "look", "demo": "look"},
}
"""Command -> the module `commands_...` that has it."""

RESUMED = ("build", "repack")
"""Commands that keep what they finished for the next run."""
INTERRUPTED = 130


def run() -> int:
    """Run the command line; its exit code. Every mistake of a user ends in one line, never a traceback."""
    asked = sys.argv[1] if sys.argv[1:2] else ""
    try:
        app = make_app(asked if asked in COMMANDS else None)
        found: Any = app(prog_name="pack-dataset", standalone_mode=False)
    except OptionError as error:
        tell_error(with_options(str(error)))
        return 2
    except PadlessError as error:
        tell_error(str(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        tell_interrupted(goes_on=asked in RESUMED)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        return 0
    except OSError as error:
        tell_error(f"{error.filename or ''} {error.strerror or error}".strip())
        return 2
    except typer.Exit as done:
        return done.exit_code
    except Exception as error:  # typer's own, which differ between its versions
        show = getattr(error, "show", None)
        if show is None:
            raise
        _say_plainly(error)
        show()
        return int(getattr(error, "exit_code", 2))
    code = found if isinstance(found, int) else 0
    if code == INTERRUPTED:  # what typer makes of Ctrl-C
        tell_interrupted(goes_on=asked in RESUMED)
    return code


def _say_plainly(error: Any) -> None:
    """Tell the value, and what our own parsers say of it, where typer's error has pydantic's words."""
    faults = getattr(error.__cause__, "errors", None)
    if faults is None or not hasattr(error, "message"):
        return
    (fault, *_) = faults()
    said = fault.get("ctx", {}).get("error")
    number = {"int_parsing": "whole number", "float_parsing": "number"}.get(fault["type"])
    if isinstance(said, PadlessError):
        error.message = str(said)
    elif number is not None:
        error.message = f"{fault['input']!r} is no {number}"


def _print_version(asked: bool) -> None:
    if asked:
        from padless.packer.identity import version_of

        print(f"padless {version_of('padless')}")
        raise typer.Exit


def make_app(only: str | None = None) -> typer.Typer:
    """The command line; `only` with that command, since to prepare all takes longer than to pack a little."""
    app = typer.Typer(
        name="pack-dataset",
        help="Tokenize and pack a data set once, offline; train without padding ever after.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(main)
    for name, module in COMMANDS.items():
        if only in (None, name):
            app.command()(getattr(import_module(f"padless.packer.commands_{module}"), name))
    return app


def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tokenize and pack a data set once, offline; train without padding ever after."""
