"""Packs that hold sequences of one source: a plan for each source, one after the other.

Every source but the first costs up to one pack that is not full; a multiple of packs (`--packs-multiple`) is
kept within each source, and so over all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.plan import PackPlan

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
    mine: list[NDArray[np.int64]] = []
    for source in np.unique(sources):
        numbers = np.flatnonzero(sources == source)
        plans.append(planning(lengths[numbers], None if groups is None else groups[numbers]))
        mine.append(numbers)
    sizes = np.concatenate([np.diff(plan.offsets) for plan in plans])
    orders = [numbers[plan.order] for numbers, plan in zip(mine, plans, strict=True)]
    cut = [(plan.starts, plan.lengths) for plan in plans if plan.starts is not None]
    return PackPlan(
        np.concatenate(orders).astype(plans[0].order.dtype if len(plans) == 1 else np.int64),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        np.concatenate([starts for starts, _ in cut]) if cut else None,
        np.concatenate([taken for _, taken in cut]) if cut else None,
    )
