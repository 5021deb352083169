"""Records that a mix packed several times, cut anew: each copy by itself, as if it were a record.

What a mix drew stays drawn, so a length or policy that would change what there is to draw from is refused: a
build would have drawn others.
"""

from __future__ import annotations

import numpy as np

from padless.packer.errors import InputError
from padless.packer.lines import DROPPED, NOT_DRAWN, TOO_LONG
from padless.packer.recut import Recut
from padless.packer.recut_policy import BUILD_AGAIN, Policy, records_of
from padless.packer.table_writer import Piece


def copies_apart(piece: Piece) -> Piece:
    """The table with each copy's parts numbered from 0, so that no two copies are taken for one record."""
    lines = piece.lines.copy()
    begins = np.flatnonzero((lines["part"] == 0) | ((lines["start"] == 0) & (lines["length"] > 0)))
    sizes = np.diff(np.append(begins, len(lines)))
    lines["part"] = np.arange(len(lines)) - np.repeat(begins, sizes)
    return piece._replace(lines=lines)


def check_draw(piece: Piece, policy: Policy, by: str) -> None:
    """See that a build would draw the same; `piece`: `copies_apart` of a mix that counts `by`.

    Raises InputError where records, those that were not drawn too, have more tokens than a pack has now or
    had then: they would give other amounts to draw from.
    """
    if (policy.max_length, policy.overflow) == (policy.old_max_length, policy.old_overflow):
        return
    records = records_of(piece.lines)
    at = records.first[:-1]
    status, reason = piece.lines["status"][at], piece.lines["reason"][at]
    is_drawn, was_too_long = status != DROPPED, (status == DROPPED) & (reason == TOO_LONG)
    counts = is_drawn | was_too_long | ((status == DROPPED) & (reason == NOT_DRAWN))
    tokens = records.full
    if policy.by_turn and len(at):  # each turn is measured by itself, and no line tells of those not drawn
        tokens = np.where(is_drawn, np.maximum.reduceat(piece.lines["length"], at), tokens)
    over = counts & (tokens > min(policy.max_length, policy.old_max_length))
    if policy.overflow == "split" and by != "trained":  # all tokens of a record count, however it is cut
        lost = policy.old_overflow in ("drop", "truncate")
        over = counts & (tokens > policy.old_max_length) & lost
    elif policy.overflow == policy.old_overflow == "drop":
        over &= ~(was_too_long & (tokens > policy.max_length))
    if over.any():
        raise InputError(
            f"{policy.where} is a mix, and {int(over.sum()):,} of its records (those that were not drawn "
            f"too) are over the length of a pack then or now: {BUILD_AGAIN}, which would draw others"
        )


def copies_together(piece: Piece, cut: Recut, where: str) -> Piece:
    """What `recut` made of `copies_apart(piece)`, as the parts of its records again.

    Raises InputError where it left records out.
    """
    lines = cut.piece.lines.copy()
    record = cut.piece.record
    if cut.stored is not None:
        left_out = (lines["status"] == DROPPED) & (piece.lines["status"][cut.origin] != DROPPED)
        if left_out.any():
            count = len(np.unique(record[left_out]))
            raise InputError(
                f"{where} is a mix, and {count:,} of the records drawn for it would be left out: "
                f"{BUILD_AGAIN}, which draws others for them"
            )
    begins = np.flatnonzero(np.append(True, record[1:] != record[:-1])[: len(record)])
    lines["part"] = np.arange(len(lines)) - np.repeat(begins, np.diff(np.append(begins, len(lines))))
    lines["cut"][lines["part"] > 0] = 0
    return cut.piece._replace(lines=lines)
