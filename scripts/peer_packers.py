"""How other packers fill packs, written again from the descriptions of their algorithms.

They stand beside padless's strategies in `bench_plan.py`: number of packs, and the time of a plain
Python loop of the same kind. It is not their code, so a time here says what the algorithm costs in
Python, not how fast the peer is (one of them compiles its loop).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

Packs = list[list[int]]


def windows(count: int, size: int | None) -> Iterator[range]:
    """The numbers below `count` in windows of `size`; None: one window."""
    step = size or max(count, 1)
    for begin in range(0, count, step):
        yield range(begin, min(begin + step, count))


def best_fit_decreasing(lengths: list[int], max_length: int, window: int | None = None) -> Packs:
    """Longest first into the fullest pack with room, found in a tree over rooms; per window.

    TRL plans so for every 1,000 rows of a map batch, LLaMA-Factory and ms-swift much alike.
    """
    leaves = 1 << max_length.bit_length()
    packs: Packs = []
    for numbers in windows(len(lengths), window):
        tree = [0] * (2 * leaves)  # the largest room below each node that a pack has
        by_room: dict[int, deque[int]] = {}

        def mark(room: int, value: int, tree: list[int] = tree) -> None:
            node = room + leaves
            tree[node] = value
            while node > 1:
                node //= 2
                tree[node] = max(tree[2 * node], tree[2 * node + 1])

        for number in sorted(numbers, key=lambda n: -lengths[n]):
            length = lengths[number]
            node, room = length + leaves, 0
            if tree[node]:
                room = length
            while not room and node > 1:  # up to the first subtree of more room, and down to its least
                if node % 2 == 0 and tree[node + 1]:
                    node += 1
                    while node < leaves:
                        node = 2 * node if tree[2 * node] else 2 * node + 1
                    room = node - leaves
                node //= 2
            if room:
                pack = by_room[room].popleft()
                if not by_room[room]:
                    mark(room, 0)
            else:
                pack, room = len(packs), max_length
                packs.append([])
            packs[pack].append(number)
            left = room - length
            if left:
                waiting = by_room.setdefault(left, deque())
                waiting.append(pack)
                if len(waiting) == 1:
                    mark(left, left)
    return packs


def first_fit(
    lengths: list[int], max_length: int, window: int | None = 100_000, cap: int | None = 200
) -> Packs:
    """In order, each into the first pack of its window with room (Axolotl's groups and cap)."""
    packs: Packs = []
    for numbers in windows(len(lengths), window):
        leaves = 1 << len(numbers).bit_length()
        tree = [max_length] * (2 * leaves)  # the largest room below each node
        first = len(packs)
        for number in numbers:
            length, node = lengths[number], 1
            while node < leaves:
                node = 2 * node if tree[2 * node] >= length else 2 * node + 1
            pack = first + node - leaves
            if pack == len(packs):
                packs.append([])
            packs[pack].append(number)
            tree[node] = 0 if len(packs[pack]) == cap else tree[node] - length
            while node > 1:
                node //= 2
                tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return packs


def next_fit(lengths: list[int], max_length: int) -> Packs:
    """In order, a new pack where one does not fit (torchtune, Automodel's THD, open-instruct)."""
    packs: Packs = []
    room = 0
    for number, length in enumerate(lengths):
        if length > room:
            packs.append([])
            room = max_length
        packs[-1].append(number)
        room -= length
    return packs


PEERS: dict[str, Callable[[list[int], int], Packs]] = {
    "TRL's loop over all": best_fit_decreasing,
    "TRL's loop per 1,000": lambda lengths, limit: best_fit_decreasing(lengths, limit, 1000),
    "Axolotl's first fit": first_fit,
    "next fit": next_fit,
}
