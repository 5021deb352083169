"""The measured idle share is that of the seconds in which each rank worked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import clock_rank, run_two, worked

from padless.runtime.errors import StepClockError
from padless.runtime.order import idle_share
from padless.runtime.step_clock import StepClock, waiting


def test_steps_are_the_sums_of_their_batches_and_half_a_step_counts_for_nothing() -> None:
    assert worked([1, 2, 3, 4, 5], batches_per_step=2).step_seconds().tolist() == [3, 7]
    assert worked([1, 2]).step_seconds().tolist() == [1, 2]


def test_a_process_of_its_own_waits_for_nobody() -> None:
    assert worked([1, 2, 3]).idle_share() == 0
    assert worked([0, 0]).idle_share() == 0


def test_what_raises_is_not_timed() -> None:
    clock = worked([1])
    with pytest.raises(RuntimeError), clock.working():
        raise RuntimeError
    assert clock.step_seconds().tolist() == [1]


@pytest.mark.parametrize("skip", [2, 5])
def test_nothing_left_to_say_is_told(skip: int) -> None:
    with pytest.raises(StepClockError, match=f"2 whole steps were timed, and {skip} are to be skipped"):
        worked([1, 2]).idle_share(skip=skip)
    with pytest.raises(StepClockError, match="batches_per_step is 0"):
        StepClock(batches_per_step=0)


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=6))
def test_measured_is_predicted_where_seconds_are_costs(steps: list[tuple[int, ...]]) -> None:
    costs = np.array(steps, dtype=np.int64).reshape(-1)
    expected = idle_share(costs, 3, np.arange(len(costs)).reshape(-1, 3))
    assert waiting(torch.tensor(steps).T) == pytest.approx(expected)


def test_two_processes_get_the_share_of_both_and_are_told_of_different_steps() -> None:
    found = run_two(lambda rank, port: (clock_rank, (rank, port)))
    # Steps of 1 and 3, and of 4 and 2: of 2 x 7 seconds 4 were waited; without the first, 2 of 8.
    assert found[0] == found[1]
    shares, told = found[0]
    assert shares == pytest.approx([4 / 14, 2 / 8])
    assert "ranks timed [2, 3] steps" in told
