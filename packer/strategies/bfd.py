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

from numpy.typing import ArrayLike

from padless.packer.plan import Integers, PackPlan, as_lengths, length_counts
from padless.packer.strategies.counting import Event, Group, plan_of_events


def bfd(
    seq_lengths: ArrayLike,
    max_length: int,
    *,
    max_sequences_per_pack: int | None = None,
    seed: int = 0,
    shuffle: bool = False,
) -> PackPlan:
    """Plan by best-fit decreasing; nothing is drawn but, with `shuffle`, the order of packs.

    `seq_lengths` [N] in tokens, `max_length` the tokens of a pack. Raises InputError for a
    sequence that fits no pack, an empty one, or a limit below 1.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack)
    cap = max_sequences_per_pack or max(len(lengths), 1)
    occurring, counts = length_counts(lengths)
    events, groups = fill_best(occurring[::-1].tolist(), counts[::-1].tolist(), max_length, cap)
    return plan_of_events(lengths, events, groups, seed if shuffle else None)


def packs_needed(occurring: Integers, counts: Integers, max_length: int, cap: int | None) -> int:
    """Packs of the plan for `counts` sequences of each `occurring` length, [kinds], without laying it out."""
    groups = fill_best(occurring[::-1].tolist(), counts[::-1].tolist(), max_length, cap or int(counts.sum()))[
        1
    ]
    return sum(packs for _, packs, _ in groups)


def fill_best(
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
