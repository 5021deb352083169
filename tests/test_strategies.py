"""Every strategy packs each sequence once within the limits; fast ones are the loop they stand for."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference_packing import reference_bfd, reference_ffd, reference_wrapped

from padless.packer.errors import InputError
from padless.packer.plan import PackPlan, check_plan, lower_bound, plan_hash, shuffle_packs
from padless.packer.strategies import CUTS, STRATEGIES
from padless.packer.strategies.closing import Stock

each_strategy = pytest.mark.parametrize("name", STRATEGIES)
each_that_cuts_nothing = pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in CUTS])

Loop = Callable[[list[int], int, int | None], list[list[int]]]
decreasing = pytest.mark.parametrize(("name", "loop"), [("bfd", reference_bfd), ("ffd", reference_ffd)])

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
    if name in CUTS:
        bound = max(-(-sum(lengths) // max_length), -(-len(lengths) // cap) if cap else 0)
    else:
        bound = lower_bound(lengths, max_length, cap)
    assert len(plan) >= bound
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


@each_that_cuts_nothing
def test_a_sequence_longer_than_a_pack_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="sequence 1 has 9 tokens, a pack holds 8"):
        STRATEGIES[name]([3, 9], 8)


@each_strategy
@pytest.mark.parametrize(
    ("lengths", "max_length", "cap", "message"),
    [
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


@decreasing
@given(inputs)
def test_a_decreasing_order_is_the_loop_over_single_sequences(
    name: str, loop: Loop, given_input: Input
) -> None:
    lengths, max_length, cap = given_input
    plan = STRATEGIES[name](lengths, max_length, max_sequences_per_pack=cap)
    assert packs_of(plan) == loop(lengths, max_length, cap)


@decreasing
@pytest.mark.parametrize("cap", [None, 3, 40])
def test_a_decreasing_order_is_the_loop_on_thousands_of_sequences(
    name: str, loop: Loop, cap: int | None
) -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1, 3000).clip(1, 256).astype(int).tolist()
    plan = STRATEGIES[name](lengths, 256, max_sequences_per_pack=cap)
    assert packs_of(plan) == loop(lengths, 256, cap)


def test_strategies_draw_the_pictures_of_their_docstrings() -> None:
    assert packs_of(STRATEGIES["bfd"]([5, 3, 3, 2, 2], 8)) == [[0, 1], [2, 3, 4]]
    assert packs_of(STRATEGIES["ffd"]([5, 4, 3, 3], 8)) == [[0, 2], [1, 3]]
    assert packs_of(STRATEGIES["ordered"]([5, 4, 3, 2, 2], 8, plan_window=4)) == [[0, 2], [1, 3, 4]]
    assert packs_of(STRATEGIES["ordered"]([5, 4, 3, 2, 2], 8, plan_window=2)) == [[0], [1, 2], [3, 4]]


@given(inputs, st.integers(1, 9))
def test_the_size_of_a_block_does_not_change_a_plan(given_input: Input, block: int) -> None:
    lengths, max_length, cap = given_input
    expected = packs_of(STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap))
    with mock.patch.object(importlib.import_module("padless.packer.strategies.counting"), "BLOCK", block):
        plan = STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap)
    assert packs_of(plan) == expected


@given(st.lists(st.sampled_from([1, 2**15, 2**16 - 1, 2**16, 2**16 + 1, 2**17, 2**33]), max_size=30))
def test_bfd_sorts_lengths_of_more_than_16_bits(lengths: list[int]) -> None:
    plan = STRATEGIES["bfd"](lengths, 2**33 + 2**17)
    assert packs_of(plan) == reference_bfd(lengths, 2**33 + 2**17)


@given(
    st.lists(st.integers(1, 60), max_size=40),
    st.integers(1, 20),
    st.none() | st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 50),
)
def test_wrapped_is_the_loop_that_cuts_where_a_pack_ends(
    lengths: list[int], max_length: int, cap: int | None, window: int, block: int
) -> None:
    with mock.patch.object(importlib.import_module("padless.packer.strategies.wrapped"), "BLOCK", block):
        plan = STRATEGIES["wrapped"](lengths, max_length, max_sequences_per_pack=cap, plan_window=window)
    check_plan(plan, lengths, max_length, cap)
    assert plan.starts is not None and plan.lengths is not None
    entries = list(zip(plan.order.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    packs = [entries[a:b] for a, b in itertools.pairwise(plan.offsets)]
    assert packs == reference_wrapped(lengths, max_length, min(cap or window, window))


@given(inputs)
def test_none_keeps_every_sequence_alone_and_in_order(given_input: Input) -> None:
    lengths, max_length, cap = given_input
    plan = STRATEGIES["none"](lengths, max_length, max_sequences_per_pack=cap)
    assert packs_of(plan) == [[i] for i in range(len(lengths))]


@given(inputs, st.integers(1, 20))
def test_ordered_keeps_the_input_order_within_its_window(given_input: Input, window: int) -> None:
    lengths, max_length, cap = given_input
    packs = packs_of(
        STRATEGIES["ordered"](lengths, max_length, max_sequences_per_pack=cap, plan_window=window)
    )
    firsts = [pack[0] for pack in packs]
    assert firsts == sorted(firsts)
    assert all(pack == sorted(pack) and pack[-1] - pack[0] < window for pack in packs)
    # No pack leaves out a sequence of its window that would have fitted.
    at = {number: place for place, pack in enumerate(packs) for number in pack}
    for place, pack in enumerate(packs):
        room = max_length - sum(lengths[number] for number in pack)
        later = [n for n in range(pack[0], min(pack[0] + window, len(lengths))) if at[n] > place]
        assert len(pack) == cap or all(lengths[number] > room for number in later)


@given(inputs)
def test_ordered_puts_the_next_ones_into_the_next_pack_where_they_fit(given_input: Input) -> None:
    _, max_length, cap = given_input
    plan = STRATEGIES["ordered"]([1] * 50, max_length, max_sequences_per_pack=cap)
    assert plan.order.tolist() == list(range(50))


@each_strategy
@given(
    inputs,
    st.sampled_from([1, 2, 5]),
    st.integers(1, 4),
    st.none() | st.integers(1, 30),
)
def test_all_constraints_hold_at_once(
    name: str, given_input: Input, align: int, multiple: int, window: int | None
) -> None:
    lengths, max_length, cap = given_input
    max_length = -(-max_length // align) * align
    constraints = {"align": align, "packs_multiple": multiple, "plan_window": window}
    try:
        plan = STRATEGIES[name](lengths, max_length, max_sequences_per_pack=cap, **constraints)
    except InputError as error:
        alone = STRATEGIES[name](
            lengths, max_length, max_sequences_per_pack=cap, align=align, plan_window=window
        )
        assert "packs_multiple" in str(error) and -(-len(alone) // multiple) * multiple > len(alone.order)
        return
    check_plan(plan, lengths, max_length, cap)
    taken = np.asarray(lengths)[plan.order] if plan.lengths is None else plan.lengths
    padded = -(-taken.astype(np.int64) // align) * align
    assert not len(plan) or np.add.reduceat(padded, plan.offsets[:-1]).max() <= max_length
    assert len(plan) % multiple == 0
    if window is not None:
        assert all(max(pack) - min(pack) < window for pack in packs_of(plan))


@each_strategy
@given(
    inputs,
    st.integers(0, 3),
    st.sampled_from([{}, {"plan_window": 7}, {"packs_multiple": 3}, {"align": 5}, {"groups": True}]),
)
def test_packs_laid_out_in_drawn_order_are_the_shuffled_packs(
    name: str, given_input: Input, seed: int, constraints: dict[str, Any]
) -> None:
    lengths, max_length, cap = given_input
    if "groups" in constraints:
        assume(name not in CUTS)
        constraints = {"groups": list(range(len(lengths)))}
    plan_by = partial(
        STRATEGIES[name],
        lengths,
        -(-max_length // 5) * 5,
        max_sequences_per_pack=cap,
        seed=seed,
        **constraints,
    )
    try:
        expected = shuffle_packs(plan_by(), seed)
    except InputError:
        assume(False)
    plan = plan_by(shuffle=True)
    assert packs_of(plan) == packs_of(expected)
    if expected.starts is not None and expected.lengths is not None:
        assert plan.starts is not None and plan.starts.tolist() == expected.starts.tolist()
        assert plan.lengths is not None and plan.lengths.tolist() == expected.lengths.tolist()


# Several sequences a pack, so that there is something to split.
roomy_inputs = st.integers(1, 40).flatmap(
    lambda longest: st.tuples(
        st.lists(st.integers(1, longest), min_size=20, max_size=60),
        st.integers(3 * longest, 6 * longest),
        st.none() | st.integers(3, 6),
    )
)


@given(roomy_inputs, st.integers(2, 5))
def test_a_multiple_of_packs_splits_no_more_than_needed(given_input: Input, multiple: int) -> None:
    lengths, max_length, cap = given_input
    plan = STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap)
    assume(len(plan) + multiple <= len(lengths))
    wider = STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap, packs_multiple=multiple)
    assert 0 <= len(wider) - len(plan) < multiple
    assert set(plan.offsets.tolist()) <= set(wider.offsets.tolist())
    assert wider.order.tolist() == plan.order.tolist()


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"align": 16}, "align 16 is larger than max_length 8"),
        ({"align": 3}, "max_length 8 is no multiple of align 3.*give max_length 6"),
        ({"align": 0}, "align must be at least 1, got 0"),
        ({"packs_multiple": -1}, "packs_multiple must be at least 1, got -1"),
        ({"plan_window": 0}, "plan_window must be at least 1, got 0"),
        ({"packs_multiple": 7}, "5 sequences cannot make 7 packs"),
    ],
)
@each_strategy
def test_constraints_that_no_plan_can_hold_are_refused(
    name: str, constraints: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        STRATEGIES[name]([5, 3, 3, 2, 2], 8, **constraints)


# Long enough for closings, and for packs that are planned once and made several times.
lognormal = np.random.default_rng(0).lognormal(3, 0.8, 6000).clip(1, 400).astype(np.int32)


@pytest.mark.parametrize("cap", [None, 30])
def test_spread_reaches_the_bound_with_packs_that_look_alike(cap: int | None) -> None:
    plan = STRATEGIES["spread"](lognormal, 512, max_sequences_per_pack=cap)
    check_plan(plan, lognormal, 512, cap)
    assert len(plan) == lower_bound(lognormal, 512, cap)
    sizes, mean = np.diff(plan.offsets), len(lognormal) / len(plan)
    assert 0.4 * mean < np.quantile(sizes, 0.02) < np.quantile(sizes, 0.98) < 1.6 * mean
    assert np.diff(STRATEGIES["bfd"](lognormal, 512).offsets).max() > 3 * mean
    # Whether a pack is made early or late, it has its share of the long sequences.
    long = np.add.reduceat((lognormal[plan.order] > 60).astype(int), plan.offsets[:-1])
    thirds = [part.mean() for part in np.array_split(long, 3)]
    assert max(thirds) < 1.35 * min(thirds)


@pytest.mark.parametrize("base", [1, 100, 1000])
@pytest.mark.parametrize("cap", [None, 30])
def test_packs_made_several_times_are_nearly_as_full(cap: int | None, base: int) -> None:
    with mock.patch.object(importlib.import_module("padless.packer.strategies.spread"), "BASE", base):
        plan = STRATEGIES["spread"](lognormal, 512, max_sequences_per_pack=cap)
    check_plan(plan, lognormal, 512, cap)
    assert len(plan) <= lower_bound(lognormal, 512, cap) + 2


def test_spread_draws_another_plan_for_another_seed() -> None:
    first, again, other = (packs_of(STRATEGIES["spread"](lognormal, 512, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert len({frozenset(pack) for pack in first} & {frozenset(pack) for pack in other}) < 0.01 * len(first)


def test_spread_mixes_sequences_from_all_over_the_input() -> None:
    plan = STRATEGIES["spread"](lognormal, 512)
    middle = np.add.reduceat(plan.order.astype(np.int64), plan.offsets[:-1]) / np.diff(plan.offsets)
    # Neighbours would give means from 0 to N; a fair draw keeps each near the middle.
    assert (
        0.25 * len(lognormal) < np.percentile(middle, 5) < np.percentile(middle, 95) < 0.75 * len(lognormal)
    )


@pytest.mark.parametrize("most", [1 << 16, 100])
def test_sequences_of_one_length_are_taken_in_the_order_of_their_draws(most: int) -> None:
    lengths = np.where(np.arange(9000) % 3 == 0, 7, 1 + np.arange(9000) % 40)
    with ExitStack() as patched:
        for module, name in (
            ("plan", "BLOCK"),
            ("strategies.counting", "BLOCK"),
            ("strategies.counting", "_SORTED"),
        ):
            within = importlib.import_module(f"padless.packer.{module}")
            patched.enter_context(mock.patch.object(within, name, most))
        plan = STRATEGIES["spread"](lengths, 64, seed=2)
    check_plan(plan, lengths, 64)
    drawn = np.random.PCG64(2).random_raw(9000 // 4 + 1).view("<u2")
    for length in range(1, 41):
        of_length = plan.order[lengths[plan.order] == length]
        assert np.array_equal(of_length, of_length[np.lexsort((of_length, drawn[of_length]))])


def test_a_seed_always_gives_the_same_spread_plan() -> None:
    # Written down, so that a change of numpy or of ours that moves sequences shows.
    plan = STRATEGIES["spread"]([5, 3, 3, 2, 2, 7, 1, 4, 4, 1], 8, seed=3)
    assert packs_of(plan) == [[5, 9], [0, 2], [7, 8], [6, 3, 4, 1]]


@given(inputs, st.integers(0, 3))
def test_spread_needs_at_most_one_pack_in_a_thousand_more_than_bfd(given_input: Input, seed: int) -> None:
    lengths, max_length, cap = given_input
    bfd = STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap)
    plan = STRATEGIES["spread"](lengths, max_length, max_sequences_per_pack=cap, seed=seed)
    assert len(plan) <= 1.001 * len(bfd)


@given(inputs, st.integers(0, 3))
def test_optimal_needs_no_more_packs_than_the_others(given_input: Input, seed: int) -> None:
    lengths, max_length, cap = given_input
    packs = {
        name: len(STRATEGIES[name](lengths, max_length, max_sequences_per_pack=cap, seed=seed))
        for name in ("optimal", "bfd", "spread")
    }
    assert packs["optimal"] == min(packs.values())


def test_optimal_fills_what_decreasing_orders_leave_open() -> None:
    lengths = [6, 5, 5, 4, 4, 3, 3] * 100  # bfd pairs 6 with 4 and is left with 5 3 3 beside 5 5
    assert len(STRATEGIES["optimal"](lengths, 10)) == lower_bound(lengths, 10) == 300


@pytest.mark.parametrize(("least", "most", "each"), [(205, 250, 4), (257, 330, 3), (345, 500, 2)])
def test_the_bound_sees_how_many_sequences_a_pack_can_hold(least: int, most: int, each: int) -> None:
    lengths = np.random.default_rng(0).integers(least, most, 12_000)
    assert lower_bound(lengths, 1024) == 12_000 // each == len(STRATEGIES["optimal"](lengths, 1024))


@given(
    st.dictionaries(st.integers(1, 30), st.integers(1, 3), min_size=1), st.integers(1, 60), st.integers(1, 5)
)
def test_a_closing_fills_the_room_exactly_and_is_found_where_there_is_one(
    counts: dict[int, int], room: int, slots: int
) -> None:
    stock = Stock(counts.items())
    found = stock.close(room, slots, longest=30, budget=10**6)
    everything = [length for length, count in counts.items() for _ in range(count)]
    sums = {0: 0}  # tokens -> fewest sequences that have them
    for length in everything:
        for tokens, used in list(sums.items()):
            sums[tokens + length] = min(used + 1, sums.get(tokens + length, used + 1))
    assert bool(found) == (sums.get(room, slots + 1) <= slots)
    if found:
        assert sum(found) == room and len(found) <= slots
        assert all(found.count(length) <= counts[length] for length in found)
    assert stock.left == counts


def test_searching_stops_where_nothing_is_ever_found() -> None:
    stock = Stock((2 * length, 5) for length in range(1, 200))
    for _ in range(1000):
        assert stock.close(201, 6, longest=201, budget=10**6) == []
    assert stock.effort == 0
    assert stock.close(200, 6, longest=200, budget=10**6) == [200]


real_lengths = pytest.mark.parametrize(
    ("file", "column"),
    [
        (file, column)
        for file in ("alpaca_data.json", "alpaca_cleaned_first5000.json")
        for column in ("qwen3_chatml_total", "qwen3_chat_total")
    ],
)


@pytest.mark.shared
@real_lengths
@pytest.mark.parametrize("max_length", [1024, 2048, 4096, 8192])
def test_real_lengths_are_packed_to_the_bound(shared: Path, file: str, column: str, max_length: int) -> None:
    table = pq.read_table(shared / "data/alpaca/token_lengths.parquet")
    lengths = table.filter(pc.equal(table["file"], file))[column].to_numpy()
    lengths = lengths[lengths <= max_length]
    for cap in (None, 64):
        bound = lower_bound(lengths, max_length, cap)
        for name in ("spread", "optimal"):
            plan = STRATEGIES[name](lengths, max_length, max_sequences_per_pack=cap)
            check_plan(plan, lengths, max_length, cap)
            assert len(plan) == bound, (name, cap)
    assert len(STRATEGIES["bfd"](lengths, max_length)) <= 1.003 * lower_bound(lengths, max_length)


@pytest.mark.shared
def test_bfd_packs_alpaca_into_2123_rows_of_2048(shared: Path) -> None:
    table = pq.read_table(shared / "data/alpaca/token_lengths.parquet")
    table = table.filter(pc.equal(table["file"], "alpaca_data.json"))
    lengths = table["qwen3_chatml_total"].to_numpy()
    plan = STRATEGIES["bfd"](lengths, 2048)
    check_plan(plan, lengths, 2048)
    assert (len(plan), lower_bound(lengths, 2048)) == (2123, 2121)
