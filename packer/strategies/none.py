"""One sequence a pack, in order: padding-free training without packing.

A batch of B packs then holds what an unpacked batch of B rows would hold, so its loss can be
compared; the trade-off is a fill of mean length over `max_length`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from padless.packer.plan import PackPlan, as_lengths, index_type, shuffle_packs


def none(
    seq_lengths: ArrayLike,
    max_length: int,
    *,
    max_sequences_per_pack: int | None = None,
    seed: int = 0,
    shuffle: bool = False,
) -> PackPlan:
    """Plan a pack for every sequence; no cap is below one; `shuffle` draws their order from `seed`.

    `seq_lengths` [N] in tokens, `max_length` the tokens of a pack. Raises InputError for a
    sequence that fits no pack, an empty one, or a limit below 1.
    """
    count = len(as_lengths(seq_lengths, max_length, max_sequences_per_pack))
    plan = PackPlan(np.arange(count, dtype=index_type(count)), np.arange(count + 1, dtype=np.int64))
    return shuffle_packs(plan, seed) if shuffle else plan
