"""The lines of the sequence table while a build is under way, and the words for what became of a record."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STATUSES = ("whole", "truncated", "fragment", "dropped")
WHOLE, TRUNCATED, FRAGMENT, DROPPED = range(4)

REASONS = (
    *("", "too-long", "empty", "no-targets", "malformed", "empty-reply", "pack-end", "excluded"),
    "not-drawn",
)
NONE, TOO_LONG, EMPTY, NO_TARGETS, MALFORMED, EMPTY_REPLY, PACK_END, EXCLUDED, NOT_DRAWN = range(9)

FAULTS = (EMPTY, NO_TARGETS, MALFORMED)
"""Reasons that count against `max_drop_share`; the others were asked for."""

NO_VERDICT, REJECTED, CHOSEN, UNWANTED, WANTED = range(5)
"""What a record says of its answer: one of a pair, or one with a label."""

LINE = np.dtype(
    [
        ("record", "<i4"),  # within the chunk
        ("part", "<i4"),
        ("start", "<i8"),
        ("cut", "<i8"),
        ("length", "<i4"),
        ("targets", "<i4"),
        ("status", "u1"),
        ("reason", "u1"),
        ("split", "u1"),  # its number in `Identity.splits`
        ("empty_reply", "u1"),
        ("verdict", "u1"),
        ("margin", "<f4"),  # of a pair, on both of its lines
        ("images", "<u4"),  # bytes of what is told of its images
    ]
)


class Problem(NamedTuple):
    """Why a build must stop: a record that the policy does not let pass."""

    record: int
    line: int | None
    message: str
