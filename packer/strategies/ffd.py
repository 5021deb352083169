"""First-fit decreasing: longest first, each into the pack opened first that still has room.

max_length 8, lengths 5 4 3 3:   [5 3] [4 3]   fill 15/16

The classic that others are measured by, done with counts as `bfd` is. Its packs are as full as
best-fit's within a few in ten thousand; like there, the shortest sequences end up together.
"""

from __future__ import annotations

from heapq import heappop, heappush

from numpy.typing import ArrayLike

from padless.packer.plan import PackPlan, as_lengths, length_counts
from padless.packer.strategies.counting import Event, Group, plan_of_events


def ffd(
    seq_lengths: ArrayLike,
    max_length: int,
    *,
    max_sequences_per_pack: int | None = None,
    seed: int = 0,
    shuffle: bool = False,
) -> PackPlan:
    """Plan by first-fit decreasing; nothing is drawn but, with `shuffle`, the order of packs.

    `seq_lengths` [N] in tokens, `max_length` the tokens of a pack. Raises InputError for a
    sequence that fits no pack, an empty one, or a limit below 1.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack)
    cap = max_sequences_per_pack or max(len(lengths), 1)
    occurring, counts = length_counts(lengths)
    events, groups = _fill(occurring[::-1].tolist(), counts[::-1].tolist(), max_length, cap)
    return plan_of_events(lengths, events, groups, seed if shuffle else None)


def _fill(
    lengths: list[int], counts: list[int], max_length: int, cap: int
) -> tuple[list[Event], list[Group]]:
    """What first-fit decreasing does to `counts` sequences of each length, longest first."""
    events: list[Event] = []
    closed: list[Group] = []
    fitting: list[tuple[int, int, int, int]] = []  # heap of (first pack, packs, size, room)
    # Lengths only fall: a pack too full for this one waits until one comes that it has room for.
    waiting: list[tuple[int, Group]] = []  # heap of (-room, group)
    num_packs = rank = 0

    for length, left in zip(lengths, counts, strict=True):
        while waiting and -waiting[0][0] >= length:
            room, group = heappop(waiting)
            heappush(fitting, (*group, -room))
        while left:
            if fitting:
                first, packs, size, room = heappop(fitting)
            else:
                room, size = max_length, 0
                first, packs = num_packs, -(-left // min(max_length // length, cap))
                num_packs += packs
            each = min(room // length, cap - size)
            while packs and left:
                each = min(each, left)
                filled = min(packs, left // each)
                events.append((rank, each, first, size))
                rank += filled * each
                left -= filled * each
                group, after = (first, filled, size + each), room - each * length
                if not after or size + each == cap:
                    closed.append(group)
                elif after >= length:
                    heappush(fitting, (*group, after))
                else:
                    heappush(waiting, (-after, group))
                first += filled
                packs -= filled
            if packs:
                heappush(fitting, (first, packs, size, room))
    closed += [group[:3] for group in fitting]
    closed += [group for _, group in waiting]
    return events, closed
