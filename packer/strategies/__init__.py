"""Planning strategies by name: lengths in, plan out.

A new one is one file with one pure function and one line in STRATEGIES; the command line's
choices, the tests and the benchmark read the dict.
"""

from __future__ import annotations

from padless.packer.strategies.bfd import bfd
from padless.packer.strategies.constraints import Strategy, constrained, in_windows
from padless.packer.strategies.ffd import ffd
from padless.packer.strategies.none import none
from padless.packer.strategies.optimal import optimal
from padless.packer.strategies.ordered import ordered
from padless.packer.strategies.spread import spread
from padless.packer.strategies.wrapped import wrapped

STRATEGIES: dict[str, Strategy] = {
    "bfd": constrained(in_windows(bfd)),
    "ffd": constrained(in_windows(ffd)),
    "optimal": constrained(in_windows(optimal)),
    "spread": constrained(in_windows(spread)),
    "ordered": constrained(ordered),
    "wrapped": constrained(wrapped, cuts=True),
    "none": constrained(in_windows(none)),
}

KEEPS_ORDER = frozenset({"ordered", "none"})
"""Whose packs stand in the input's order and stay so; those of the others are shuffled."""

CUTS = frozenset({"wrapped"})
"""Whose packs hold fragments: for sequences of any length, of which every token but the first is trained."""
