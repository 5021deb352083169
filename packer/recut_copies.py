"""Records that a mix packed several times, cut anew: each copy by itself, as if it were a record.

What a mix drew stays drawn, so a length or policy that would leave records out is refused: a build would have
drawn others in their place.
"""

from __future__ import annotations

import numpy as np

from padless.packer.errors import InputError
from padless.packer.lines import DROPPED
from padless.packer.recut import Recut
from padless.packer.recut_policy import BUILD_AGAIN
from padless.packer.table_writer import Piece


def copies_apart(piece: Piece) -> Piece:
    """The table with each copy's parts numbered from 0, so that no two copies are taken for one record."""
    lines = piece.lines.copy()
    begins = np.flatnonzero((lines["part"] == 0) | ((lines["start"] == 0) & (lines["length"] > 0)))
    sizes = np.diff(np.append(begins, len(lines)))
    lines["part"] = np.arange(len(lines)) - np.repeat(begins, sizes)
    return piece._replace(lines=lines)


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
