"""Concatenate and cut: the sequences as they came, cut wherever a pack ends.

max_length 8, lengths 5 6 3:   [5 3|] [|3 3]   fill 14/16, the second sequence in two fragments

Every pack but the last is full, whatever the lengths, and a sequence may be longer than a pack.
Boundaries are kept: a fragment is a sequence of its own, whose positions restart, and nothing
attends across.

The trade-off is what a cut costs: the later fragment is trained without what came before it, and its
first token not at all, since nothing predicts it. The other strategies cut nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.plan import PackPlan, as_lengths, index_type, shuffle_packs


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
    ends = np.cumsum(lengths, dtype=np.int64)
    cap = min(max_sequences_per_pack or len(lengths), plan_window or len(lengths))
    packs = _pack_ends(ends, max_length, cap)
    # [entries] where each ends in the concatenation: at its sequence's end, or at its pack's
    stops = np.concatenate((ends, packs))
    stops.sort(kind="stable")  # two ascending runs: merged, not sorted
    stops = stops[np.diff(stops, prepend=0) > 0]
    begins = np.concatenate((np.zeros(1, np.int64), stops))[:-1]
    order = np.searchsorted(ends, begins, side="right")
    starts = begins - (ends - lengths)[order]
    kind = index_type(int(max(lengths.max(initial=0), len(lengths))))
    plan = PackPlan(
        order.astype(index_type(len(lengths))),
        np.concatenate(([0], np.searchsorted(stops, packs) + 1)).astype(np.int64),
        starts.astype(kind),
        (stops - begins).astype(kind),
    )
    return shuffle_packs(plan, seed) if shuffle else plan


def _pack_ends(ends: NDArray[np.int64], max_length: int, cap: int) -> NDArray[np.int64]:
    """Where each pack ends in the concatenation of sequences that end at `ends`, [N] -> [packs]."""
    total = int(ends[-1]) if len(ends) else 0
    full = np.arange(max_length, total + max_length, max_length, dtype=np.int64)
    full[-1:] = total
    # How many sequences a pack has, were all of them full: the last one's number less the first one's.
    last = np.searchsorted(ends, full)
    first = np.searchsorted(ends, np.concatenate(([0], full[:-1])), side="right")
    if not len(full) or int((last - first).max()) < cap:
        return full
    found: list[int] = []
    begin = 0
    while begin < total:
        number = int(ends.searchsorted(begin, side="right")) + cap - 1  # the last that the cap allows
        begin = min(begin + max_length, int(ends[min(number, len(ends) - 1)]))
        found.append(begin)
    return np.array(found, np.int64)
