"""Packs in transformers' Trainer: the loss of the single sequences, and no way to mix them unseen."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from building import TOKENIZER, pack  # noqa: E402
from unpacked import tiny_model  # noqa: E402

from padless.runtime.dataset import PackedDataset  # noqa: E402
from padless.runtime.errors import CollateError  # noqa: E402
from padless.runtime.trainers.hf import PadlessCollator  # noqa: E402

ROWS = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    {"input_ids": [9, 10, 11], "labels": [-100, 10, 11]},
    {"input_ids": [12, 13], "labels": [-100, 13]},
    {"input_ids": [14, 15, 16, 17, 18], "labels": [-100, 15, 16, 17, 18]},
    {"input_ids": [19, 20, 21], "labels": [-100, 20, -100]},
]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = (
        "--format",
        "tokenized",
        "--tokenizer",
        TOKENIZER,
        "--max-length",
        10,
        "--output",
        tmp_path / "p",
    )
    run = pack("build", data, *words)
    assert run.code == 0, run.err
    return tmp_path / "p"


@pytest.fixture
def model() -> Any:
    return tiny_model(vocab=4096)


def one_by_one(model: Any) -> Any:
    """The loss over the trained tokens of all sequences, each alone in its row; with gradients."""
    total, targets = 0.0, 0
    for row in ROWS:
        count = sum(label != -100 for label in row["labels"])
        loss = model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss
        total, targets = total + loss * count, targets + count
    return total / targets


def train(model: Any, data: Any, folder: Path, **options: Any) -> list[float]:
    """The losses of a run of one step; the learning rate is zero, so that gradients stay to be seen."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        max_steps=1, learning_rate=0.0, max_grad_norm=0.0, logging_steps=1, remove_unused_columns=False,
        **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=PadlessCollator())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("form", ["PackedDataset", "load_from_disk"])
@pytest.mark.parametrize(
    "steps",
    [
        {"per_device_train_batch_size": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    ],
    ids=["one batch", "accumulated"],
)
def test_trainer_gives_the_loss_of_the_single_sequences(
    form: str, steps: dict[str, int], packed: Path, model: Any, tmp_path: Path
) -> None:
    data = PackedDataset(packed) if form == "PackedDataset" else datasets.load_from_disk(str(packed))
    want = one_by_one(model).item()
    (got,) = train(model, data, tmp_path / "run", **steps)
    assert got == pytest.approx(want, abs=1e-4)  # the log rounds to four places


def test_collated_loss_and_gradients_are_those_of_the_single_sequences(packed: Path, model: Any) -> None:
    want = one_by_one(model)
    want.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got = model(**PadlessCollator()(list(PackedDataset(packed).reader))).loss
    got.backward()
    assert got.item() == pytest.approx(want.item(), abs=1e-5)
    for mine, theirs in zip((p.grad for p in model.parameters()), grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_batch_is_one_row_without_a_mask_however_many_packs(packed: Path) -> None:
    """The traps under transformers: masks of ones, and several rows with position_ids alone."""
    rows = list(datasets.load_from_disk(str(packed)))
    assert len(rows) > 1
    batch = PadlessCollator()(rows)
    assert "attention_mask" not in batch and batch["use_cache"] is False
    assert batch["input_ids"].shape == batch["position_ids"].shape == (1, 17)
    lengths = [length for row in rows for length in row["seq_lengths"]]
    assert batch["cu_seq_lens_q"].diff().tolist() == lengths and batch["max_length_q"] == 5
    assert batch["position_ids"][0].tolist() == [place for length in lengths for place in range(length)]


def test_rows_with_a_mask_are_refused(packed: Path) -> None:
    row = {**datasets.load_from_disk(str(packed))[0], "attention_mask": [1] * 9}
    with pytest.raises(CollateError, match="attention_mask"):
        PadlessCollator()([row])


def test_rows_whose_boundaries_a_trainer_dropped_are_refused(
    packed: Path, model: Any, tmp_path: Path
) -> None:
    """Trainer removes the columns that forward does not name, unless it is told not to."""
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", save_strategy="no", max_steps=1
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=datasets.load_from_disk(str(packed)), data_collator=PadlessCollator()
    )
    with pytest.raises(CollateError, match="remove_unused_columns=False"):
        trainer.train()


def test_the_collator_goes_to_loader_workers(packed: Path) -> None:
    kept = pickle.loads(pickle.dumps(PadlessCollator()))
    packs = list(PackedDataset(packed).reader)
    assert kept(packs)["input_ids"].tolist() == PadlessCollator()(packs)["input_ids"].tolist()
