"""Columns of rollouts on their way through a build: beside their tokens, by sequence with the first one.

While chunks are worked on a rollout has an entry of VALUES for each of its tokens, in the file that otherwise
has weights; NaN stands where a record gives nothing. The price is 20 bytes a token of disk, and no other
format pays it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.formats.examples import Rollout
from padless.packer.formats.rollout import BY_TOKEN
from padless.runtime.format import ColumnInfo

if TYPE_CHECKING:
    import pyarrow as pa

    from padless.packer.tables import SplitLines

VALUES = np.dtype([("old_logprobs", "<f4"), ("advantages", "<f4"), ("reward", "<f4"), ("group_id", "<i8")])


def values_of(
    rollouts: Mapping[int, Rollout],
    records: NDArray[np.int64],
    offsets: NDArray[np.int64],
    trained: NDArray[np.bool_],
) -> NDArray[np.void]:
    """[tokens] of VALUES: what the records give, a number of a whole answer at each trained token of it."""
    found = np.zeros(len(trained), dtype=VALUES)
    for record, rollout in rollouts.items():
        at = int(np.searchsorted(records, record))
        if at == len(records) or records[at] != record:  # its ids or its template were refused
            continue
        here = slice(offsets[at], offsets[at + 1])
        mine = found[here]
        for name in BY_TOKEN:
            value = rollout.values.get(name, np.nan)
            mine[name] = value
            if isinstance(value, float) and value == value:  # of the whole answer
                mine[name][~trained[here]] = 0
        mine["reward"] = np.nan if rollout.reward is None else rollout.reward
        mine["group_id"] = rollout.group
    return found


def enter(splits: Sequence[SplitLines], binary: pa.Array, values: pa.Array) -> None:
    """Give each split the rollouts' columns, from the first token of every sequence.

    `binary` and `values` are what `lay_elements` gives. Raises InputError where only some records give one.
    """
    offsets = np.frombuffer(binary.buffers()[1], dtype=np.int64)
    stored = np.frombuffer(values.buffers()[2], dtype=VALUES)
    firsts = [stored[offsets[split.elements] // 4] for split in splits]
    total = sum(map(len, firsts))
    given = {
        name: sum(int((~np.isnan(first[name])).sum()) for first in firsts) for name in (*BY_TOKEN, "reward")
    }
    for name, count in given.items():
        if 0 < count < total:
            raise InputError(
                f"{count:,} of {total:,} rollouts have {name}: give it for all of them or for none"
            )
    for split, first in zip(splits, firsts, strict=True):
        split.kind = VALUES
        split.token_extras = tuple(
            ColumnInfo(name=name, level="token", type="list<float32>") for name in BY_TOKEN if given[name]
        )
        if given["reward"]:
            split.extras["reward"] = np.ascontiguousarray(first["reward"])
        if any((one["group_id"] >= 0).any() for one in firsts):
            split.extras["group_id"] = np.ascontiguousarray(first["group_id"])
