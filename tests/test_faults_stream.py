"""Public faults of loaders and collators, each as the smallest run that showed it elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from packed import Folder, Seq, count_up, write_folder
from ranks import numbers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from padless.runtime.collate import collate
from padless.runtime.errors import CollateError
from padless.runtime.models import prepare_model
from padless.runtime.reader import PackedReader
from padless.runtime.static import pad_batch
from padless.runtime.stream import PackedStream


def singles(path: Path, packs: int, **options: Any) -> Path:
    """A folder of packs with one sequence each, whose id is the pack's number."""
    write_folder(path, Folder(packs=[count_up(1 + n % 5, first=n) for n in range(packs)], **options))
    return path


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes)).eval()


def test_begin_and_end_that_share_an_id_are_no_empty_sequence(tmp_path: Path) -> None:
    """BR-009."""
    pack = [Seq([2, 10, 11, 2]), Seq([2, 12, 2])]
    write_folder(tmp_path / "packed", Folder(packs=[pack]))
    (batch,) = PackedStream(tmp_path / "packed", rank=0, world_size=1)
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 7]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]


@pytest.mark.parametrize("removed", [True, False])
def test_a_trainer_that_removes_the_boundaries_is_told(tmp_path: Path, removed: bool) -> None:
    """BR-010."""
    row = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "seq_lengths": [3, 5], "sequence_ids": [0, 1]}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), remove_unused_columns=removed, use_cpu=True, report_to="none"
    )
    rows = datasets.Dataset.from_list([row])
    trainer = Trainer(tiny_llama(), arguments, train_dataset=rows, data_collator=collate)
    loader = iter(trainer.get_train_dataloader())
    if removed:
        with pytest.raises(CollateError, match="remove_unused_columns=False"):
            next(loader)
    else:
        assert next(loader)["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("packs_per_shard", [1, 3, 4, 9])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_pack_of_every_shard_can_be_read_last_first(
    tmp_path: Path, packs_per_shard: int, compression: str | None
) -> None:
    """BR-127."""
    path = singles(
        tmp_path / "packed",
        9,
        packs_per_shard=packs_per_shard,
        packs_per_batch=2,
        compression=compression,
    )
    reader = PackedReader(path)
    for number in reversed(range(9)):
        assert reader[number].input_ids.tolist() == [number] * (1 + number % 5)
    assert len(reader) == 9


def test_a_stop_in_the_middle_of_a_shard_loses_nothing_of_it(tmp_path: Path) -> None:
    """BR-138."""
    path = singles(tmp_path / "packed", 30, packs_per_shard=10, packs_per_batch=5)
    whole = [numbers(batch) for batch in PackedStream(path, rank=0, world_size=3)]
    stream = PackedStream(path, rank=0, world_size=3)
    head = [numbers(batch) for _, batch in zip(range(2), stream, strict=False)]
    resumed = PackedStream(path, rank=0, world_size=3)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert head + [numbers(batch) for batch in resumed] == whole


@pytest.mark.parametrize("balance", [None, "attention"])
@pytest.mark.parametrize(("packs", "stop"), [(200, 20), (50, 17)])
def test_what_a_shuffle_holds_back_is_not_lost_by_a_stop(
    tmp_path: Path, packs: int, stop: int, balance: str | None
) -> None:
    """BR-139, BR-142: nor does it hang on the global random state."""
    path = singles(tmp_path / "packed", packs, packs_per_shard=40, packs_per_batch=10)
    whole = [numbers(batch) for batch in PackedStream(path, rank=0, world_size=1, balance=balance)]
    stream = PackedStream(path, rank=0, world_size=1, balance=balance)
    head = [numbers(batch) for _, batch in zip(range(stop), stream, strict=False)]
    np.random.seed(stop)
    torch.manual_seed(stop)
    resumed = PackedStream(path, rank=0, world_size=1, balance=balance)
    resumed.load_state_dict(stream.state_dict())
    assert head + [numbers(batch) for batch in resumed] == whole
    assert sorted(sum(whole, [])) == list(range(packs))


def test_epochs_after_a_resumed_one_are_whole_with_persistent_workers(tmp_path: Path) -> None:
    """BR-141."""
    path = singles(tmp_path / "packed", 8)
    stopped = PackedStream(path, rank=0, world_size=1)
    for _ in zip(range(6), stopped, strict=False):
        pass
    stream = PackedStream(path, rank=0, world_size=1)
    stream.load_state_dict(stopped.state_dict())
    loader = DataLoader(
        stream, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    assert [sum(1 for _ in loader) for _ in range(3)] == [2, 8, 8]


@pytest.mark.parametrize("stop", [0, 4])
def test_a_state_before_the_first_or_after_the_last_pack_keeps_the_next_epoch_whole(
    tmp_path: Path, stop: int
) -> None:
    """BR-143."""
    path = singles(tmp_path / "packed", 4)
    stream = PackedStream(path, rank=0, world_size=1)
    for _ in zip(range(stop), stream, strict=False):
        pass
    resumed = PackedStream(path, rank=0, world_size=1)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.state_dict() == stream.state_dict()
    assert resumed.epoch == (1 if stop else 0)
    expected = PackedStream(path, rank=0, world_size=1, epoch=resumed.epoch)
    assert [numbers(batch) for batch in resumed] == [numbers(batch) for batch in expected]


def test_the_evaluation_loss_does_not_hang_on_packing_or_batch_size(tmp_path: Path) -> None:
    """BR-019, BR-174."""
    rng = np.random.default_rng(0)
    rows = [Seq(rng.integers(0, 64, length).tolist()) for length in (3, 9, 1, 6, 2, 12, 5, 4, 8, 7)]
    write_folder(tmp_path / "apart", Folder(packs=[[row] for row in rows], largest_id=63))
    packs = [rows[:2], rows[2:5], rows[5:6], rows[6:8], rows[8:]]
    write_folder(tmp_path / "packed", Folder(packs=packs, largest_id=63))
    model = tiny_llama()
    sums = []
    for name in ("apart", "packed"):
        for packs_per_batch in (1, 4):
            stream = PackedStream(
                tmp_path / name,
                rank=0,
                world_size=1,
                packs_per_batch=packs_per_batch,
                remainder="pad",
                shuffle=False,
            )
            loss, targets = 0.0, 0
            for batch in stream:
                with torch.no_grad():
                    loss += model(**batch.model_inputs(), num_items_in_batch=1).loss.item()
                targets += batch.num_targets
            sums.append((loss, targets))
    assert {targets for _, targets in sums} == {sum(len(row.tokens) - 1 for row in rows)}
    assert [loss for loss, _ in sums] == pytest.approx([sums[0][0]] * 4, rel=1e-5)


def test_one_row_for_two_ranks_is_counted_once(tmp_path: Path) -> None:
    """BR-175."""
    write_folder(tmp_path / "packed", Folder(packs=[[Seq([1, 2, 3])]]))
    ranks = [
        list(PackedStream(tmp_path / "packed", rank=rank, world_size=2, packs_per_batch=2, remainder="pad"))
        for rank in range(2)
    ]
    assert [[batch.num_targets for batch in batches] for batches in ranks] == [[2], [0]]


@pytest.mark.parametrize("positions", [np.arange(24).reshape(3, 1, 8).tolist(), list(range(5, 13))])
def test_positions_are_never_asked_where_a_sequence_begins(positions: list[Any]) -> None:
    """BR-011, BR-012: positions of three axes, or from 5 on, are refused; boundaries are stored."""
    row = {"input_ids": list(range(8)), "seq_lengths": [8], "sequence_ids": [0]}
    with pytest.raises(CollateError, match="position_ids and nothing says"):
        collate([row | {"position_ids": positions}])
    batch = collate([row])
    assert batch["cu_seq_lens_q"].tolist() == [0, 8]
    assert batch["cu_seq_lens_q"][-1] == batch["input_ids"].shape[1]


def test_boundaries_of_a_part_of_a_row_begin_at_nought_wherever_its_positions_do() -> None:
    """BR-014: the second of two ranks that share a row of 600 tokens has its positions 300 to 599."""
    rng = np.random.default_rng(0)
    part = {"input_ids": rng.integers(0, 64, 300).tolist(), "seq_lengths": [300], "sequence_ids": [0]}
    positions = torch.arange(300, 600)[None]
    with pytest.raises(CollateError, match="position_ids and nothing says"):
        collate([part | {"position_ids": positions[0].tolist()}])
    batch = collate([part])
    assert batch["cu_seq_lens_q"].tolist() == [0, 300]
    plain, packed = tiny_llama(), prepare_model(tiny_llama())
    with torch.no_grad():
        expected = plain(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits
        found = packed(**batch.model_inputs() | {"position_ids": positions}).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_fills_a_batch_up_is_no_sequence_of_the_data() -> None:
    """BR-015: five tokens in a shape of eight."""
    row = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [5], "sequence_ids": [0]}
    batch = pad_batch(collate([row]), tokens=8, sequences=2)
    assert numbers(batch) == [0]
    assert batch["sequence_ids"].tolist() == [0, -1]
    assert batch.num_targets == int((batch["labels"] != -100).sum()) == 4
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8]
