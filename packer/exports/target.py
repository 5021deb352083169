"""What an export target is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from padless.packer.exports.job import Job


@dataclass(frozen=True, kw_only=True)
class Target:
    """One form that packs can take outside padless."""

    reader: str
    """Who reads it."""
    rows: str
    """What is written, in a sentence."""
    how: str
    """How that trainer is pointed at it, in Markdown; {output}, in double quotes, for the folder."""
    further_columns: bool = False
    """Whether the folder's further columns (weights, rewards, ...) go along."""
    write: Callable[[Job], None]
    """Raises InputError where the data cannot be told in this form."""
