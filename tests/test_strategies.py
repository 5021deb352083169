"""Every strategy packs each sequence once within the limits; bfd is the loop it stands for."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_packing import reference_bfd

from padless.packer.errors import InputError
from padless.packer.plan import PackPlan, check_plan, lower_bound, plan_hash
from padless.packer.strategies import STRATEGIES

each_strategy = pytest.mark.parametrize("name", STRATEGIES)

# Few different lengths or many, short packs or long ones: ties, exact fits and leftovers all occur.
inputs = st.integers(1, 40).flatmap(
    lambda longest: st.tuples(
        st.lists(st.integers(1, longest), max_size=60),
        st.integers(longest, 3 * longest),
        st.none() | st.integers(1, 6),
    )
)
Input = tuple[list[int], int, int | None]


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [list(map(int, plan.order[a:b])) for a, b in itertools.pairwise(plan.offsets)]


@each_strategy
@given(inputs, st.integers(0, 3))
def test_every_sequence_is_packed_once_within_the_limits(name: str, given_input: Input, seed: int) -> None:
    lengths, max_length, cap = given_input
    plan = STRATEGIES[name](lengths, max_length, max_sequences_per_pack=cap, seed=seed)
    check_plan(plan, lengths, max_length, cap)
    assert len(plan) >= lower_bound(lengths, max_length, cap)
    assert plan.order.dtype == np.int32 and plan.offsets.dtype == np.int64


@each_strategy
@given(inputs, st.integers(0, 3))
def test_the_same_input_gives_the_same_plan_from_any_integer_type(
    name: str, given_input: Input, seed: int
) -> None:
    lengths, max_length, cap = given_input
    hashes = {
        plan_hash(
            STRATEGIES[name](values, max_length, max_sequences_per_pack=cap, seed=seed),
            lengths,
            max_length,
        )
        for values in (
            lengths,
            np.array(lengths, np.uint16),
            np.array(lengths, np.int64),
            np.array(lengths, np.uint64),
        )
    }
    assert len(hashes) == 1


@each_strategy
def test_a_plan_leaves_the_lengths_as_they_were(name: str) -> None:
    lengths = np.array([2, 5, 3, 2, 3], np.int32)
    lengths.flags.writeable = False
    STRATEGIES[name](lengths, 8)
    assert lengths.tolist() == [2, 5, 3, 2, 3]


@each_strategy
@pytest.mark.parametrize(
    ("lengths", "max_length", "cap", "message"),
    [
        ([3, 9], 8, None, "sequence 1 has 9 tokens, a pack holds 8"),
        ([0, 3], 8, None, "sequence 0 has 0 tokens"),
        ([], 0, None, "max_length is 0"),
        ([], 8, 0, "max_sequences_per_pack is 0"),
    ],
)
def test_input_that_no_plan_can_hold_is_refused(
    name: str, lengths: list[int], max_length: int, cap: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        STRATEGIES[name](lengths, max_length, max_sequences_per_pack=cap)


@given(inputs)
def test_bfd_is_the_loop_over_single_sequences(given_input: Input) -> None:
    lengths, max_length, cap = given_input
    plan = STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap)
    assert packs_of(plan) == reference_bfd(lengths, max_length, cap)


@pytest.mark.parametrize("cap", [None, 3, 40])
def test_bfd_is_the_loop_on_thousands_of_sequences(cap: int | None) -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1, 3000).clip(1, 256).astype(int).tolist()
    plan = STRATEGIES["bfd"](lengths, 256, max_sequences_per_pack=cap)
    assert packs_of(plan) == reference_bfd(lengths, 256, cap)


def test_bfd_draws_the_picture_of_its_docstring() -> None:
    assert packs_of(STRATEGIES["bfd"]([5, 3, 3, 2, 2], 8)) == [[0, 1], [2, 3, 4]]


@given(inputs, st.integers(1, 9))
def test_the_size_of_a_block_does_not_change_a_plan(given_input: Input, block: int) -> None:
    lengths, max_length, cap = given_input
    expected = packs_of(STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap))
    with mock.patch.object(importlib.import_module("padless.packer.strategies.bfd"), "BLOCK", block):
        plan = STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap)
    assert packs_of(plan) == expected


@given(st.lists(st.sampled_from([1, 2**15, 2**16 - 1, 2**16, 2**16 + 1, 2**17, 2**33]), max_size=30))
def test_bfd_sorts_lengths_of_more_than_16_bits(lengths: list[int]) -> None:
    plan = STRATEGIES["bfd"](lengths, 2**33 + 2**17)
    assert packs_of(plan) == reference_bfd(lengths, 2**33 + 2**17)


@given(inputs)
def test_none_keeps_every_sequence_alone_and_in_order(given_input: Input) -> None:
    lengths, max_length, cap = given_input
    plan = STRATEGIES["none"](lengths, max_length, max_sequences_per_pack=cap)
    assert packs_of(plan) == [[i] for i in range(len(lengths))]


@pytest.mark.shared
def test_bfd_packs_alpaca_into_2123_rows_of_2048(shared: Path) -> None:
    table = pq.read_table(shared / "data/alpaca/token_lengths.parquet")
    table = table.filter(pc.equal(table["file"], "alpaca_data.json"))
    lengths = table["qwen3_chatml_total"].to_numpy()
    plan = STRATEGIES["bfd"](lengths, 2048)
    check_plan(plan, lengths, 2048)
    assert (len(plan), lower_bound(lengths, 2048)) == (2123, 2121)
