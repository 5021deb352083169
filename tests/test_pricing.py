"""Prices of lengths: a bound that no plan beats, as high as the linear program allows, and plans near it."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from building import built, write_lines
from hypothesis import given
from hypothesis import strategies as st
from toys import word_tokenizer

from padless.packer.errors import InputError
from padless.packer.plan import check_plan, length_counts, lower_bound
from padless.packer.strategies import STRATEGIES
from padless.packer.strategies import pricing as pricing_module
from padless.packer.strategies.pricing import find_prices, linear_bound


def fewest_packs(lengths: list[int], max_length: int, cap: int | None) -> int:
    """The optimum: the first number of packs into which everything goes, trying every pack for each."""
    ordered = sorted(lengths, reverse=True)

    def fits(rest: list[int], rooms: tuple[tuple[int, int], ...]) -> bool:
        if not rest:
            return True
        tried = set()
        for place, (room, size) in enumerate(rooms):
            if room >= rest[0] and size != cap and (room, size) not in tried:
                tried.add((room, size))
                after = (*rooms[:place], (room - rest[0], size + 1), *rooms[place + 1 :])
                if fits(rest[1:], after):
                    return True
        return False

    return next(n for n in itertools.count() if fits(ordered, ((max_length, 0),) * n))


def patterns_of(kinds: list[int], max_length: int, slots: int) -> list[tuple[int, ...]]:
    """Everything that a pack can hold."""
    found = [
        held
        for size in range(1, slots + 1)
        for held in itertools.combinations_with_replacement(kinds, size)
        if sum(held) <= max_length
    ]
    return found


few_lengths = st.lists(st.integers(3, 12), min_size=1, max_size=9)


@given(few_lengths, st.integers(12, 26), st.none() | st.integers(1, 4))
def test_the_bound_lies_between_the_simple_one_and_the_optimum(
    lengths: list[int], max_length: int, cap: int | None
) -> None:
    bound = linear_bound(lengths, max_length, cap)
    assert lower_bound(lengths, max_length, cap) <= bound <= fewest_packs(lengths, max_length, cap)


@given(few_lengths, st.integers(12, 26), st.none() | st.integers(1, 4))
def test_no_pack_is_worth_more_than_the_best_one(
    lengths: list[int], max_length: int, cap: int | None
) -> None:
    kinds, counts = length_counts(np.array(lengths))
    prices = find_prices(kinds, counts, max_length, cap)
    assert prices is not None
    each = dict(zip(kinds.tolist(), prices.each.tolist(), strict=True))
    slots = min(max_length // min(lengths), cap or max_length)
    worth = [sum(each[length] for length in held) for held in patterns_of(list(each), max_length, slots)]
    assert max(worth) == prices.best[-1][max_length]
    total = sum(each[length] * count for length, count in Counter(lengths).items())
    assert prices.bound == -(-total // max(worth))


@pytest.mark.parametrize(
    ("counts", "max_length", "bound"),
    [
        ({5: 100, 4: 100}, 10, 100),  # 5 5 or 4 4 or 5 4: 90 packs of tokens
        ({6: 9}, 16, 5),
        # 433 by two, 412 by two or with 301 301: prices 1/2, 1/2, 1/4
        ({301: 2000, 412: 2000, 433: 2000}, 1024, 2500),
    ],
)
def test_the_bound_is_that_of_the_linear_program(counts: dict[int, int], max_length: int, bound: int) -> None:
    lengths = np.repeat(list(counts), list(counts.values()))
    assert linear_bound(lengths, max_length) == bound


def test_lengths_of_a_quarter_to_a_half_of_a_pack_go_by_threes_and_by_pairs() -> None:
    # Triples are full, of the shorter two thirds; the others go in pairs: 2/9 and 1/6 of all sequences.
    lengths = np.repeat(np.arange(257, 513), 40)
    assert lower_bound(lengths, 1024) == 3845
    assert linear_bound(lengths, 1024) == pytest.approx(len(lengths) * (2 / 9 + 1 / 6), rel=2e-3)
    plan = STRATEGIES["optimal"](lengths, 1024)
    check_plan(plan, lengths, 1024)
    assert len(plan) <= 1.002 * linear_bound(lengths, 1024)
    assert len(STRATEGIES["bfd"](lengths, 1024)) > 1.03 * linear_bound(lengths, 1024)


@pytest.mark.parametrize(("max_length", "seed"), [(1024, 0), (1536, 1)])
def test_lengths_that_all_differ_come_within_one_pack_in_ten_thousand_of_the_bound(
    max_length: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(max_length // 4 + 1, max_length // 2, 30_000)
    plan = STRATEGIES["optimal"](lengths, max_length)
    check_plan(plan, lengths, max_length)
    assert len(plan) <= linear_bound(lengths, max_length) * 1.0001


def test_a_build_with_optimal_reports_the_bound_of_the_linear_program(tmp_path: Path) -> None:
    lengths = [26 + n % 25 for n in range(200)]  # of 100: three of the shortest, or two
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "rows.jsonl", [{"input_ids": [11] * length} for length in lengths])
    options = ("--tokenizer", tokenizer, "--max-length", 100)
    bounds = {
        strategy: built(source, tmp_path / strategy, *options, "--strategy", strategy)["bound_packs"]
        for strategy in ("bfd", "optimal")
    }
    assert bounds == {"bfd": lower_bound(lengths, 100), "optimal": linear_bound(lengths, 100)}
    assert bounds["bfd"] < bounds["optimal"]


def test_what_would_take_too_long_has_the_simple_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [6, 6, 5, 5, 5]
    monkeypatch.setattr(pricing_module, "WORK", 10)
    assert find_prices(*length_counts(np.array(lengths)), 16, None) is None
    assert linear_bound(lengths, 16) == lower_bound(lengths, 16)


def test_nothing_has_the_bound_of_nothing_and_bad_lengths_are_refused() -> None:
    assert linear_bound([], 8) == 0
    with pytest.raises(InputError, match="sequence 1 has 9 tokens"):
        linear_bound([3, 9], 8)
