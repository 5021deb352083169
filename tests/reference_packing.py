"""Packing one sequence at a time: slow, obvious, kept to hold the fast strategies to it."""

from __future__ import annotations

from collections.abc import Sequence


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
