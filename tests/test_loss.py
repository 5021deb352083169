"""A step's loss is the mean over its tokens, or over its sequences, whatever the packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.runtime.batch import Pack
from padless.runtime.collate import collate
from padless.runtime.loss import sequence_weights, step_targets

LENGTHS = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=4)


def pack_of(lengths: list[int], masked: int = 0) -> Pack:
    """A pack whose sequences have all tokens trained but the first and, in one of three, `masked` more."""
    sizes = np.array(lengths)
    labels = np.concatenate(
        [
            np.r_[[-100] * min(1 + masked * (n % 3 == 0), n), range(1 + masked * (n % 3 == 0), n)]
            for n in sizes
        ]
    ).astype(np.int32)
    return Pack(
        input_ids=np.abs(labels).astype(np.int32),
        labels=labels,
        seq_lengths=sizes.astype(np.int32),
        sequence_ids=np.arange(len(sizes)),
        num_tokens=int(sizes.sum()),
        num_targets=int((labels != -100).sum()),
        max_seqlen=int(sizes.max()),
        attention_cost=int((sizes * sizes).sum()),
        extras={},
    )


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 3))
def test_accumulated_batches_give_the_mean_over_all_tokens_of_the_step(
    packs: list[list[int]], masked: int
) -> None:
    """BR-025, BR-029: never the mean of the batches' means."""
    batches = [collate([pack_of(pack, masked)]) for pack in packs]
    losses = [torch.rand(batch["labels"].shape, dtype=torch.float64) for batch in batches]
    trained = [batch["labels"] != -100 for batch in batches]
    targets = step_targets(batches)
    step = sum(float(loss[mask].sum()) / targets for loss, mask in zip(losses, trained, strict=True))
    every = torch.cat([loss[mask] for loss, mask in zip(losses, trained, strict=True)])
    assert step == pytest.approx(float(every.mean()) if len(every) else 0.0)


def test_equal_batches_and_batches_without_targets_leave_the_mean_as_it_is() -> None:
    """BR-027, BR-030: a token loss of 2 is a step loss of 2."""
    batches = [collate([pack_of([11])]) for _ in range(4)]
    nothing = collate([pack_of([3], masked=2)])
    assert [batch.num_targets for batch in [*batches, nothing]] == [10, 10, 10, 10, 0]
    for step in (batches, [batches[0], nothing]):
        assert sum(2.0 * batch.num_targets for batch in step) / step_targets(step) == 2.0


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 3))
def test_weights_give_the_sum_of_the_sequences_means(packs: list[list[int]], masked: int) -> None:
    batch = collate([pack_of(pack, masked) for pack in packs])
    loss = torch.rand(batch["labels"].shape)
    means = []
    bounds = batch["cu_seq_lens_q"].tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        mine = loss[0, start:end][batch["labels"][0, start:end] != -100]
        means.append(float(mine.mean()) if len(mine) else 0.0)
    assert float((sequence_weights(batch) * loss).sum()) == pytest.approx(sum(means), abs=1e-5)


def test_a_step_without_targets_divides_by_one() -> None:
    """BR-028."""
    batch = collate([pack_of([1, 1])])
    assert step_targets([batch]) == 1
    assert sequence_weights(batch).sum() == 0
