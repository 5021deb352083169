"""From pack to pack by plain keys: n, p, a number, /words, q.

In a terminal a key acts at once. It is read in cbreak mode, which is left again before anything else
happens, so that neither an error nor Ctrl-Z leaves the terminal without echo. Elsewhere (a pipe, no termios)
the same words are read line by line.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padless.packer.errors import InputError
from padless.packer.find import find_pack
from padless.packer.inspect import describe_pack, print_pack, visible

if TYPE_CHECKING:
    from rich.console import Console

HELP = "n next, p previous, a number, /words, q quit"
_KEYS = {" ": "n", "\r": "n", "\n": "n", "j": "n", "k": "p", "\x7f": "p", "\x04": "q", "": "q"}
_ESCAPES = {"\x1b[C": "n", "\x1b[B": "n", "\x1b[6~": "n", "\x1b[D": "p", "\x1b[A": "p", "\x1b[5~": "p"}
"""Arrows and page keys."""
_ESCAPE_SECONDS = 0.05
"""Within which a terminal sends the rest of such a key."""


def browse_packs(
    path: str | Path,
    pack: dict[str, Any],
    console: Console,
    *,
    split: str | None = None,
    plan: str | None = None,
) -> None:
    """Ask where to go from a pack, until `q` or the end of the input; at either end it stays."""
    number, count, words = pack["pack"], pack["packs"], ""
    ask = _by_keys if _has_keys() else _by_lines
    while True:
        try:
            word = ask(console)
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if word == "q":
            return
        if word.startswith("/"):
            words = word[1:] or words
            try:
                wanted = find_pack(path, text=words, first=number + 1, split=split, plan=plan)
            except InputError as error:
                console.print(visible(str(error)), markup=False)
                continue
        elif word in ("n", "p") or word.isdecimal():
            # Python takes no number of thousands of digits; of what is no pack the beginning will do.
            wanted = int(word[:18]) if word.isdecimal() else number + (1 if word == "n" else -1)
            if not 0 <= wanted < count:
                console.print(f"there are packs 0 to {count - 1}; this is {number}")
                continue
        else:
            console.print(HELP)
            continue
        number = wanted
        print_pack(describe_pack(path, number, split=split, plan=plan), console)


def _by_lines(console: Console) -> str:
    return console.input(f"{HELP}: ", markup=False).strip() or "n"


def _by_keys(console: Console) -> str:
    """One key; a number and words to look for go on to the end of their line, with echo."""
    console.print(f"{HELP} ", end="", markup=False)
    key = _key()
    key = _KEYS.get(key, _ESCAPES.get(key, key))
    if key == "/" or key.isdecimal():
        console.print()
        return (key + console.input(key, markup=False)).strip()
    console.print(key if key in ("n", "p", "q") else "?")
    return key


def _has_keys() -> bool:
    try:
        import termios  # noqa: F401 (not on every system)

        return os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())
    except (ImportError, OSError, ValueError):  # a stdin that is no file, or closed
        return False


def _key() -> str:
    """What one key sends; "" at the end of the input."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)  # TCSAFLUSH would drop keys typed ahead
        return _read_key(lambda: os.read(terminal, 1), terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read_key(read: Callable[[], bytes], terminal: int) -> str:
    data = read()
    if data == b"\x1b":
        while len(data) < 8 and select.select([terminal], [], [], _ESCAPE_SECONDS)[0]:
            data += read()
            if data[-1:].isalpha() or data[-1:] == b"~":
                break
    else:
        for _ in range((data >= b"\xc0") + (data >= b"\xe0") + (data >= b"\xf0")):  # the rest of a character
            data += read()
    return data.decode(errors="replace")
