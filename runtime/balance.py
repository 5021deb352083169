"""Sequences in memory to micro-batches that take the ranks equally long, as many on each.

Longest first, each to the micro-batch with the least work so far that has room (longest processing time
first, Graham 1969: within a third of the best, at hundreds of sequences within a thousandth). Work is not
length: attention grows with the square. Plain Python over a heap: a plan of 1,000 sequences takes half a
millisecond, less than a compiler's first call; millions are planned offline (packer/strategies).
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from padless.runtime.arrays import Array
from padless.runtime.errors import CollateError
from padless.runtime.order import attention_costs

MicroBatches = list[list[int]]


def plan_micro_batches(lengths: Array, *, max_tokens: int, world_size: int = 1) -> MicroBatches:
    """Numbers of the sequences of each micro-batch, at most `max_tokens` each and as few as this fills.

    `lengths` [sequences]. The number of micro-batches is a multiple of `world_size`; those of step k are
    [k * world_size, (k + 1) * world_size), of like work, and rank r's is the one at k * world_size + r. Only
    where there are fewer sequences than that, some are empty. The same lengths give the same plan everywhere.
    Raises CollateError for no sequences, for an empty one, and for one that fits no micro-batch.
    """
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
    costs = attention_costs(lengths, lengths * lengths)
    items = list(zip(order.tolist(), lengths[order].tolist(), costs[order].tolist(), strict=True))
    steps = -(-int(lengths.sum()) // (max_tokens * world_size))
    while (found := _longest_first(items, steps * world_size, max_tokens)) is None:
        steps += 1
    work = np.array([costs[numbers].sum() for numbers in found])
    heaviest = np.argsort(-work, kind="stable").reshape(steps, world_size)
    heaviest[1::2] = heaviest[1::2, ::-1]  # there and back, so that no rank has the heaviest of every step
    return [found[number] for number in heaviest.reshape(-1).tolist()]


def _longest_first(items: list[tuple[int, int, int]], count: int, max_tokens: int) -> MicroBatches | None:
    """(number, length, cost) in descending order into `count` micro-batches; None where one finds no room."""
    found: MicroBatches = [[] for _ in range(count)]
    rooms = [max_tokens] * count
    loads = [(0, place) for place in range(count)]  # a heap
    for number, length, cost in items:
        load, place = loads[0]
        if length <= rooms[place]:
            heapreplace(loads, (load + cost, place))
        else:
            fitting = [one for one in loads if length <= rooms[one[1]]]
            if not fitting:
                return None
            load, place = min(fitting)
            loads[loads.index((load, place))] = (load + cost, place)
            heapify(loads)
        rooms[place] -= length
        found[place].append(number)
    return found
