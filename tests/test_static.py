"""Batches filled up to one shape train the same model, and nothing looks at what was filled up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from padless.runtime.collate import collate
from padless.runtime.errors import CollateError
from padless.runtime.schema import ColumnInfo
from padless.runtime.static import pad_batch
from padless.runtime.targets import Targets, known_targets
from padless.runtime.varlen_batch import VarlenBatch

COLUMNS = (
    ColumnInfo(name="advantage", level="token", type="list<float32>"),
    ColumnInfo(name="reward", level="sequence", type="list<float32>"),
    ColumnInfo(name="judge", level="sequence", type="list<string>"),
    ColumnInfo(name="weight", level="pack", type="float32"),
)


def make_batch(*lengths: int, extras: bool = False) -> VarlenBatch:
    """One pack with sequences of these lengths, of random ids."""
    rng = np.random.default_rng(sum(lengths))
    row: dict[str, Any] = {
        "input_ids": rng.integers(0, 64, sum(lengths)),
        "seq_lengths": np.array(lengths),
        "sequence_ids": np.arange(len(lengths)),
    }
    if extras:
        row |= {
            "advantage": np.ones(sum(lengths), dtype=np.float32),
            "reward": np.ones(len(lengths), dtype=np.float32),
            "judge": [f"judge {number}" for number in range(len(lengths))],
            "weight": np.float32(2),
        }
    return collate([row], columns=COLUMNS)


def test_a_padded_batch_is_spelled_out() -> None:
    """BR-018."""
    before = make_batch(3, 1, 2, extras=True)
    batch = pad_batch(before, tokens=8, sequences=5, columns=COLUMNS)
    assert batch["input_ids"].tolist() == [[*before["input_ids"][0].tolist(), 0, 0]]
    assert batch["labels"].tolist() == [[*before["labels"][0].tolist(), -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 3, 3]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6, 8, 8]
    assert batch["max_length_q"] == batch["max_length_k"] == 4
    assert batch["sequence_ids"].tolist() == [0, 1, 2, -1, -1]
    assert batch["advantage"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert batch["reward"].tolist() == [1, 1, 1, 0, 0]
    assert batch["judge"] == ["judge 0", "judge 1", "judge 2", "", ""]
    assert batch["weight"].tolist() == [2]
    assert batch.num_targets == before.num_targets == 3
    assert before["input_ids"].shape == (1, 6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_all_batches_have_one_shape_and_boundaries_that_hold_every_token(lengths: list[int]) -> None:
    before = make_batch(*lengths)
    batch = pad_batch(before, tokens=64, sequences=8)
    assert {key: value.shape for key, value in batch.items() if isinstance(value, torch.Tensor)} == {
        **dict.fromkeys(("input_ids", "labels", "position_ids", "seq_idx"), (1, 64)),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), (9,)),
        "sequence_ids": (8,),
    }
    found = batch["cu_seq_lens_q"].diff().tolist()
    assert found == [*lengths, 64 - sum(lengths), *[0] * (7 - len(lengths))]
    assert max(found) <= batch["max_length_q"] <= 64
    assert [value.dtype for value in batch.values() if isinstance(value, torch.Tensor)] == [
        value.dtype for value in before.values() if isinstance(value, torch.Tensor)
    ]
    again = pad_batch(batch, tokens=64, sequences=8)
    assert again["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_q"].tolist(), "a full batch stays"


def test_a_model_gives_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes))
    batch = make_batch(9, 4, 1)
    results = []
    for one in (batch, pad_batch(batch, tokens=24, sequences=6)):
        loss = model(**one.model_inputs(), num_items_in_batch=one.num_targets).loss
        loss.backward()
        found = [value.grad.clone() for value in model.parameters() if value.grad is not None]
        results.append((loss.item(), found))
        model.zero_grad()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for one_gradient, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one_gradient, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "sequences"),
    [(5, 9), (8, 3), (6, 2)],
)
def test_a_batch_that_does_not_fit_is_refused(tokens: int, sequences: int) -> None:
    with pytest.raises(CollateError, match=f"6 tokens in 3 sequences does not fit tokens={tokens}"):
        pad_batch(make_batch(3, 1, 2), tokens=tokens, sequences=sequences)


def test_batches_with_images_have_no_one_shape() -> None:
    batch = VarlenBatch({**make_batch(3, 2), "num_images": torch.tensor([0, 0])})
    with pytest.raises(CollateError, match="a folder with images"):
        pad_batch(batch, tokens=8, sequences=4)


def test_further_columns_need_their_level() -> None:
    with pytest.raises(CollateError, match=r"advantage is per token.*columns="):
        pad_batch(make_batch(3, extras=True), tokens=8, sequences=5)


def test_what_a_graph_keeps_is_one_number_in_every_batch() -> None:
    for lengths in ((3, 1, 2), (9, 2), (1,)):
        batch = pad_batch(make_batch(*lengths), tokens=16, sequences=5, max_length=15, targets=9)
        assert batch["max_length_q"] == batch["max_length_k"] == 15
        again = pad_batch(batch, tokens=16, sequences=5)
        for one in (batch, again.pin_memory() if torch.cuda.is_available() else again):
            moved = one.to("meta")
            assert known_targets(moved["labels"]) == Targets(sum(lengths) - len(lengths), 9)


def test_a_batch_beyond_what_a_graph_keeps_is_refused() -> None:
    batch = make_batch(3, 1, 9)
    with pytest.raises(CollateError, match="max_length=8 and the batch has a sequence of 9 tokens; give"):
        pad_batch(batch, tokens=16, sequences=5, max_length=8)
    with pytest.raises(CollateError, match="sequence of 19 tokens, which is what is filled up; give"):
        pad_batch(batch, tokens=32, sequences=5, max_length=16)
    with pytest.raises(CollateError, match="targets=9 and the batch has 10 trained labels; give more"):
        pad_batch(batch, tokens=16, sequences=5, targets=9)


def test_a_copy_on_a_device_knows_its_trained_labels_until_they_change() -> None:
    """Counted as they are copied: a mask that came later counts."""
    batch = make_batch(3, 1, 9)
    batch["labels"][0, 5:7] = -100
    labels = batch.to("meta")["labels"]
    assert known_targets(labels) == Targets(8, None)
    batch["labels"].fill_(-100)  # the copy is what it was
    assert known_targets(labels) == Targets(8, None)
    labels[0, 0] = 1
    assert known_targets(labels) is None
    with torch.inference_mode():
        assert known_targets(batch.to("meta")["labels"]) is None
