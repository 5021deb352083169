"""Sequences of one group share a pack, under every strategy that cuts nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padless.packer.errors import InputError
from padless.packer.plan import check_plan
from padless.packer.strategies import CUTS, STRATEGIES

each_strategy = pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - CUTS))


@each_strategy
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(-3, 8)), max_size=40),
    st.none() | st.integers(0, 10),
    st.sampled_from([1, 4]),
    st.integers(0, 3),
)
def test_groups_stay_together_within_the_limits(
    name: str, sequences: list[tuple[int, int]], room: int | None, align: int, seed: int
) -> None:
    lengths, groups = [length for length, _ in sequences], [group for _, group in sequences]
    padded = {g: sum(-(-n // align) * align for n, h in sequences if h == g) for g in groups}
    max_length = -(-max([8, *padded.values()]) // align) * align
    cap = None if room is None else max([1, *(groups.count(g) for g in groups)]) + room
    plan = STRATEGIES[name](
        lengths, max_length, groups=groups, max_sequences_per_pack=cap, align=align, seed=seed
    )
    check_plan(plan, lengths, max_length, cap)
    packs_with: dict[int, set[int]] = {}
    for pack, (begin, end) in enumerate(itertools.pairwise(plan.offsets)):
        numbers = plan.order[begin:end].tolist()
        assert sum(-(-lengths[number] // align) * align for number in numbers) <= max_length
        # Side by side, members in the order in which they came.
        runs = [(key, list(run)) for key, run in itertools.groupby(numbers, lambda number: groups[number])]
        assert len(runs) == len({key for key, _ in runs})
        assert all(run == sorted(run) for _, run in runs)
        for key, _ in runs:
            packs_with.setdefault(key, set()).add(pack)
    assert all(len(packs) == 1 for packs in packs_with.values())


@each_strategy
def test_a_multiple_of_packs_splits_no_group(name: str) -> None:
    groups = np.repeat(np.arange(12), 2)
    plan = STRATEGIES[name]([3] * 24, 30, groups=groups, packs_multiple=4)
    assert len(plan) % 4 == 0
    assert all(size % 2 == 0 for size in np.diff(plan.offsets))
    assert (groups[plan.order[::2]] == groups[plan.order[1::2]]).all()


@each_strategy
@pytest.mark.parametrize(
    ("groups", "cap", "message"),
    [
        ([7, 7, 7], None, "max_length 8 .* group 7 has 12 tokens, a pack holds 8"),
        ([1, 5, 5], 1, "max_sequences_per_pack 1 .* group 5 has 2 sequences, a pack holds 1"),
        ([1, 2], None, "one integer for each of the 3 sequences"),
    ],
)
def test_a_group_that_fits_no_pack_is_refused(
    name: str, groups: list[int], cap: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        STRATEGIES[name]([4, 4, 4], 8, groups=groups, max_sequences_per_pack=cap)


@pytest.mark.parametrize("name", sorted(CUTS))
def test_a_strategy_that_cuts_takes_no_groups(name: str) -> None:
    with pytest.raises(InputError, match="groups cannot be kept together"):
        STRATEGIES[name]([4, 4], 8, groups=[0, 0])
