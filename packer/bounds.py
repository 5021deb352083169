"""What no plan of the same sequences can go below: for the manifest of a build, and for a plan's file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.plan import Integers, PackPlan, lower_bound
from padless.packer.strategies import CUTS
from padless.packer.strategies.constraints import padded_lengths
from padless.packer.strategies.groups import group
from padless.packer.strategies.pricing import linear_bound


def facts_of_buckets(
    plan: PackPlan,
    seq_lengths: Integers,
    *,
    max_length: int,
    cap: int | None,
    align: int,
    strategy: str,
    groups: NDArray[np.int64] | None,
) -> list[dict[str, Any]]:
    """Packs, sequences, tokens and bound of each length of packs, shortest first.

    `seq_lengths` [N] in tokens, `groups` [N] a number for those that share a pack. `bound_packs`: no plan
    of the same sequences at the same length has fewer packs.
    """
    found = []
    padded = padded_lengths(seq_lengths, align)
    for length, part in plan.by_bucket(max_length):
        # In which order is all the same, so where all packs have one length it is that of the numbers.
        order = part.order if plan.buckets is not None or part.lengths is not None else slice(None)
        mine = seq_lengths[order] if part.lengths is None else part.lengths
        needed = padded[order] if part.lengths is None else padded_lengths(part.lengths, align)
        bound = lower_bound(needed, length, cap)
        if strategy == "optimal" and len(part) > bound:  # a better bound takes a second
            bound = linear_bound(needed, length, cap)
        if groups is not None and strategy not in CUTS:  # what shares a pack is one item
            together = group(needed, groups[order], length, None)
            bound = max(bound, lower_bound(together.tokens, length))
        found.append(
            {
                "max_length": length,
                "packs": len(part),
                "sequences": len(mine),
                "tokens": int(mine.sum(dtype=np.int64)),
                "bound_packs": bound,
            }
        )
    return found
