"""Best-fit decreasing: longest first, each into the fullest pack that still has room.

max_length 8, lengths 5 3 3 2 2:   [5 3] [3 2 2]   fill 15/16

Done with counts, not sequences: all sequences of one length and all packs that look alike move
together, so a million sequences are a few thousand events, and numpy then turns the events into
sequence numbers. The plan is exactly the one of the loop over single sequences. Among packs with
the same room the one opened first goes first, among sequences of the same length the one that
came first, so one input gives one plan on every machine.

The trade-off: the shortest sequences end up together, hundreds in a pack, hence the cap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padless.packer.plan import BLOCK, Integers, PackPlan, as_lengths, index_type, length_counts

# rank of the first sequence, sequences per pack, first pack, sequences already in each pack
Event = tuple[int, int, int, int]
# first pack, number of packs, sequences in each
Group = tuple[int, int, int]


def bfd(
    seq_lengths: ArrayLike,
    max_length: int,
    *,
    max_sequences_per_pack: int | None = None,
    seed: int = 0,
) -> PackPlan:
    """Plan by best-fit decreasing; nothing is drawn, so `seed` changes nothing.

    `seq_lengths` [N] in tokens, `max_length` the tokens of a pack. Raises InputError for a
    sequence that fits no pack, an empty one, or a limit below 1.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack)
    cap = max_sequences_per_pack or max(len(lengths), 1)
    occurring, counts = length_counts(lengths)
    events, groups = _fill(occurring[::-1].tolist(), counts[::-1].tolist(), max_length, cap)
    _, packs, sizes = np.array(sorted(groups), np.int64).reshape(-1, 3).T
    offsets = np.concatenate(([0], np.cumsum(np.repeat(sizes, packs))))
    by_length = longest_first(lengths, occurring, counts)
    return PackPlan(_place(events, offsets, by_length), offsets)


def longest_first(lengths: Integers, occurring: Integers, counts: NDArray[np.int64]) -> Integers:
    """Numbers of the sequences by falling length, equal ones as they came: [2 5 2] -> [1 0 2].

    `occurring` and `counts` are the lengths' histogram. A counting sort over blocks: one argsort
    of 20 million takes twice as long and 16 bytes a sequence.
    """
    order = np.empty(len(lengths), index_type(len(lengths)))
    places = len(lengths) - np.cumsum(counts)  # where the next sequence of each length goes
    for begin in range(0, len(lengths), BLOCK):
        block = lengths[begin : begin + BLOCK]
        ascending = _stable_argsort(block)
        block = block[ascending]
        run_begins = np.flatnonzero(np.diff(block, prepend=0))
        run_sizes = np.diff(run_begins, append=len(block))
        kinds = np.searchsorted(occurring, block[run_begins])
        shifts = np.repeat(places[kinds] - run_begins, run_sizes)
        order[np.arange(len(block)) + shifts] = ascending + begin
        places[kinds] += run_sizes
    return order


def _stable_argsort(values: Integers) -> NDArray[np.intp]:
    order = np.argsort(values.astype(np.uint16), kind="stable")
    # numpy sorts 16 bits by counting, ten times faster than it merges wider integers.
    for shift in range(16, int(values.max()).bit_length(), 16):
        digit = (values >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _fill(
    lengths: list[int], counts: list[int], max_length: int, cap: int
) -> tuple[list[Event], list[Group]]:
    """What best-fit decreasing does to `counts` sequences of each length, longest first.

    Events follow the ranks of the sequences without a gap. Groups hold every pack once.
    """
    events: list[Event] = []
    closed: list[Group] = []
    open_groups: dict[int, list[Group]] = {}  # room in tokens -> heap
    rooms: list[int] = []  # the keys of open_groups, ascending
    num_packs = rank = 0

    for length, left in zip(lengths, counts, strict=True):
        while left:
            found = bisect_left(rooms, length)
            if found < len(rooms):
                room = rooms[found]
                first, packs, size = heappop(open_groups[room])
                if not open_groups[room]:
                    del open_groups[room], rooms[found]
            else:
                room, size = max_length, 0
                first, packs = num_packs, -(-left // min(max_length // length, cap))
                num_packs += packs
            # A pack that took one stays the fullest with room: it goes on until it has none.
            each = min(room // length, cap - size)
            while packs and left:
                each = min(each, left)
                filled = min(packs, left // each)
                events.append((rank, each, first, size))
                rank += filled * each
                left -= filled * each
                after = (first, filled, size + each)
                _put(after, room - each * length, cap, closed, open_groups, rooms)
                first += filled
                packs -= filled
            if packs:
                _put((first, packs, size), room, cap, closed, open_groups, rooms)
    for groups in open_groups.values():
        closed += groups
    return events, closed


def _put(
    group: Group,
    room: int,
    cap: int,
    closed: list[Group],
    open_groups: dict[int, list[Group]],
    rooms: list[int],
) -> None:
    """File a group under the room its packs have left, or among the closed ones."""
    if not room or group[2] == cap:
        closed.append(group)
        return
    if room not in open_groups:
        open_groups[room] = []
        insort(rooms, room)
    heappush(open_groups[room], group)


def _place(events: list[Event], offsets: NDArray[np.int64], by_length: Integers) -> Integers:
    """The order of a plan: each sequence of `by_length`, [N], put where its event says.

    The sequence `i` ranks into an event goes into pack `first + i // each`, place
    `size + i % each`.
    """
    order = np.empty_like(by_length)
    table = np.array(events, by_length.dtype).reshape(-1, 4)
    ranks = np.ascontiguousarray(table[:, 0])
    for begin in range(0, len(by_length), BLOCK):
        end = min(begin + BLOCK, len(by_length))
        here = slice(*np.searchsorted(ranks, (begin, end - 1), side="right") - (1, 0))
        shares = np.diff(np.clip(np.append(ranks[here], end), begin, None))
        rank, each, first, size = np.repeat(table[here], shares, axis=0).T
        within = np.arange(begin, end, dtype=table.dtype) - rank
        pack = within // each
        order[offsets[first + pack] + (size + within - pack * each)] = by_length[begin:end]
    return order
