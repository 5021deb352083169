"""What a packed folder was built with and what is asked for now, and its lines by record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.config import PackConfig
from padless.packer.errors import InputError
from padless.packer.strategies import CUTS

CUT_ANYWHERE = frozenset({"text", "tokenized"})
"""Formats whose records may end at any token; a chat is cut at the end of a turn."""
BUILD_AGAIN = "build again from the sources"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a folder was built with, and what is asked for now."""

    where: str
    """The folder, for messages."""
    max_length: int
    overflow: str
    old_max_length: int
    old_overflow: str
    formats: tuple[str, ...]
    """Of each source, counted as in `Piece.source`."""
    empty_replies: int
    """Records with an empty reply; which ones they are, no folder says."""
    by_turn: bool
    """Whether chats gave a sequence for each turn (`expand_turns`), which are never joined."""
    align: int
    old_align: int
    was_cut: bool
    """Whether its sequences were cut where packs ended."""
    joins: bool
    """Whether they will be, so that fragments of a record are one sequence until then."""
    is_paired: NDArray[np.bool_] | None
    """[lines]: which sequences are one of a pair, to be kept or dropped as one; None: none."""


class Records(NamedTuple):
    """Lines by record: record r has the lines `first[r]` to `first[r + 1]`."""

    first: NDArray[np.int64]
    have: NDArray[np.int64]
    """Tokens of each record in the folder."""
    full: NDArray[np.int64]
    """Tokens that the tokenizer gave."""


def records_of(lines: NDArray[np.void]) -> Records:
    """The lines' records; every first part begins one."""
    first = np.append(np.flatnonzero(lines["part"] == 0), len(lines))
    ends = np.concatenate([[0], np.cumsum(lines["length"], dtype=np.int64)])
    have = ends[first[1:]] - ends[first[:-1]]
    return Records(first, have, have + lines["cut"][first[:-1]])


def refuse_cuts(config: PackConfig, where: str, format_: str) -> None:
    """See that what cuts anywhere gets texts alone. InputError for records of another format."""
    if format_ in CUT_ANYWHERE:
        return
    if config.overflow == "split":
        raise InputError(
            f"--overflow split is for text: a fragment of {where} ({format_}) would begin in "
            "mid-conversation; choose error, drop or truncate"
        )
    if cutting := CUTS & {config.strategy, config.eval_strategy}:
        raise InputError(
            f"--strategy {min(cutting)} is for text: it cuts wherever a pack ends, and a fragment of "
            f"{where} ({format_}) would begin in mid-conversation; choose bfd, spread or another, which "
            "cut nothing"
        )


def refuse_longer(policy: Policy, lost: NDArray[np.bool_]) -> None:
    if lost.any():
        raise InputError(
            f"{policy.where}: {int(lost.sum()):,} records were cut or dropped for max_length "
            f"{policy.old_max_length:,} and would fit into {policy.max_length:,}, but their tokens are in no "
            "folder: build once at the longest length you will want, then repack down"
        )


def refuse(which: NDArray[np.bool_], more: str, why: str) -> None:
    if which.any():
        raise InputError(f"{more}; {int(which.sum()):,} of the records cannot be repacked: {why}")
