"""The counts of lengths give what batching every order of the sequences would give on average."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_report import mean_padded, rank

from padless.packer.lengths import Lengths, padding_share

lengths_lists = st.lists(st.integers(1, 500), min_size=1, max_size=40)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), batch_size=st.integers(1, 7))
def test_random_padding_is_the_mean_over_all_orders(lengths: list[int], batch_size: int) -> None:
    found = Lengths.of(np.array(lengths))
    assert found.padded(batch_size) == pytest.approx(mean_padded(lengths, batch_size))
    assert found.padded(batch_size, np.square) == pytest.approx(mean_padded(lengths, batch_size, power=2))


@given(lengths=lengths_lists, batch_size=st.integers(1, 50))
def test_grouped_padding_is_that_of_the_sorted_lengths(lengths: list[int], batch_size: int) -> None:
    share = Lengths.of(np.array(lengths)).grouped_padding(batch_size)
    assert share == pytest.approx(padding_share(np.sort(np.array(lengths)), batch_size))


@given(
    lengths=st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=40),
    batch_size=st.integers(1, 50),
)
def test_padding_is_what_padding_every_batch_gives(lengths: list[int], batch_size: int) -> None:
    batches = [lengths[at : at + batch_size] for at in range(0, len(lengths), batch_size)]
    padded = sum(max(batch) * len(batch) for batch in batches)
    share = padding_share(np.array(lengths, dtype=np.int32), batch_size)
    assert share == pytest.approx(1 - sum(lengths) / padded)


@given(parts=st.lists(st.lists(st.integers(0, 60), max_size=20), min_size=1, max_size=5))
def test_counts_can_be_taken_in_parts(parts: list[list[int]]) -> None:
    together = Lengths.together([Lengths.of(np.array(part, np.int64)) for part in parts])
    real = [length for part in parts for length in part if length]
    assert (len(together), together.tokens, together.longest) == (len(real), sum(real), max(real, default=0))
    if real:
        for share in (0.0, 0.05, 0.5, 0.99, 1.0):
            assert together.quantile(share) == rank(real, share)


def test_the_last_batch_may_be_partial() -> None:
    # [3 1] pads one to 3, [2] is alone: 6 real tokens in 8 places.
    assert padding_share(np.array([3, 1, 2]), 2) == pytest.approx(2 / 8)
    assert padding_share(np.array([], dtype=np.int32), 2) == 0.0


def test_no_sequences_have_no_padding() -> None:
    nothing = Lengths.of(np.zeros(0, np.int32))
    assert (len(nothing), nothing.padding(8), nothing.grouped_padding(8), nothing.quantile(0.5)) == (
        0,
        0,
        0,
        0,
    )
