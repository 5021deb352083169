"""What a strategy that cuts makes of a split: fragments, each a sequence with a line of its own.

    records      [ 5 ][   6   ]         tokens in the store, which nobody moves
    plan         [ 5 ][ 3 ]|[ 3 ]       cut where a pack ends
    lines        whole, fragment 0, fragment 1

So everything behind the plan sees whole sequences, and only the lines know of the cut. Fragments that
`--overflow split` made are joined before planning, else a long record would be cut twice. The trade-off
is a second pass over the lines, for the account.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.copies import Copier, goes_on
from padless.packer.errors import InputError
from padless.packer.lines import FRAGMENT, PACK_END, WHOLE
from padless.packer.plan import Integers, PackPlan
from padless.packer.token_store import ChunkStore, Entry

if TYPE_CHECKING:
    from padless.packer.tables import SplitLines


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragments:
    """Where the sequences of a split are cut."""

    counts: NDArray[np.int64]
    """[joined sequences]: fragments of each, 1 where it stays whole."""
    starts: NDArray[Any]
    """[fragments]: first token of each within its record."""
    lengths: NDArray[Any]
    """[fragments]: tokens of each."""


def joined_lengths(split: SplitLines) -> NDArray[np.int64]:
    """Lengths to cut, in tokens: the sequences with the fragments of one record put together.

    Raises InputError where tokens are masked: a fragment has lost what its masked tokens led up to.
    """
    if not split.only_starts_masked:
        masked = split.tokens - len(split.lengths) - split.trained
        raise InputError(
            f"--strategy wrapped cuts wherever a pack ends, and {masked:,} tokens of these are masked: a "
            "fragment would be trained without its prompt; choose bfd, spread or another, which cut nothing"
        )
    found: NDArray[np.int64] = np.add.reduceat(split.lengths, firsts_of(split), dtype=np.int64)
    return found


def places_of(plan: PackPlan) -> Integers:
    """The place of each entry, [entries], among the fragments in the order of their sequences."""
    assert plan.starts is not None
    in_order = np.lexsort((plan.starts, plan.order))
    places: Integers = np.empty_like(plan.order)
    places[in_order] = np.arange(len(in_order))
    return places


def cut(split: SplitLines, plan: PackPlan, blocks: Iterable[NDArray[np.void]]) -> SplitLines:
    """A split with the fragments of a plan over `joined_lengths`; `blocks`: all its lines, in order."""
    assert plan.starts is not None and plan.lengths is not None
    firsts = firsts_of(split)
    counts = np.bincount(plan.order, minlength=len(firsts))
    in_order = np.argsort(places_of(plan))
    lengths = plan.lengths[in_order]
    fragments = Fragments(counts=counts, starts=plan.starts[in_order], lengths=lengths)
    ids = None
    if split.ids is not None:
        lines_without = split.ids[firsts] - firsts  # lines before each that have no sequence
        ids = np.repeat(lines_without, counts) + np.arange(len(plan.order))
    cutter = Cutter(fragments)
    cut_ones = 0
    for block in blocks:
        lines, _ = cutter.cut(block)
        begins = np.flatnonzero(lines["part"] == 0)
        if len(begins):  # of several copies any may be cut
            cut_ones += int(np.logical_or.reduceat(lines["reason"] == PACK_END, begins).sum())
    records = {**split.records}
    records["whole"] -= cut_ones
    records["split"] += cut_ones
    return replace(
        split,
        lengths=lengths.astype(np.int32),
        elements=np.repeat(split.elements[firsts], counts),
        ids=ids,
        lines=split.lines - len(split.lengths) + len(plan.order),
        trained=split.tokens - len(plan.order),
        records=records,
        fragments=fragments,
        extras={name: np.repeat(column[firsts], counts) for name, column in split.extras.items()},
    )


class Cutter:
    """Cuts a split's lines into fragments, block after block."""

    def __init__(self, fragments: Fragments) -> None:
        self.fragments = fragments
        self.sequence = self.fragment = 0

    def cut(self, block: NDArray[np.void]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """The lines of the next block's fragments, and the number of the line in it that each is of."""
        fragments = self.fragments
        origin = np.flatnonzero(~goes_on(block))
        lines = block[origin]
        kept = lines["length"] > 0
        each = np.ones(len(lines), dtype=np.int64)
        each[kept] = fragments.counts[self.sequence : self.sequence + int(kept.sum())]
        self.sequence += int(kept.sum())
        lines = _repeated(lines, each)
        places = np.flatnonzero(lines["length"] > 0)
        here = slice(self.fragment, self.fragment + len(places))
        self.fragment += len(places)
        lines["start"][places] = fragments.starts[here]
        lines["length"][places] = fragments.lengths[here]
        lines["targets"][places] = fragments.lengths[here] - 1  # nothing predicts the first token
        return lines, np.repeat(origin, each)


def lines_of_split(
    store: ChunkStore,
    split: int,
    splits: int,
    times: NDArray[np.int32] | None,
    fragments: Fragments | None,
) -> Iterator[tuple[Entry, NDArray[np.void]]]:
    """Each chunk and its lines of one split, in order.

    Records are copied as often as `times` says, and cut into `fragments`; None: as they are.
    """
    copier = Copier(times) if times is not None else None
    cutter = Cutter(fragments) if fragments is not None else None
    for number in sorted(store.entries):
        entry = store.entries[number]
        lines = store.lines_of(entry)
        if splits > 1:
            lines = lines[lines["split"] == split]
        if copier is not None:
            lines = copier.copy(lines).lines
        yield entry, lines if cutter is None else cutter.cut(lines)[0]


def _repeated(lines: NDArray[np.void], each: NDArray[np.int64]) -> NDArray[np.void]:
    """Each line as often as it has fragments; what was truncated or split before stays so, by its reason."""
    found = np.repeat(lines, each)
    begins = (np.cumsum(each) - each)[lines["part"] == 0]  # of records: a copy is a part too
    found["part"] = np.arange(len(found)) - np.repeat(begins, np.diff(np.append(begins, len(found))))
    newly = np.repeat(each > 1, each) & (found["status"] == WHOLE)
    found["status"][newly] = FRAGMENT
    found["reason"][newly] = PACK_END
    found["cut"][found["part"] > 0] = 0
    return found


def firsts_of(split: SplitLines) -> NDArray[np.int64]:
    """Numbers of the sequences that begin a record's tokens."""
    return np.delete(np.arange(len(split.lengths)), split.continued)
