"""Packs that hold sequences of one source: a plan for each source, one after the other.

Every source but the first costs up to one pack that is not full; a multiple of packs (`--packs-multiple`) is
kept within each source, and so over all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.plan import PackPlan, in_a_row

Planning = Callable[[NDArray[Any], NDArray[np.int64] | None], PackPlan]
"""Lengths, and which of the sequences share a pack, to a plan."""


def plan_by_source(
    planning: Planning,
    lengths: NDArray[Any],
    groups: NDArray[np.int64] | None,
    sources: NDArray[np.int32],
) -> PackPlan:
    """Plan each source's sequences apart; all [sequences], `sources` any number for each."""
    plans: list[PackPlan] = []
    for source in np.unique(sources):
        numbers = np.flatnonzero(sources == source)
        plan = planning(lengths[numbers], None if groups is None else groups[numbers])
        plans.append(replace(plan, order=numbers[plan.order]))
    if plans[0].buckets is None:
        return in_a_row(plans)
    # By length first, then by source.
    of_lengths = [*zip(*(plan.by_bucket(0) for plan in plans), strict=True)]
    buckets = tuple((parts[0][0], sum(len(part) for _, part in parts)) for parts in of_lengths)
    return replace(in_a_row([part for parts in of_lengths for _, part in parts]), buckets=buckets)
