"""Faults that users of other packers reported, of the kinds planner and order: none of them here.

The numbers are those of the collection of faults that the cases were written from.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from padless.packer.plan import PackPlan, check_plan, plan_hash
from padless.packer.strategies import CUTS, STRATEGIES

FULL = ("bfd", "ffd", "optimal", "spread", "ordered", "wrapped")


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [plan.order[a:b].tolist() for a, b in itertools.pairwise(plan.offsets)]


@pytest.mark.parametrize("name", ["bfd", "ffd", "ordered", "wrapped"])
def test_three_billion_tokens_give_no_negative_number(name: str) -> None:
    """BR-107."""
    lengths = np.full(3_000_000, 1000, np.int32)
    plan = STRATEGIES[name](lengths, 4096)
    check_plan(plan, lengths, 4096)
    assert len(plan) == (-(-3_000_000_000 // 4096) if name in CUTS else 750_000)


def test_a_seed_changes_who_shares_a_pack_and_not_just_the_order_of_packs() -> None:
    """BR-144."""
    first, other = (packs_of(STRATEGIES["spread"]([3] * 8, 7, seed=seed)) for seed in (0, 1))
    assert {frozenset(pack) for pack in first} != {frozenset(pack) for pack in other}
    same, too = (packs_of(STRATEGIES["ordered"]([3] * 8, 7, seed=seed)) for seed in (0, 1))
    assert same == too


def test_an_intended_order_is_kept() -> None:
    """BR-145."""
    assert packs_of(STRATEGIES["ordered"]([5, 1, 4, 2, 3], 6)) == [[0, 1], [2, 3], [4]]


def test_another_epoch_can_have_other_neighbours() -> None:
    """BR-146."""
    lengths = np.random.default_rng(0).integers(1, 60, 100)
    plans = [STRATEGIES["spread"](lengths, 128, seed=seed) for seed in (0, 1, 1)]
    for plan in plans:
        check_plan(plan, lengths, 128)
    hashes = [plan_hash(plan, lengths, 128) for plan in plans]
    assert hashes[0] != hashes[1] == hashes[2]


@pytest.mark.parametrize("name", FULL)
def test_one_short_pack_at_most_for_rows_of_one_length(name: str) -> None:
    """BR-150: no remainder a worker, since a plan is made once for all."""
    lengths = np.full(8008, 10)
    plan = STRATEGIES[name](lengths, 100)
    check_plan(plan, lengths, 100)
    sizes = np.diff(plan.offsets)
    assert (len(plan), int((sizes < 10).sum())) == (801, 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_data_smaller_than_a_pack_are_one_pack(name: str) -> None:
    """BR-151."""
    assert packs_of(STRATEGIES[name]([3], 2048)) == [[0]]


@pytest.mark.parametrize("name", ["bfd", "ffd", "spread", "optimal", "wrapped"])
def test_a_million_lengths_are_packed_within_a_hundredth_of_their_tokens(name: str) -> None:
    """BR-152."""
    drawn = np.random.default_rng(0).lognormal(np.log(350) - 0.5, 1, 1_000_000)
    lengths = np.clip(drawn, 1, 4096).astype(np.int32)
    plan = STRATEGIES[name](lengths, 4096)
    check_plan(plan, lengths, 4096)
    assert len(plan) <= 1.01 * -(-int(lengths.sum(dtype=np.int64)) // 4096)
