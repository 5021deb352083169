"""Best-fit decreasing one sequence at a time: slow, obvious, kept to hold the fast one to it."""

from __future__ import annotations

from collections.abc import Sequence


def reference_bfd(
    seq_lengths: Sequence[int], max_length: int, max_sequences_per_pack: int | None = None
) -> list[list[int]]:
    """Packs as lists of sequence numbers, in the order the packs were opened."""
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
            best = min(candidates, key=lambda pack: (room[pack], pack))
        else:
            best = len(packs)
            packs.append([])
            room.append(max_length)
        packs[best].append(number)
        room[best] -= length
    return packs
