"""Packing one sequence at a time: slow, obvious, kept to hold the fast strategies to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def reference_bfd(
    seq_lengths: Sequence[int], max_length: int, max_sequences_per_pack: int | None = None
) -> list[list[int]]:
    """Best-fit decreasing: lists of sequence numbers, in the order the packs were opened."""
    return _decreasing(seq_lengths, max_length, max_sequences_per_pack, best=True)


def reference_ffd(
    seq_lengths: Sequence[int], max_length: int, max_sequences_per_pack: int | None = None
) -> list[list[int]]:
    """First-fit decreasing: lists of sequence numbers, in the order the packs were opened."""
    return _decreasing(seq_lengths, max_length, max_sequences_per_pack, best=False)


def _decreasing(
    seq_lengths: Sequence[int], max_length: int, max_sequences_per_pack: int | None, *, best: bool
) -> list[list[int]]:
    packs: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(seq_lengths)), key=lambda i: -seq_lengths[i]):
        length = seq_lengths[number]
        candidates = [
            pack
            for pack in range(len(packs))
            if room[pack] >= length
            and (max_sequences_per_pack is None or len(packs[pack]) < max_sequences_per_pack)
        ]
        if candidates:
            chosen = min(candidates, key=lambda pack: (room[pack] if best else 0, pack))
        else:
            chosen = len(packs)
            packs.append([])
            room.append(max_length)
        packs[chosen].append(number)
        room[chosen] -= length
    return packs


def reference_lengths(
    lengths: Sequence[int],
    max_lengths: Sequence[int],
    pack: Callable[[list[int], int], list[list[int]]],
    drawn: Callable[[int], Sequence[int]],
    sample: float,
) -> list[list[list[int]]]:
    """Packs of several lengths, for each length: those above the length below it, and what fits beside them.

    `pack` plans lengths for one length of packs; `drawn` gives the order in which shorter ones are taken.
    """
    pool, found = list(range(len(lengths))), []
    for below, length in reversed([*zip((0, *max_lengths), max_lengths, strict=False)]):
        long = [n for n in pool if lengths[n] > below]
        others = [n for n in pool if lengths[n] <= below]
        chosen = list(long)
        if long and others:
            alone = len(pack([lengths[n] for n in long], length))
            room = alone * length - sum(lengths[n] for n in long)
            taken = 0
            for place in drawn(len(others)):
                taken += lengths[others[place]]
                if taken > sample * room:
                    break
                chosen.append(others[place])
        chosen.sort()
        packs = [[chosen[n] for n in one] for one in pack([lengths[n] for n in chosen], length)]
        packs = [one for one in packs if any(n in long for n in one)]
        found.append(packs)
        pool = [n for n in pool if not any(n in one for one in packs)]
    return found[::-1]


def reference_wrapped(lengths: list[int], max_length: int, cap: int) -> list[list[tuple[int, int, int]]]:
    """Token by token: a sequence's number, its first token and its tokens for each entry of a pack."""
    packs: list[list[tuple[int, int, int]]] = []
    for number, length in enumerate(lengths):
        for token in range(length):
            room = packs and sum(taken for _, _, taken in packs[-1]) < max_length
            if room and packs[-1][-1][0] == number:
                _, start, taken = packs[-1].pop()
                packs[-1].append((number, start, taken + 1))
            elif room and len(packs[-1]) < cap:
                packs[-1].append((number, token, 1))
            else:
                packs.append([(number, token, 1)])
    return packs
