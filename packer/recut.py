"""What becomes of records that are tokens already: the lines of a packed folder, for another length.

Fragments are put together again first, then the overflow policy is applied as a build applies it, so that
the lines are those of a fresh build. Where that cannot be known from tokens alone (what was cut away is in
no folder, nor are the ends of a chat's turns), the change is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.lines import DROPPED, EXCLUDED, FRAGMENT, LINE, NONE, TOO_LONG, TRUNCATED, WHOLE
from padless.packer.strategies.constraints import padded_lengths
from padless.packer.tables import LINES_PER_GROUP, Piece

CUT_ANYWHERE = frozenset({"text", "tokenized"})
"""Formats whose records may end at any token; a chat is cut at the end of a turn."""
BUILD_AGAIN = "build again from the sources"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a folder was built with, and what is asked for now."""

    where: str
    """The folder, for messages."""
    max_length: int
    overflow: str
    old_max_length: int
    old_overflow: str
    formats: tuple[str, ...]
    """Of each source, counted as in `Piece.source`."""
    empty_replies: int
    """Records with an empty reply; which ones they are, no folder says."""
    by_turn: bool
    """Whether chats gave a sequence for each turn (`expand_turns`), which are never joined."""
    align: int
    old_align: int
    was_cut: bool
    """Whether its sequences were cut where packs ended."""
    joins: bool
    """Whether they will be, so that fragments of a record are one sequence until then."""
    is_paired: NDArray[np.bool_] | None
    """[lines]: which sequences are one of a pair, to be kept or dropped as one; None: none."""


class Recut(NamedTuple):
    """The new lines, and where the tokens of each of their sequences are."""

    piece: Piece
    stored: NDArray[np.int64] | None
    """[lines]: the old line whose sequence it is, as it is; -1: none, or made anew. None: nothing changes."""
    origin: NDArray[np.int64]
    """[lines]: the old line that each is, or the first one of its record."""
    renewed: NDArray[np.int64]
    """Numbers of the records whose sequences are made anew from their old ones (see `Records`)."""


class Records(NamedTuple):
    """Lines by record: record r has the lines `first[r]` to `first[r + 1]`."""

    first: NDArray[np.int64]
    have: NDArray[np.int64]
    """Tokens of each record in the folder."""
    full: NDArray[np.int64]
    """Tokens that the tokenizer gave."""


def records_of(lines: NDArray[np.void]) -> Records:
    """The lines' records; every first part begins one."""
    first = np.append(np.flatnonzero(lines["part"] == 0), len(lines))
    ends = np.concatenate([[0], np.cumsum(lines["length"], dtype=np.int64)])
    have = ends[first[1:]] - ends[first[:-1]]
    return Records(first, have, have + lines["cut"][first[:-1]])


def recut(piece: Piece, policy: Policy, excluded: NDArray[np.bool_] | None = None) -> Recut:
    """Lines for `policy.max_length`, without the excluded records, [records].

    `targets` of lines that are made anew are 0 until their tokens have been looked at. Raises
    InputError where a fresh build's lines cannot be known, or a record is too long.
    """
    lines = piece.lines
    if excluded is None and _are_settled(lines, policy.max_length):
        return _unchanged(piece)
    records = records_of(lines)
    at = records.first[:-1]
    status, reason = lines["status"][at], lines["reason"][at]
    out = np.zeros(len(at), dtype=np.bool_) if excluded is None else excluded
    faulty = (status == DROPPED) & (reason != TOO_LONG)
    same = policy.max_length == policy.old_max_length and policy.overflow == policy.old_overflow
    lossy = (records.have < records.full) & ~faulty & ~out
    apart = _apart(piece, policy)
    over = (records.full > policy.max_length) & ~faulty & ~out & ~apart
    drop = np.zeros(len(at), dtype=np.bool_)
    renew = (status != DROPPED) & (np.diff(records.first) > 1) & ~apart & ~out
    gone = np.zeros(len(lines), dtype=np.bool_)
    if not same:
        _refuse_longer(policy, lossy & ~over & ~apart)
        drop, cut = _overflowing(policy, piece, records, over, status)
        renew = (renew & ~over) | cut
    elif not (policy.was_cut or policy.joins):
        renew[:] = False  # they are cut as they should be
    if apart.any():
        gone = _gone_of_apart(policy, piece, records, apart & ~out, lossy)
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


def _apart(piece: Piece, policy: Policy) -> NDArray[np.bool_]:
    """[records]: whose parts are answers or turns, each a sequence of its own."""
    of_pairs = np.array([policy.by_turn or name == "preference" for name in policy.formats], dtype=np.bool_)
    found: NDArray[np.bool_] = of_pairs[piece.source[piece.lines["part"] == 0]]
    return found


def _gone_of_apart(
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
        _refuse_longer(policy, too_long)
    if policy.old_overflow == "truncate" and (limit, policy.overflow) != (policy.old_max_length, "truncate"):
        _refuse(
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
    _refuse(mixed, policy.where, f"other turns of theirs were dropped for other reasons: {BUILD_AGAIN}")
    return gone


def _are_settled(lines: NDArray[np.void], max_length: int) -> bool:
    """Whether every record is one whole sequence of at most that length, or none whatever the length."""
    for start in range(0, len(lines), LINES_PER_GROUP):
        mine = lines[start : start + LINES_PER_GROUP]
        whole = (mine["status"] == WHOLE) & (mine["part"] == 0) & (mine["length"] <= max_length)
        if not (whole | (mine["status"] == DROPPED) & (mine["reason"] != TOO_LONG)).all():
            return False
    return True


def _refuse_longer(policy: Policy, lost: NDArray[np.bool_]) -> None:
    if lost.any():
        raise InputError(
            f"{policy.where}: {int(lost.sum()):,} records were cut or dropped for max_length "
            f"{policy.old_max_length:,} and would fit into {policy.max_length:,}, but their tokens are in no "
            "folder: build once at the longest length you will want, then repack down"
        )


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
        _refuse(over & (records.have < records.full), more, "some of their tokens are in no folder")
        _refuse(over & masked, more, "they have a loss mask, and a fragment would begin in its middle")
        return none, over
    source = piece.source[records.first[:-1]]
    chat = np.array([name not in CUT_ANYWHERE for name in policy.formats], dtype=np.bool_)[source]
    _refuse(
        over & chat,
        more,
        "a chat is cut at the end of a turn, and where its turns end is in no packed folder; choose "
        "--overflow drop, or build again from the sources",
    )
    # No target within the old length: none within a shorter one.
    stays = (status == DROPPED) & (policy.old_overflow == "truncate") & (limit <= policy.old_max_length)
    _refuse(
        over & ~known & ~stays, more, "tokens that would stay are in no folder: build again from the sources"
    )
    return over & stays, over & ~stays


def _refuse(which: NDArray[np.bool_], more: str, why: str) -> None:
    if which.any():
        raise InputError(f"{more}; {int(which.sum()):,} of the records cannot be repacked: {why}")


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
        _close_up(left, record[: len(old)], lost.astype(np.int64), records)
    lines = np.concatenate([left, dropped, made])
    order = np.lexsort((lines["part"], record))
    at = records.first[record[order]]
    found = Piece(piece.record[at], piece.row[at], piece.source[at], lines[order])
    nowhere = np.full(len(leaving) + len(made), -1)
    origin = np.concatenate([old, records.first[leaving], records.first[of]])
    return Recut(found, np.concatenate([stored, nowhere])[order], origin[order], renewed)


def _close_up(
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
