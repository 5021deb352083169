"""Concatenate and cut: the sequences as they came, cut wherever a pack ends.

max_length 8, lengths 5 6 3:   [5 3|] [|3 3]   fill 14/16, the second sequence in two fragments

Every pack but the last is full, whatever the lengths, and a sequence may be longer than a pack.
Boundaries are kept: a fragment is a sequence of its own, whose positions restart, and nothing
attends across.

The trade-off is what a cut costs: the later fragment is trained without what came before it, and its
first token not at all, since nothing predicts it. The other strategies cut nothing.

Sequences are gone through twice, a block at a time, with the open pack carried from one to the next: first
for where packs end, then for the entries, each at its place in the packs' order. So planning holds little
beside the plan itself, which has 12 bytes an entry.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.plan import BLOCK, Integers, PackPlan, as_lengths, drawn_order, index_type


def wrapped(
    seq_lengths: ArrayLike,
    max_length: int,
    *,
    max_sequences_per_pack: int | None,
    seed: int,
    plan_window: int | None,
    shuffle: bool = False,
) -> PackPlan:
    """Plan by cutting; a window is a cap, packs being neighbours. `shuffle` draws their order from `seed`.

    `seq_lengths` [N] in tokens, of any length from 1; `max_length` the tokens of a pack. The entries
    of the plan have `starts` and `lengths`. Raises InputError for an empty sequence, or a limit below 1.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack, cuts=True)
    count = len(lengths)
    cap = min(max_sequences_per_pack or count, plan_window or count)
    offsets = _offsets(lengths, max_length, cap)
    begins = offsets[:-1]  # [packs] where the entries of each are put
    found = offsets
    if shuffle:
        moved = drawn_order(len(begins), seed)
        found = np.zeros_like(offsets)
        np.cumsum(np.diff(offsets).take(moved), out=found[1:])
        begins = np.empty_like(begins)
        begins[moved] = found[:-1]
        del moved
    entries = int(offsets[-1])
    kind = index_type(max(int(lengths.max(initial=0)), count))
    order, starts, taken = (
        np.empty(entries, index_type(count)),
        np.empty(entries, kind),
        np.empty(entries, kind),
    )
    entry = pack = 0
    for first, ends, cuts in _blocks(lengths, max_length, cap):
        # Where each entry ends in the concatenation: at its sequence's end, or at its pack's.
        stops = np.concatenate((ends, cuts))
        stops.sort(kind="stable")  # two ascending runs: merged, not sorted
        sizes = np.diff(stops, prepend=int(ends[0]) - int(lengths[first]))
        stops, sizes = stops[sizes > 0], sizes[sizes > 0]
        here = slice(pack, pack + len(cuts) + 1)
        places = (begins[here] - offsets[:-1][here])[np.searchsorted(cuts, stops)]
        places += np.arange(entry, entry + len(stops))
        number = np.searchsorted(ends, stops)
        order[places] = number + first
        taken[places] = sizes
        starts[places] = stops - sizes - (ends - lengths[first : first + len(ends)])[number]
        entry, pack = entry + len(stops), pack + len(cuts)
    return PackPlan(order, found, starts, taken)


def _offsets(lengths: Integers, max_length: int, cap: int) -> NDArray[np.int64]:
    """How many entries there are up to each pack's end, and none before the first, [packs + 1]."""
    # A pack that cuts a sequence is a full one; each of the others but the last has `cap` sequences' ends.
    full = int(lengths.sum(dtype=np.int64)) // max_length
    offsets = np.zeros(2 + full + len(lengths) // max(cap, 1), np.int64)
    packs = inside = 0
    for first, ends, cuts in _blocks(lengths, max_length, cap):
        ended = np.searchsorted(ends, cuts, side="right")
        is_inside = ends[ended - 1] != cuts  # of a sequence, which is one entry more
        is_inside[ended == 0] = True
        offsets[packs + 1 : packs + 1 + len(cuts)] = first + ended + inside + np.cumsum(is_inside)
        packs, inside = packs + len(cuts), inside + int(is_inside.sum())
    entries = len(lengths) + inside
    if entries > offsets[packs]:  # the last pack is not full
        packs += 1
        offsets[packs] = entries
    return offsets[: packs + 1]


def _blocks(
    lengths: Integers, max_length: int, cap: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Blocks of sequences: the first one's number, where each ends in the concatenation, and the packs too.

    The last pack has no end here, unless it is full.
    """
    total = begin = held = 0  # where the open pack begins, and how many sequences it has of earlier blocks
    full = int(lengths.sum(dtype=np.int64)) // max_length
    step = max(BLOCK * len(lengths) // max(len(lengths), full, 1), 1)  # long sequences give more entries
    for first in range(0, len(lengths), step):
        ends = total + np.cumsum(lengths[first : first + step], dtype=np.int64)
        cuts = _cuts(ends, total, begin, held, max_length, cap)
        total = int(ends[-1])
        if len(cuts):
            begin, held = int(cuts[-1]), 0
        held += len(ends) - int(np.searchsorted(ends, begin, side="right"))
        yield first, ends, cuts


def _cuts(
    ends: NDArray[np.int64], start: int, begin: int, held: int, max_length: int, cap: int
) -> NDArray[np.int64]:
    """Where packs end among sequences that end at `ends`, [N]; the first begins at `start`.

    The open pack begins at `begin`, and has `held` sequences of those before.
    """
    stop = int(ends[-1])
    full = np.arange(begin + max_length, stop + 1, max_length, dtype=np.int64)
    # How many sequences a pack has, and the one that stays open, were all of them full.
    begins = np.concatenate(([max(begin, start)], full))
    first = np.searchsorted(ends, begins, side="right")
    last = np.append(np.searchsorted(ends, full), len(ends))  # the open one counts none that it has in part
    sizes = last - first
    sizes[0] += held
    if int(sizes.max()) < cap:
        return full
    found: list[int] = []
    number = int(first[0])
    while True:
        allowed = number + cap - held - 1  # the last that the cap allows
        end = min(begin + max_length, int(ends[allowed]) if allowed < len(ends) else stop + 1)
        if end > stop:
            return np.array(found, np.int64)
        found.append(end)
        begin, held = end, 0
        number = int(ends.searchsorted(begin, side="right"))
