"""What a drawn mix makes of a split: records that are packed several times, or not at all.

    lines of records   [a0 a1] [b] [c]       times 2, 0, 1
    lines of the mix   [a0 a1 a0 a1] [b: dropped, not-drawn] [c]

Copies are further parts of their record, with ids of their own; they share the tokens in the store. A part
that begins at token 0 begins a copy (or an answer or a turn), so fragments are told from copies by `start`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.extra_columns import GROUP
from padless.packer.lines import DROPPED, FRAGMENT, NOT_DRAWN
from padless.packer.mixing import Mix, draw

if TYPE_CHECKING:
    from padless.packer.tables import SplitLines

COPY = 2**40
"""What the n-th copy of a pair adds to its `pair_id`, n times: each copy is a pair of its own."""

Block = tuple[int, NDArray[np.void]]
"""A source file's number, and lines of some of its records."""


class Copied(NamedTuple):
    """The lines of a block's records, each as often as it was drawn; all arrays are as long."""

    lines: NDArray[np.void]
    origin: NDArray[np.int64]
    """The line of the block that each is."""
    copy: NDArray[np.int64]
    """0, 1, ... which copy of its record."""


class Copier:
    """Copies a split's lines block after block; `times` [records] as `draw` gives it."""

    def __init__(self, times: NDArray[np.int32]) -> None:
        self.times = times
        self.record = 0

    def copy(self, block: NDArray[np.void]) -> Copied:
        """The next block's lines; records are never cut by blocks."""
        first = np.flatnonzero(block["part"] == 0)
        sizes = np.diff(np.append(first, len(block)))
        times = self.times[self.record : self.record + len(first)].astype(np.int64)
        self.record += len(first)
        # What was dropped before has a reason of its own, and stays.
        dropped = block["status"][first] == DROPPED
        gone = (times == 0) & ~dropped
        counts = np.where(gone | dropped, 1, sizes * times)
        record = np.repeat(np.arange(len(first)), counts)
        part = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
        copy, within = np.divmod(part, sizes[record])
        origin = first[record] + within
        lines = block[origin]
        lines["part"] = part
        lines["cut"][part > 0] = 0
        out = gone[record]
        if out.any():
            tokens = np.add.reduceat(block["length"], first, dtype=np.int64) + block["cut"][first]
            lines["cut"][out] = tokens[gone]
            lines["status"][out], lines["reason"][out] = DROPPED, NOT_DRAWN
            for name in ("start", "length", "targets"):
                lines[name][out] = 0
        return Copied(lines, origin, copy)


def goes_on(lines: Any) -> NDArray[np.bool_]:
    """[lines]: which are fragments that go on with the line before; a copy begins at token 0."""
    found: NDArray[np.bool_] = (lines["status"] == FRAGMENT) & (lines["start"] > 0)
    return found


def times_of(mix: Mix, blocks: Iterable[Block], argument_of: NDArray[np.int32]) -> NDArray[np.int32]:
    """Draw a mix over a split: [records] how often each is packed.

    `argument_of` [source files]: the argument that names each. Raises InputError as `draw` does, and where
    nothing is drawn at all.
    """
    arguments: list[NDArray[np.int32]] = []
    tokens: list[NDArray[np.int64]] = []
    trained: list[NDArray[np.int64]] = []
    for source, lines in blocks:
        first = np.flatnonzero(lines["part"] == 0)
        if not len(first):
            continue
        arguments.append(np.full(len(first), argument_of[source]))
        tokens.append(np.add.reduceat(lines["length"], first, dtype=np.int64))
        trained.append(np.add.reduceat(lines["targets"], first, dtype=np.int64))
    times = draw(mix, np.concatenate(arguments), np.concatenate(tokens), np.concatenate(trained))
    if not times.any():
        raise InputError(
            "the mix draws no record: every source's share, or its --max-tokens, is smaller than the first "
            "record drawn; raise --mix-target or the caps"
        )
    return times


def mixed(split: SplitLines, times: NDArray[np.int32], blocks: Iterable[Block], sources: int) -> SplitLines:
    """The split with each record as often as it was drawn; `blocks`: all its lines, in order."""
    from padless.packer.tables import Account

    copier, account = Copier(times), Account(sources)
    of: list[NDArray[np.int64]] = []
    copies: list[NDArray[np.int64]] = []
    ids: list[NDArray[np.int64]] = []
    continued: list[NDArray[np.int64]] = []
    old = new = total = 0
    for source, block in blocks:
        copied = copier.copy(block)
        had, kept = block["length"] > 0, copied.lines["length"] > 0
        number = old + np.cumsum(had) - 1
        old += int(had.sum())
        of.append(number[copied.origin[kept]])
        copies.append(copied.copy[kept])
        ids.append(total + np.flatnonzero(kept))
        continued.append(new + np.flatnonzero(goes_on(copied.lines[kept])))
        total += len(copied.lines)
        new += len(of[-1])
        account.add(copied.lines, source)
    sequences = np.concatenate(of)
    extras = {name: column[sequences] for name, column in split.extras.items()}
    if GROUP in extras:
        extras[GROUP] += np.where(extras[GROUP] >= 0, COPY * np.concatenate(copies), 0)
    found = replace(
        split,
        lengths=split.lengths[sequences],
        elements=split.elements[sequences],
        ids=np.concatenate(ids) if total > new else None,
        lines=total,
        extras=extras,
        continued=np.concatenate(continued),
        times=times,
    )
    account.enter(found)
    return found
