"""Columns of the shards beyond the format's own: what a record says of its answers, and its tokens' weights.

A build has those that some record of it gives, in all its splits. Verdicts travel in the lines of the chunks
and weights in a file of their own (packer/token_store.py), so a build without them pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.lines import CHOSEN, REJECTED, UNWANTED, WANTED
from padless.runtime.format import IMAGES, ColumnInfo

if TYPE_CHECKING:
    from padless.packer.tables import SplitLines

VERDICTS = {"pair_id": "int64", "is_chosen": "int8", "label": "int8", "margin": "float32"}
"""Extra columns at sequence level, there where any sequence has a value."""
NONE_OF = {"margin": 0}
"""What says that there is no value, where that is not -1."""
SEQUENCE_COLUMNS = {**VERDICTS, "reward": "float32", "group_id": "int64"}
"""All at sequence level; the last two are of rollouts."""
GROUP = "pair_id"
"""The column whose sequences of one value share a pack; of rollouts it is another one."""
GROUPS = (GROUP, "group_id")
WEIGHTS = ColumnInfo(name="loss_weight", level="token", type="list<float32>")
"""The extra column of weights: 1 for trained tokens whose record gives none, 0 for others."""


PICTURES = ColumnInfo(name=IMAGES, level="sequence", type="list<string>")
"""The extra column of images, as `padless.runtime.images` spells it; "" where a sequence has none."""


class Judged:
    """The sequence-level columns of one split; costs memory only where a sequence has a verdict."""

    def __init__(self) -> None:
        self.count = 0
        self.found: list[tuple[int, NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32]]] = []
        """(first sequence, records, verdicts, margins) of chunks in which there are verdicts."""

    def add(self, lines: NDArray[np.void], base: int) -> None:
        """The next chunk's sequences; `base` is the number of its first record."""
        if lines["verdict"].any():
            records = base + lines["record"].astype(np.int64)
            self.found.append((self.count, records, lines["verdict"].copy(), lines["margin"].copy()))
        self.count += len(lines)

    def columns(self) -> dict[str, NDArray[Any]]:
        """[sequences] each: those of VERDICTS that some sequence has a value of."""
        if not self.found:
            return {}
        columns = {name: without_value(name, self.count, kind) for name, kind in VERDICTS.items()}
        for start, record, verdict, margin in self.found:
            here = slice(start, start + len(record))
            paired = (verdict == CHOSEN) | (verdict == REJECTED)
            columns["pair_id"][here] = np.where(paired, record, -1)
            columns["is_chosen"][here] = np.where(paired, verdict == CHOSEN, -1)
            rated = (verdict == WANTED) | (verdict == UNWANTED)
            columns["label"][here] = np.where(rated, verdict == WANTED, -1)
            columns["margin"][here] = margin
        return {name: column for name, column in columns.items() if has_value(name, column)}


def without_value(name: str, count: int, kind: str) -> NDArray[Any]:
    """[count] of what says that there is no value."""
    return np.full(count, NONE_OF.get(name, -1), dtype=np.dtype(kind))


def has_value(name: str, column: NDArray[Any]) -> bool:
    """Whether any sequence has a value in a column of VERDICTS."""
    return bool((column != NONE_OF.get(name, -1)).any())


def extra_columns(splits: Sequence[SplitLines], *, weighted: bool) -> tuple[ColumnInfo, ...]:
    """The extra columns of a build, the same for all its splits; `weighted`: some record weighs its turns."""
    found = [WEIGHTS] if weighted else []
    found += splits[0].token_extras
    for name, kind in SEQUENCE_COLUMNS.items():
        if any(name in split.extras for split in splits):
            found.append(ColumnInfo(name=name, level="sequence", type=f"list<{kind}>"))
            for split in splits:
                split.extras.setdefault(name, without_value(name, len(split.lengths), kind))
    if any(split.is_pictured for split in splits):
        found.append(PICTURES)
    return tuple(found)


def group_column(names: Iterable[str]) -> str | None:
    """The one among columns whose sequences of one value share a pack."""
    return next((name for name in names if name in GROUPS), None)


def groups_of(extras: Mapping[str, NDArray[Any]], sequences: int) -> NDArray[np.int64] | None:
    """[sequences] a number for each, the same for those that must share a pack; None: none must."""
    name = group_column(extras)
    if name is None:
        return None
    column = extras[name].astype(np.int64)
    return np.where(column < 0, -1 - np.arange(sequences), column)
