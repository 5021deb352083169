"""Sequences in memory to micro-batches that take the ranks equally long, as many on each.

Longest first, each to the micro-batch with the least work so far that has room (longest processing time
first, Graham 1969: within a third of the best, at hundreds of sequences within a thousandth). Work is not
length: attention grows with the square. Plain Python over a heap: a plan of 1,000 sequences takes a quarter
of a millisecond, less than a compiler's first call; millions are planned offline (packer/strategies).
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from numbers import Integral

import numpy as np

from padless.runtime.arrays import Array
from padless.runtime.errors import CollateError
from padless.runtime.order import attention_costs

MicroBatches = list[list[int]]
_GRAIN = 1024
"""Work is told in units of so much, a 24th of a token's: Python adds small numbers faster."""


def plan_micro_batches(lengths: Array, *, max_tokens: int, world_size: int = 1) -> MicroBatches:
    """Numbers of the sequences of each micro-batch, at most `max_tokens` each and as few as this fills.

    `lengths` [sequences]. The number of micro-batches is a multiple of `world_size`; those of step k are
    [k * world_size, (k + 1) * world_size), of like work, and rank r's is the one at k * world_size + r. Only
    where there are fewer sequences than that, some are empty. The same lengths give the same plan everywhere.
    Raises CollateError for no sequences, for an empty one, and for one that fits no micro-batch.
    """
    if not isinstance(max_tokens, Integral):
        raise CollateError(f"max_tokens is {max_tokens!r}; it is a whole number, the most tokens of a batch")
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        raise CollateError("there are no sequences to pack; give at least one")
    if int(lengths.min()) < 1:
        raise CollateError(f"sequence {int(lengths.argmin())} is empty; each has at least 1 token")
    if (longest := int(lengths.max())) > max_tokens:
        raise CollateError(
            f"sequence {int(lengths.argmax())} has {longest:,} tokens and max_tokens is {max_tokens:,}: "
            "raise max_tokens, or sample shorter ones"
        )
    order = np.argsort(-lengths, kind="stable")
    costs = attention_costs(lengths, lengths * lengths) // _GRAIN
    longest_first = order.tolist(), lengths[order].tolist(), costs[order]
    steps = -(-int(lengths.sum()) // (max_tokens * world_size))
    while (found := _fill(*longest_first, steps * world_size, max_tokens)) is None:
        steps += 1
    steps_down = [found[at : at + world_size] for at in range(0, len(found), world_size)]
    # There and back, so that no rank has the heaviest of every step.
    return [numbers for at, step in enumerate(steps_down) for numbers in (step[::-1] if at % 2 else step)]


def _fill(
    order: list[int], lengths: list[int], costs: Array, count: int, max_tokens: int
) -> MicroBatches | None:
    """Sequences in this order into `count` micro-batches, the one of most work first; None for no room."""
    found: MicroBatches = [[] for _ in range(count)]
    rooms = [max_tokens] * count
    # A heap of work * count + place: numbers are compared faster than pairs.
    loads = [*range(count)]
    for number, length, more in zip(order, lengths, (costs * count).tolist(), strict=True):
        least = loads[0]
        place = least % count
        room = rooms[place] - length
        if room >= 0:
            heapreplace(loads, least + more)
        else:
            fitting = [one for one in loads if length <= rooms[one % count]]
            if not fitting:
                return None
            least = min(fitting)
            place = least % count
            room = rooms[place] - length
            loads[loads.index(least)] = least + more
            heapify(loads)
        rooms[place] = room
        found[place].append(number)
    return [found[one % count] for one in sorted(loads, reverse=True)]
