"""A batch holds every token once, its boundaries are the stored ones, and it trains the same model."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Folder, Seq, count_up, write_folder
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from unpacked import tiny_model

from padless.runtime.batch import Pack
from padless.runtime.collate import VarlenBatch, collate
from padless.runtime.errors import CollateError
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedDataset

KEYS = {
    *("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"),
    *("max_length_q", "max_length_k", "seq_idx", "sequence_ids", "num_targets"),
}


def make_pack(*sequences: list[int], first_id: int = 0, **changes: Any) -> Pack:
    """A pack of sequences with every token but the first of each trained."""
    ids = np.array([token for sequence in sequences for token in sequence], dtype=np.uint16)
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    labels = ids.astype(np.int32)
    labels[np.cumsum(lengths) - lengths] = -100
    pack = Pack(
        input_ids=ids,
        labels=labels,
        seq_lengths=lengths,
        sequence_ids=np.arange(first_id, first_id + len(lengths)),
        num_tokens=len(ids),
        num_targets=int((labels != -100).sum()),
        max_seqlen=int(lengths.max()),
        attention_cost=int((lengths.astype(np.int64) ** 2).sum()),
        extras={},
    )
    return replace(pack, **changes)


def test_the_longest_length_is_of_a_sequence_and_not_of_the_batch() -> None:
    """BR-173: 8 packs of one sequence of 120 tokens each."""
    batch = collate([make_pack([*range(120)], first_id=number) for number in range(8)])
    assert (batch["max_length_q"], batch["max_length_k"], batch["input_ids"].shape[1]) == (120, 120, 960)


def as_lists(batch: VarlenBatch) -> dict[str, Any]:
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in batch.items()}


def test_a_batch_is_spelled_out_for_two_packs() -> None:
    batch = collate([make_pack([1, 1, 1], [2]), make_pack([3, 3], first_id=2)])
    assert as_lists(batch) == {
        "input_ids": [[1, 1, 1, 2, 3, 3]],
        "labels": [[-100, 1, 1, -100, -100, 3]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "seq_idx": [[0, 0, 0, 1, 2, 2]],
        "cu_seq_lens_q": [0, 3, 4, 6],
        "cu_seq_lens_k": [0, 3, 4, 6],
        "max_length_q": 3,
        "max_length_k": 3,
        "sequence_ids": [0, 1, 2],
        "num_targets": 3,
    }
    types = {key: value.dtype for key, value in batch.items() if isinstance(value, torch.Tensor)}
    assert {types[key] for key in ("input_ids", "labels", "position_ids", "sequence_ids")} == {torch.int64}
    assert {types[key] for key in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")} == {torch.int32}
    assert type(batch["max_length_q"]) is type(batch["num_targets"]) is int


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1), min_size=1))
def test_every_sequence_comes_back_out_of_a_batch(packs: list[list[list[int]]]) -> None:
    batch = collate([make_pack(*pack) for pack in packs])
    sequences = [sequence for pack in packs for sequence in pack]
    bounds = batch["cu_seq_lens_q"].tolist()
    assert bounds[-1] == batch["input_ids"].shape[1]
    parts = list(zip(bounds[:-1], bounds[1:], strict=True))
    assert [batch["input_ids"][0, start:end].tolist() for start, end in parts] == sequences
    for number, (start, end) in enumerate(parts):
        assert batch["position_ids"][0, start:end].tolist() == list(range(end - start))
        assert set(batch["seq_idx"][0, start:end].tolist()) == {number}
        assert batch["labels"][0, start:end].tolist() == [-100, *sequences[number][1:]]
    assert batch["max_length_q"] == max(map(len, sequences))
    assert batch.num_targets == int((batch["labels"] != -100).sum())


def test_boundaries_are_never_guessed_from_ids() -> None:
    """BR-008."""
    # The end-of-turn id closes turns inside a chat, begin and end may even share an id.
    batch = collate([make_pack([4, 7, 4, 8, 4], [2, 2, 2])])
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8]


def test_nothing_trains_the_first_token_of_a_sequence_whatever_the_labels_say() -> None:
    row = {"input_ids": [1, 10, 2, 1, 20, 2], "labels": [1, 10, 2, 1, 20, 2], "seq_lengths": [3, 3]}
    batch = collate([row | {"sequence_ids": [0, 1]}])
    assert batch["labels"].tolist() == [[-100, 10, 2, -100, 20, 2]]
    assert batch.num_targets == 4


def test_rows_of_load_from_disk_give_the_batch_of_the_packs(tmp_path: Path) -> None:
    for labels in (True, False):
        folder = tmp_path / f"labels-{labels}"
        write_folder(folder, Folder(packs=[count_up(3, 2), count_up(4), count_up(1, 1, 2)], labels=labels))
        reader = PackedReader(folder)
        rows = datasets.Dataset.from_list(
            [
                {name: getattr(pack, name).tolist() for name in ("input_ids", "seq_lengths", "sequence_ids")}
                | ({"labels": pack.labels.tolist()} if labels else {})
                | {"num_tokens": pack.num_tokens, "attention_cost": pack.attention_cost}
                for pack in reader
            ]
        )
        expected = as_lists(collate(list(reader)))
        assert as_lists(collate([rows[number] for number in range(3)])) == expected
        arrays = rows.with_format("numpy")
        assert as_lists(collate([arrays[number] for number in range(3)])) == expected


def folder_with_extras(path: Path) -> PackedReader:
    extras = {
        "advantages": ("token", "list<float32>", pa.list_(pa.float32()), [[0.5, 1.0], [1.5, 2.0]]),
        "reward": ("sequence", "list<float64>", pa.list_(pa.float64()), [[7.0, 8.0], [9.0]]),
        "quality": ("pack", "int32", pa.int32(), [3, 4]),
    }
    write_folder(path, Folder(packs=[count_up(1, 1), count_up(2)], extras=extras))
    return PackedReader(path)


def test_extras_are_joined_at_their_own_level(tmp_path: Path) -> None:
    # Pack 0 has as many tokens as sequences: only the manifest knows which column is which.
    reader = folder_with_extras(tmp_path / "packed")
    batch = collate(list(reader))
    assert batch["advantages"].dtype == torch.float32
    assert batch["advantages"].tolist() == [[0.5, 1.0, 1.5, 2.0]]
    assert batch["reward"].tolist() == [7.0, 8.0, 9.0]
    assert batch["quality"].tolist() == [3, 4]
    assert set(batch) == KEYS | {"advantages", "reward", "quality"}
    assert set(batch.model_inputs()) == KEYS - {"sequence_ids", "num_targets"} | {"use_cache"}
    row = {"input_ids": [1, 2], "seq_lengths": [1, 1], "sequence_ids": [0, 1], "reward": [7.0, 8.0]}
    assert collate([row], columns=reader.manifest.columns)["reward"].tolist() == [7.0, 8.0]
    with pytest.raises(CollateError, match="reward.*columns="):
        collate([row])


@pytest.mark.parametrize(
    ("packs", "message"),
    [
        ([], "at least one"),
        ([{"input_ids": [1, 2], "labels": [1, 2]}], "seq_lengths.*remove_unused_columns=False"),
        ([{"input_ids": [1, 2], "seq_lengths": [1, 2], "sequence_ids": [0, 1]}], "do not add up"),
        ([{"input_ids": [1, 2], "seq_lengths": [2, 0], "sequence_ids": [0, 1]}], "at least 1"),
        ([{"input_ids": [], "seq_lengths": [], "sequence_ids": []}], "at least 1"),
        ([make_pack([1], [2], seq_lengths=np.array([2, 0]))], "empty sequence"),
        # Each wrong by one, in sum right: the boundary would lie in the other pack.
        (
            [
                make_pack([1, 1], [2], seq_lengths=np.array([2, 2])),
                make_pack([3, 3], [4], seq_lengths=np.array([1, 1])),
            ],
            r"\[2, 2\] do not add up",
        ),
        ([make_pack([1, 1], labels=np.array([-100]))], "1 labels for 2 tokens"),
        ([make_pack([1, 1], sequence_ids=np.array([0, 1]))], "2 sequence_ids for 1"),
        ([make_pack([1], extras={"reward": np.array([1.0])})], "whether reward is per"),
        (
            [make_pack([1], extras={"a": np.array([1])}, extra_levels={"a": "token"}), make_pack([1])],
            "same columns",
        ),
        ([make_pack([1, 1], extras={"a": np.array([1])}, extra_levels={"a": "token"})], "1 values for 2"),
    ],
)
def test_what_would_be_a_wrong_batch_is_an_error(packs: list[Any], message: str) -> None:
    with pytest.raises(CollateError, match=message):
        collate(packs)


def test_a_batch_survives_pickling_moving_and_being_rebuilt() -> None:
    batch = collate([make_pack([1, 1, 1], [2]), make_pack([3, 3])])
    assert batch.to("cpu") is batch
    assert batch.to("cpu", non_blocking=True) is batch
    assert as_lists(pickle.loads(pickle.dumps(batch))) == as_lists(batch)
    # Trainer and accelerate rebuild a mapping by its type.
    assert type(batch)({key: batch[key] for key in batch}).num_targets == batch.num_targets


def test_a_move_is_one_copy_of_one_buffer() -> None:
    batch = collate([make_pack([1, 1, 1], [2]), make_pack([3, 3])])
    moved = batch.to("meta")
    tensors = [value for value in moved.values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert (moved[key].shape, moved[key].dtype) == (value.shape, value.dtype)
    offsets = {
        key: moved[key].storage_offset() * moved[key].element_size()
        for key in KEYS & set(moved)
        if isinstance(moved[key], torch.Tensor)
    }
    assert offsets["cu_seq_lens_q"] == offsets["cu_seq_lens_k"]
    assert len(set(offsets.values())) == len(offsets) - 1, "views of one buffer, beside each other"


def gradients(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_loss_and_gradients_are_those_of_the_sequences_one_by_one(attention: str) -> None:
    model = tiny_model(vocab=64, attention=attention)
    rng = np.random.default_rng(1)
    packs = [make_pack(*(rng.integers(0, 64, n).tolist() for n in row)) for row in ((9, 1, 14), (5, 7))]
    batch = collate(packs)
    total = batch.num_targets
    packed = model(**batch.model_inputs(), num_items_in_batch=total).loss
    packed.backward()
    of_packs = gradients(model)

    apart = torch.zeros(())
    for pack in packs:
        for ids in np.split(pack.input_ids.astype(np.int64), np.cumsum(pack.seq_lengths)[:-1]):
            if len(ids) > 1:
                row = torch.from_numpy(ids)[None]
                loss = model(input_ids=row, labels=row, num_items_in_batch=total).loss
                loss.backward()
                apart = apart + loss.detach()
    assert packed.item() == pytest.approx(apart.item(), rel=1e-6)
    of_sequences = gradients(model)
    assert of_packs.keys() == of_sequences.keys() and of_packs
    for name, gradient in of_packs.items():
        torch.testing.assert_close(gradient, of_sequences[name], rtol=1e-4, atol=1e-6)

    for trap in ({"attention_mask": torch.ones_like(batch["input_ids"])}, {"use_cache": True}):
        inputs = batch.model_inputs() | {"num_items_in_batch": total} | trap
        mixed = model(**inputs).loss.item()
        assert abs(mixed - packed.item()) > 1e-2, "this model would not show mixed sequences"


def test_target_counts_make_accumulated_steps_the_mean_over_their_tokens() -> None:
    first, second = collate([make_pack([1, 1, 1])]), collate([make_pack([2] * 9)])
    sums = [1.0 * first.num_targets, 3.0 * second.num_targets]
    assert sum(sums) / (first.num_targets + second.num_targets) == pytest.approx(2.6)


def test_trainer_trains_on_packs_with_the_loss_of_the_single_sequences(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    packs = [[Seq(rng.integers(0, 64, n).tolist()) for n in row] for row in ((6, 4), (3, 8), (5, 2), (7,))]
    write_folder(tmp_path / "packed", Folder(packs=packs, largest_id=63))
    model = tiny_model(vocab=64, attention="sdpa")
    total, targets = 0.0, 0
    for pack in packs[:2]:
        for sequence in pack:
            row = torch.tensor([sequence.tokens])
            with torch.no_grad():
                total += model(input_ids=row, labels=row).loss.item() * (len(sequence.tokens) - 1)
            targets += len(sequence.tokens) - 1
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=2,
            train_sampling_strategy="sequential",
            max_steps=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=PackedDataset(tmp_path / "packed"),
        data_collator=collate,
    )
    losses: list[float] = []
    model.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
    trainer.train()
    assert losses[0] == pytest.approx(total / targets, abs=1e-5)
    assert len(losses) == 2


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_give_the_packs_in_order(tmp_path: Path, start: str) -> None:
    folder = tmp_path / "packed"
    write_folder(folder, Folder(packs=[count_up(3, 2, first=10 * n) for n in range(1, 8)]))
    loader = DataLoader(
        PackedDataset(folder), batch_size=2, num_workers=2, collate_fn=collate, multiprocessing_context=start
    )
    batches = list(loader)
    assert all(isinstance(batch, VarlenBatch) for batch in batches)
    assert [batch["sequence_ids"].tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13],
    ]
