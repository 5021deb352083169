"""Records whose parts are sequences of their own (the answers of a pair, the turns of a chat), cut anew.

They are never joined. A pair is kept or dropped as one and fits a pack together; of turns those go that do
not fit, and what is gone is counted on the first that is left, as `packer/several.py` does in a build.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.lines import TOO_LONG, TRUNCATED, WHOLE
from padless.packer.recut_policy import BUILD_AGAIN, Policy, Records, refuse, refuse_longer
from padless.packer.strategies.constraints import padded_lengths
from padless.packer.table_writer import Piece


def are_apart(piece: Piece, policy: Policy) -> NDArray[np.bool_]:
    """[records]: whose parts are answers or turns, each a sequence of its own."""
    of_pairs = np.array([policy.by_turn or name == "preference" for name in policy.formats], dtype=np.bool_)
    found: NDArray[np.bool_] = of_pairs[piece.source[piece.lines["part"] == 0]]
    return found


def gone_of_apart(
    policy: Policy,
    piece: Piece,
    records: Records,
    apart: NDArray[np.bool_],
    lossy: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """[lines]: the answers and turns that go for their length; InputError where that is no choice.

    A pair goes as one, and where it fits no pack together; of turns those go that do not fit.
    """
    lines, at, limit = piece.lines, records.first[:-1], policy.max_length
    per_record = np.diff(records.first)
    paired = np.zeros(len(lines), dtype=np.bool_) if policy.is_paired is None else policy.is_paired
    longer = limit > policy.old_max_length or (paired.any() and policy.align < policy.old_align)
    too_long = lossy & apart & (lines["reason"][at] == TOO_LONG)
    if longer:
        refuse_longer(policy, too_long)
    if policy.old_overflow == "truncate" and (limit, policy.overflow) != (policy.old_max_length, "truncate"):
        refuse(
            too_long, policy.where, f"they were truncated at {policy.old_max_length:,} tokens: {BUILD_AGAIN}"
        )
    gone = (lines["length"] > limit) & np.repeat(apart, per_record)
    padded = np.where(paired, padded_lengths(lines["length"], policy.align), 0)
    together = np.add.reduceat(padded, at, dtype=np.int64)
    torn = np.logical_or.reduceat(gone & paired, at) | (together > limit)
    gone |= np.repeat(torn & apart, per_record) & paired
    if gone.any() and policy.overflow != "drop":
        number = int(np.flatnonzero(gone)[0])
        raise InputError(
            f"{policy.where}: {int(gone.sum()):,} answers or turns fit no pack of {limit:,} tokens (pairs "
            f"together; the first is of record {int(piece.record[number]):,}): raise --max-length, or choose "
            "--overflow drop"
        )
    mixed = np.logical_or.reduceat(gone, at) & lossy & (lines["reason"][at] != TOO_LONG)
    refuse(mixed, policy.where, f"other turns of theirs were dropped for other reasons: {BUILD_AGAIN}")
    return gone


def close_up(
    left: NDArray[np.void], record: NDArray[np.int64], lost: NDArray[np.int64], records: Records
) -> None:
    """Number the parts that are left of records that lost some, and count what is lost on the first."""
    first = np.append(True, record[1:] != record[:-1])[: len(record)]
    begins = np.flatnonzero(first)
    part = np.arange(len(record)) - np.repeat(begins, np.diff(np.append(begins, len(record))))
    touched = lost[record] > 0
    left["part"] = np.where(touched, part, left["part"])
    before = (records.full - records.have)[record]
    left["cut"] = np.where(touched & first, before + lost[record], left["cut"])
    short = touched & first & (left["status"] == WHOLE)
    left["status"][short] = TRUNCATED
    left["reason"][touched & first] = TOO_LONG
