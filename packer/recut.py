"""What becomes of records that are tokens already: the lines of a packed folder, for another length.

Fragments are put together again first, then the overflow policy is applied as a build applies it, so that
the lines are those of a fresh build. Where that cannot be known from tokens alone (what was cut away is in
no folder, nor are the ends of a chat's turns), the change is refused with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.lines import DROPPED, EXCLUDED, FRAGMENT, LINE, NONE, TOO_LONG, TRUNCATED, WHOLE
from padless.packer.recut_apart import are_apart, close_up, gone_of_apart
from padless.packer.recut_policy import CUT_ANYWHERE, Policy, Records, records_of, refuse, refuse_longer
from padless.packer.table_writer import LINES_PER_GROUP, Piece


class Recut(NamedTuple):
    """The new lines, and where the tokens of each of their sequences are."""

    piece: Piece
    stored: NDArray[np.int64] | None
    """[lines]: the old line whose sequence it is, as it is; -1: none, or made anew. None: nothing changes."""
    origin: NDArray[np.int64]
    """[lines]: the old line that each is, or the first one of its record."""
    renewed: NDArray[np.int64]
    """Numbers of the records whose sequences are made anew from their old ones (see `Records`)."""


def recut(piece: Piece, policy: Policy, excluded: NDArray[np.bool_] | None = None) -> Recut:
    """Lines for `policy.max_length`, without the excluded records, [records].

    `targets` of lines that are made anew are 0 until their tokens have been looked at. Raises
    InputError where a fresh build's lines cannot be known, or a record is too long.
    """
    lines = piece.lines
    if excluded is None and are_settled(lines, policy.max_length):
        return _unchanged(piece)
    records = records_of(lines)
    at = records.first[:-1]
    status, reason = lines["status"][at], lines["reason"][at]
    out = np.zeros(len(at), dtype=np.bool_) if excluded is None else excluded
    faulty = (status == DROPPED) & (reason != TOO_LONG)
    same = policy.max_length == policy.old_max_length and policy.overflow == policy.old_overflow
    lossy = (records.have < records.full) & ~faulty & ~out
    apart = are_apart(piece, policy)
    over = (records.full > policy.max_length) & ~faulty & ~out & ~apart
    drop = np.zeros(len(at), dtype=np.bool_)
    renew = (status != DROPPED) & (np.diff(records.first) > 1) & ~apart & ~out
    gone = np.zeros(len(lines), dtype=np.bool_)
    if not same:
        refuse_longer(policy, lossy & ~over & ~apart)
        drop, cut = _overflowing(policy, piece, records, over, status)
        renew = (renew & ~over) | cut
    elif not (policy.was_cut or policy.joins):
        renew[:] = False  # they are cut as they should be
    if apart.any():
        gone = gone_of_apart(policy, piece, records, apart & ~out, lossy)
        whole = np.logical_and.reduceat(gone | (lines["length"] == 0), at) & (records.have > 0)
        drop |= whole
        gone &= ~np.repeat(whole, np.diff(records.first))
    if policy.empty_replies and bool(((drop | out) & (records.have > 0)).any()):
        raise InputError(
            f"{policy.where} has {policy.empty_replies:,} records with an empty reply and not which, "
            "so the rest cannot be counted once records are dropped: build with --on-empty-reply drop, or "
            "build again from the sources"
        )
    return _with_changes(piece, records, policy, drop, out & ~(status == DROPPED), renew, gone)


def _unchanged(piece: Piece) -> Recut:
    return Recut(piece, None, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def are_settled(lines: NDArray[np.void], max_length: int) -> bool:
    """Whether every record is one whole sequence of at most that length, or none whatever the length."""
    for start in range(0, len(lines), LINES_PER_GROUP):
        mine = lines[start : start + LINES_PER_GROUP]
        whole = (mine["status"] == WHOLE) & (mine["part"] == 0) & (mine["length"] <= max_length)
        if not (whole | (mine["status"] == DROPPED) & (mine["reason"] != TOO_LONG)).all():
            return False
    return True


def _overflowing(
    policy: Policy,
    piece: Piece,
    records: Records,
    over: NDArray[np.bool_],
    status: NDArray[np.uint8],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which of the records over the length are dropped, and which are made anew."""
    none = np.zeros(len(over), dtype=np.bool_)
    if not over.any():
        return none, none
    limit = policy.max_length
    count, number = int(over.sum()), int(over.argmax())
    first = f"record {int(piece.record[records.first[number]]):,} has {int(records.full[number]):,} tokens"
    more = f"{policy.where}: {count:,} records have more than max_length {limit:,} tokens ({first})"
    if policy.overflow == "error":
        raise InputError(
            f"{more}: raise --max-length, or choose --overflow drop, truncate or (for text) split"
        )
    if policy.overflow == "drop":
        return over, none
    known = np.minimum(records.full, limit) <= records.have
    if policy.overflow == "split":
        ends = np.concatenate([[0], np.cumsum(piece.lines["targets"], dtype=np.int64)])
        targets = ends[records.first[1:]] - ends[records.first[:-1]]
        # Every part's first token is untrained; nothing else may be.
        masked = targets != records.have - np.diff(records.first)
        refuse(over & (records.have < records.full), more, "some of their tokens are in no folder")
        refuse(over & masked, more, "they have a loss mask, and a fragment would begin in its middle")
        return none, over
    source = piece.source[records.first[:-1]]
    chat = np.array([name not in CUT_ANYWHERE for name in policy.formats], dtype=np.bool_)[source]
    refuse(
        over & chat,
        more,
        "a chat is cut at the end of a turn, and where its turns end is in no packed folder; choose "
        "--overflow drop, or build again from the sources",
    )
    # No target within the old length: none within a shorter one.
    stays = (status == DROPPED) & (policy.old_overflow == "truncate") & (limit <= policy.old_max_length)
    refuse(
        over & ~known & ~stays, more, "tokens that would stay are in no folder: build again from the sources"
    )
    return over & stays, over & ~stays


def _with_changes(
    piece: Piece,
    records: Records,
    policy: Policy,
    drop: NDArray[np.bool_],
    out: NDArray[np.bool_],
    renew: NDArray[np.bool_],
    gone: NDArray[np.bool_],
) -> Recut:
    """The table with one line for each record that goes and new lines for those made anew.

    `gone`: lines that go from records that stay.
    """
    per_record = np.diff(records.first)
    changed = drop | out | renew
    record_of_line = np.repeat(np.arange(len(per_record)), per_record)
    old = np.flatnonzero(~changed[record_of_line] & ~gone)
    stored = np.where(piece.lines["length"][old] > 0, old, -1)
    if not changed.any() and not gone.any():
        return _unchanged(piece)
    leaving = np.flatnonzero(drop | out)
    dropped = np.zeros(len(leaving), dtype=LINE)
    dropped["status"] = DROPPED
    dropped["reason"] = np.where(out[leaving], EXCLUDED, TOO_LONG)
    dropped["cut"] = records.full[leaving]
    renewed = np.flatnonzero(renew)
    made, of = _renewed(records, renewed, policy)
    record = np.concatenate([record_of_line[old], leaving, of])
    left = piece.lines[old]
    if gone.any():
        lost = np.bincount(record_of_line, weights=np.where(gone, piece.lines["length"], 0))
        close_up(left, record[: len(old)], lost.astype(np.int64), records)
    lines = np.concatenate([left, dropped, made])
    order = np.lexsort((lines["part"], record))
    at = records.first[record[order]]
    found = Piece(piece.record[at], piece.row[at], piece.source[at], lines[order])
    nowhere = np.full(len(leaving) + len(made), -1)
    origin = np.concatenate([old, records.first[leaving], records.first[of]])
    return Recut(found, np.concatenate([stored, nowhere])[order], origin[order], renewed)


def _renewed(
    records: Records, renewed: NDArray[np.int64], policy: Policy
) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """The lines of records that are joined, split or truncated, and which record each is of."""
    limit = policy.max_length
    full, have = records.full[renewed], records.have[renewed]
    fits = full <= limit
    split = policy.overflow == "split"
    parts = -(-full // limit) if split and not policy.joins else np.ones(len(renewed), dtype=np.int64)
    of = np.repeat(renewed, parts)
    part = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    lines = np.zeros(len(of), dtype=LINE)
    lines["part"] = part
    lines["start"] = part * limit
    lines["length"] = np.repeat(np.minimum(full, have), parts) - part * limit
    if not (split and policy.joins):
        lines["length"] = np.minimum(limit, lines["length"])
    whole = np.repeat(fits, parts)
    lines["status"] = np.where(whole, WHOLE, FRAGMENT if split else TRUNCATED)
    lines["reason"] = np.where(whole, NONE, TOO_LONG)
    lines["cut"] = np.where(whole | split, 0, records.full[of] - lines["length"])
    return lines, of
