"""A plan is right, bounded, shuffled and hashed: what must hold whatever strategy made it."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padless.packer import plan as plan_module
from padless.packer.errors import InputError
from padless.packer.plan import PackPlan, check_plan, drawn_order, lower_bound, plan_hash, shuffle_packs

LENGTHS = [5, 3, 3, 2, 2]


def make(packs: list[list[int]], **parts: list[int]) -> PackPlan:
    sizes = [len(pack) for pack in packs]
    return PackPlan(
        np.array(list(itertools.chain(*packs)), np.int32),
        np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        **{name: np.array(values, np.int32) for name, values in parts.items()},
    )


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [list(map(int, plan.order[a:b])) for a, b in itertools.pairwise(plan.offsets)]


def fewest_packs(lengths: list[int], max_length: int, cap: int | None) -> int:
    """The optimum, by putting each sequence into every pack it fits, and into a new one."""

    def place(rest: list[int], rooms: list[tuple[int, int]]) -> int:
        if not rest:
            return len(rooms)
        options = []
        for i, (room, size) in enumerate(rooms):
            if room >= rest[0] and size != cap:
                used = (room - rest[0], size + 1)
                options.append(place(rest[1:], [*rooms[:i], used, *rooms[i + 1 :]]))
        options.append(place(rest[1:], [*rooms, (max_length - rest[0], 1)]))
        return min(options)

    return place(lengths, [])


def test_a_plan_knows_its_number_of_packs() -> None:
    assert len(make([[0, 1], [2, 3, 4]])) == 2
    assert len(make([])) == 0


def test_a_right_plan_passes() -> None:
    check_plan(make([[0, 1], [2, 3, 4]]), LENGTHS, 8, max_sequences_per_pack=3)
    check_plan(make([]), [], 8)


@pytest.mark.parametrize(
    ("packs", "why"),
    [
        ([[0, 1], [2, 3]], "not every sequence is there once"),
        ([[0, 1], [2, 3, 3]], "not every sequence is there once"),
        ([[0, 1], [2, 3, 4], [4]], "not every sequence is there once"),
        ([[0, 1], [2, 3, 5]], "does not exist"),
        ([[0, 1], [2, 3, -1]], "does not exist"),
        ([[0, 1], [], [2, 3, 4]], "a pack is empty"),
        ([[0, 1, 2], [3, 4]], "a pack holds 11 tokens of 8"),
        ([[0], [1, 2, 3], [4]], None),
        ([[0], [1], [2], [3, 4]], None),
        ([[1, 3, 4], [0, 2]], None),
    ],
)
def test_a_wrong_plan_is_told_apart_from_a_right_one(packs: list[list[int]], why: str | None) -> None:
    if why is None:
        check_plan(make(packs), LENGTHS, 8)
    else:
        with pytest.raises(AssertionError, match=why):
            check_plan(make(packs), LENGTHS, 8)


def test_a_pack_above_the_cap_is_found() -> None:
    with pytest.raises(AssertionError, match="a pack holds 3 sequences"):
        check_plan(make([[0, 1], [2, 3, 4]]), LENGTHS, 8, max_sequences_per_pack=2)


def test_offsets_that_leave_entries_out_are_found() -> None:
    plan = make([[0, 1], [2, 3, 4]])
    with pytest.raises(AssertionError, match="offsets miss entries"):
        check_plan(PackPlan(plan.order, plan.offsets[:-1]), LENGTHS, 8)


@pytest.mark.parametrize(
    ("starts", "lengths", "why"),
    [
        ([0, 4, 0, 8], [4, 4, 3, 2], None),
        ([0, 5, 0, 8], [4, 3, 3, 2], "gap or overlap"),
        ([0, 4, 0, 7], [4, 4, 3, 3], "gap or overlap"),
        ([0, 4, 0, 8], [4, 4, 3, 1], "does not end where it should"),
        ([1, 4, 0, 8], [3, 4, 3, 2], "misses its first tokens"),
        ([0, 4, 0, 8], [4, 4, 0, 2], "a part is empty"),
    ],
)
def test_the_parts_of_a_sequence_must_cover_it_once(
    starts: list[int], lengths: list[int], why: str | None
) -> None:
    # Sequence 0 has 10 tokens in three parts, sequence 1 has 3.
    plan = make([[0], [0, 1], [0]], starts=starts, lengths=lengths)
    if why is None:
        check_plan(plan, [10, 3], 7)
    else:
        with pytest.raises(AssertionError, match=why):
            check_plan(plan, [10, 3], 7)


def test_a_sequence_without_any_part_is_found() -> None:
    plan = make([[0], [2]], starts=[0, 0], lengths=[4, 2])
    with pytest.raises(AssertionError, match="a sequence is left out"):
        check_plan(plan, [4, 3, 2], 7)


@pytest.mark.parametrize(
    ("lengths", "max_length", "cap", "bound"),
    [
        ([], 8, None, 0),
        ([1], 8, None, 1),
        ([5, 3, 3, 2, 2], 8, None, 2),  # 15 tokens
        ([5, 5, 5], 8, None, 3),  # each longer than half a pack, though 15 tokens fit 2 packs
        ([6, 6, 3, 3], 8, None, 3),  # no 3 fits beside a 6
        ([4, 4, 4], 8, None, 2),  # half a pack is not longer than half
        ([1] * 10, 100, 4, 3),
        ([7, 1], 2**62, None, 1),
    ],
)
def test_the_bound_counts_tokens_long_sequences_and_the_cap(
    lengths: list[int], max_length: int, cap: int | None, bound: int
) -> None:
    assert lower_bound(lengths, max_length, cap) == bound


@given(
    st.lists(st.integers(1, 12), max_size=7),
    st.integers(12, 24),
    st.none() | st.integers(1, 4),
)
def test_no_plan_goes_below_the_bound(lengths: list[int], max_length: int, cap: int | None) -> None:
    bound = lower_bound(lengths, max_length, cap)
    assert -(-sum(lengths) // max_length) <= bound <= fewest_packs(lengths, max_length, cap)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(0, 5))
def test_the_bound_is_the_same_for_every_integer_type(lengths: list[int], more: int) -> None:
    bound = lower_bound(lengths, 1000 + more)
    for dtype in (np.uint16, np.int32, np.uint64):
        assert lower_bound(np.array(lengths, dtype), 1000 + more) == bound


def test_a_huge_sequence_costs_no_histogram_of_its_size() -> None:
    # 2**50 counters would be 8 PiB.
    assert lower_bound([2**50, 3, 3], 2**50 + 3) == 2


@pytest.mark.parametrize(
    ("lengths", "max_length", "cap", "message"),
    [
        ([3, 9, 4], 8, None, "sequence 1 has 9 tokens, a pack holds 8"),
        ([3, 4, 0], 8, None, "sequence 2 has 0 tokens"),
        ([3], 0, None, "max_length is 0"),
        ([3], 8, 0, "max_sequences_per_pack is 0"),
        ([3.0], 8, None, "type float64"),
        ([[3]], 8, None, r"shape \(1, 1\)"),
    ],
)
def test_wrong_input_is_named_with_its_limit(
    lengths: list[Any], max_length: int, cap: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        lower_bound(lengths, max_length, cap)


@st.composite
def plans(draw: st.DrawFn) -> PackPlan:
    sizes = draw(st.lists(st.integers(1, 5), max_size=12))
    numbers = iter(draw(st.permutations(range(sum(sizes)))))
    packs = [[next(numbers) for _ in range(size)] for size in sizes]
    if not draw(st.booleans()):
        return make(packs)
    # Parts that name their sequence, so a value at the wrong place shows.
    order = list(itertools.chain(*packs))
    return make(packs, starts=[100 + i for i in order], lengths=[200 + i for i in order])


@given(plans(), st.integers(0, 2**32), st.integers(1, 6))
def test_shuffling_keeps_every_pack_as_it_is(plan: PackPlan, seed: int, block: int) -> None:
    with mock.patch.object(plan_module, "BLOCK", block):
        shuffled = shuffle_packs(plan, seed)
    assert sorted(packs_of(shuffled)) == sorted(packs_of(plan))
    assert shuffled.order.dtype == plan.order.dtype
    if plan.starts is None:
        assert shuffled.starts is None and shuffled.lengths is None
    else:
        assert shuffled.starts is not None and shuffled.lengths is not None
        assert shuffled.starts.tolist() == [100 + i for i in shuffled.order]
        assert shuffled.lengths.tolist() == [200 + i for i in shuffled.order]


def test_a_seed_always_gives_the_same_order_of_packs() -> None:
    # Written down, so that a change of numpy or of ours that moves packs shows.
    plan = make([[i] for i in range(8)])
    assert shuffle_packs(plan, 0).order.tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert shuffle_packs(plan, 1).order.tolist() == [2, 4, 7, 5, 0, 6, 3, 1]


@pytest.mark.parametrize("packs", [0, 1, 2, 1000, 20_000, 300_000])
def test_the_order_of_packs_is_that_of_their_drawn_ranks(packs: int) -> None:
    # Of 300,000 ranks of 64 bits about five thousand share their upper 24 with another.
    ranks = np.random.PCG64(5).random_raw(packs)
    assert np.array_equal(drawn_order(packs, 5), np.argsort(ranks, kind="stable"))


@given(plans(), st.integers(1, 6))
def test_a_hash_depends_neither_on_types_nor_on_blocks(plan: PackPlan, block: int) -> None:
    lengths = np.arange(1, len(plan.order) + 1)
    wide = PackPlan(
        plan.order.astype(np.int64),
        plan.offsets,
        None if plan.starts is None else plan.starts.astype(np.int64),
        None if plan.lengths is None else plan.lengths.astype(np.uint32),
    )
    expected = plan_hash(plan, lengths, 8)
    with mock.patch.object(plan_module, "BLOCK", block):
        assert plan_hash(wide, lengths.astype(np.uint16), 8) == expected


def test_a_hash_takes_whole_sequences_spelled_out_for_whole_sequences() -> None:
    plan = make([[0, 1], [2, 3, 4]])
    spelled = make([[0, 1], [2, 3, 4]], starts=[0] * 5, lengths=LENGTHS)
    assert plan_hash(plan, LENGTHS, 8) == plan_hash(spelled, LENGTHS, 8)


def test_a_hash_changes_with_everything_that_changes_the_packs() -> None:
    plan = make([[0, 1], [2, 3, 4]])
    hashes = [
        plan_hash(plan, LENGTHS, 8),
        plan_hash(plan, LENGTHS, 9),
        plan_hash(plan, [5, 3, 3, 2, 1], 8),
        plan_hash(make([[1, 0], [2, 3, 4]]), LENGTHS, 8),
        plan_hash(make([[2, 3, 4], [0, 1]]), LENGTHS, 8),
        plan_hash(make([[0, 1], [2, 3], [4]]), LENGTHS, 8),
        plan_hash(make([[0, 1], [2, 3, 4]], starts=[1] * 5, lengths=LENGTHS), LENGTHS, 8),
        plan_hash(make([]), [], 8),
    ]
    assert len(set(hashes)) == len(hashes)


def test_a_hash_is_the_same_for_ever() -> None:
    # It is the fingerprint in state.json, so this value may change only with the recipe's number.
    plan = make([[0, 1], [2, 3, 4]])
    assert plan_hash(plan, LENGTHS, 8) == "xxh3:9106708431ed45fef0ae0bd4afeb7d13"
