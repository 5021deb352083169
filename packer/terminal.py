"""What commands print to, and the options that they share."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

if TYPE_CHECKING:
    from rich.console import Console

    from padless.packer.build_result import BuildResult

Json = Annotated[bool, Option("--json", help="Print the result as one JSON object.")]
Plan = Annotated[str | None, Option(metavar="NAME", help="Go by plans/NAME.parquet.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress.")]
Split = Annotated[str | None, Option(help="The split to take, in a folder of splits.")]

TABLE_WIDTH = 80
"""Columns that the tables of reports and estimates need."""


def console(*, stderr: bool = False) -> Console:
    """A console that leaves long lines whole."""
    return _console(stderr=stderr, soft_wrap=True, highlight=False)


def wrapping(least: int = 0) -> Console:
    """A console that breaks lines at the terminal's width.

    `least`: of the columns that tables need, where a narrower terminal would have them lose digits.
    """
    found = _console()
    if found.width < least:
        found.width = least
    return found


def _console(**options: Any) -> Console:
    # Here and not above: a quiet build needs no rich, and a small one is as fast as its imports.
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """Whoever read the output has seen enough: no failed check, which is what rich's exit 1 says."""
            raise BrokenPipeError

    return Piped(**options)


def tell_error(message: str) -> None:
    """One line to stderr."""
    errors = console(stderr=True)
    errors.print("error:", style="bold red", end=" ")
    errors.print(message, markup=False)


def tell_interrupted(*, goes_on: bool) -> None:
    """What Ctrl-C gives; `goes_on`: whether the command keeps what it finished."""
    then = "; the same command goes on from what was finished" if goes_on else ""
    print(f"interrupted{then}", file=sys.stderr)


def print_json(content: Any) -> None:
    """One line of JSON to stdout, in ASCII where it cannot take UTF-8."""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(content, ensure_ascii=not is_utf8) + "\n")


def tell_result(result: BuildResult, *, profile: bool, as_json: bool, quiet: bool) -> None:
    """What a build or a repack gave, in the way that was asked for."""
    if quiet and not profile and not as_json:
        return
    from padless.packer.summary import build_json, print_profile, print_summary

    if profile:
        print_profile(result, console(stderr=True))
    if as_json:
        print_json(build_json(result))
    elif not quiet:
        print_summary(result, console())
