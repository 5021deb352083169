"""A packed folder is a data set for datasets and TRL as it lies there, with no code in between."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from trainer_proofs import shown
from transformers import AutoTokenizer, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
from unpacked import tiny_model

from padless.packer import PackConfig, pack_dataset
from padless.runtime.reader import PackedReader

PACKS_PER_STEP = 2


def build(demo_data: Path, output: Path, **options: Any) -> Path:
    """The demo records, packed into `output`."""
    pack_dataset(
        PackConfig(
            sources=(str(demo_data / "instructions.jsonl"),),
            tokenizer=str(demo_data / "tokenizer"),
            max_length=1024,
            train_on="assistant",
            output=str(output),
            workers=1,
            **options,
        )
    )
    return output


@pytest.fixture(scope="module")
def packed(demo_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(demo_data, tmp_path_factory.mktemp("trl") / "packed")


@pytest.fixture
def model(demo_data: Path) -> LlamaForCausalLM:
    """A random Llama in fp32, its weights so large that a mixed-up sequence shows in the loss."""
    return tiny_model(vocab=len(AutoTokenizer.from_pretrained(demo_data / "tokenizer")))


def assert_mapped_from(dataset: datasets.Dataset, folder: Path) -> None:
    """`cache_files` names the memory-mapped files behind a data set: all are shards in `folder`."""
    shards = sorted(folder.glob("shard-*.arrow"))
    assert sorted(Path(entry["filename"]) for entry in dataset.cache_files) == shards


def test_load_from_disk_maps_the_shards_and_gives_their_packs(packed: Path) -> None:
    dataset = datasets.load_from_disk(str(packed))
    assert_mapped_from(dataset, packed)
    reader = PackedReader(packed)
    assert len(dataset) == len(reader) > 1
    for row, pack in zip(dataset, reader, strict=True):
        assert row["input_ids"] == pack.input_ids.tolist()
        assert row["labels"] == pack.labels.tolist()
        assert row["seq_lengths"] == pack.seq_lengths.tolist()


def test_load_from_disk_gives_both_splits(demo_data: Path, tmp_path: Path) -> None:
    folder = build(demo_data, tmp_path / "packed", eval_fraction=0.05)
    splits = datasets.load_from_disk(str(folder))
    assert isinstance(splits, datasets.DatasetDict)
    assert set(splits) == {"train", "validation"}
    sequences = {}
    for name, dataset in splits.items():
        assert_mapped_from(dataset, folder / name)
        sequences[name] = sum(len(row["seq_lengths"]) for row in dataset)
    records = len((demo_data / "instructions.jsonl").read_text().splitlines())
    assert sum(sequences.values()) == records
    assert 0 < sequences["validation"] < records // 5


def one_by_one(model: LlamaForCausalLM, rows: list[dict[str, list[int]]]) -> float:
    """The loss per trained token when each sequence of the packs goes through the model alone."""
    total, targets = 0.0, 0
    for row in rows:
        ids = torch.tensor(row["input_ids"]).split(row["seq_lengths"])
        labels = torch.tensor(row["labels"]).split(row["seq_lengths"])
        for sequence, label in zip(ids, labels, strict=True):
            trained = int((label != -100).sum())
            if trained:
                with torch.no_grad():
                    loss = model(input_ids=sequence[None], labels=label[None]).loss
                total, targets = total + loss.item() * trained, targets + trained
    return total / targets


def test_sft_trainer_trains_on_the_folder_with_the_loss_of_the_single_sequences(
    packed: Path, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    dataset = datasets.load_from_disk(str(packed))
    first_rows = [dataset[i] for i in range(PACKS_PER_STEP)]
    assert sum(len(row["seq_lengths"]) for row in first_rows) > 2 * PACKS_PER_STEP
    expected = one_by_one(model, first_rows)
    ids = torch.tensor([sum((row["input_ids"] for row in first_rows), [])])
    labels = torch.tensor([sum((row["labels"] for row in first_rows), [])])
    with torch.no_grad():
        mixed = model(input_ids=ids, labels=labels).loss.item()
    assert abs(mixed - expected) > 1e-3, "this model would not show it if sequences were mixed"

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(tmp_path),
            packing=False,
            padding_free=True,
            max_length=None,
            per_device_train_batch_size=PACKS_PER_STEP,
            train_sampling_strategy="sequential",
            max_steps=3,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(packed / "tokenizer"),
    )
    losses: list[float] = []
    model.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
    trainer.train()
    assert len(losses) == 3
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert all(math.isfinite(loss) for loss in losses)
    sequences = sum(len(row["seq_lengths"]) for row in first_rows)
    apart = {"apart": abs(losses[0] - expected), "mixed": abs(mixed - expected)}
    shown("trl", "the folder as it is, its `SFTTrainer`", sequences=sequences, **apart)
