"""`verify --trainer`: what a trainer really gives its model is what was packed, and where not, it is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("trl")

from building import DEMO, TOKENIZER, build, built, pack  # noqa: E402

from padless.runtime.trainers import proof  # noqa: E402
from padless.runtime.trainers.proof import TRAINERS, ProofError, prove  # noqa: E402


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proof") / "packed"
    built(DEMO, folder, "--limit", 60)
    return folder


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_give_their_model_what_was_packed(packed: Path, trainer: str) -> None:
    run = pack("verify", packed, "--trainer", trainer, "--json")
    assert run.code == 0, run.out
    check = next(check for check in run.json["checks"] if check["name"] == f"trainer {trainer}")
    packs = len(proof.PackedDataset(packed))
    assert f"{packs} of {packs} packs" in check["detail"] and "the loss of" in check["detail"]


def test_data_trained_whole_have_labels_in_trl_too(tmp_path: Path) -> None:
    """No labels are stored there; TRL makes them of the tokens, and masks where sequences start."""
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(30)))
    words = ("--tokenizer", TOKENIZER, "--max-length", 64, "--output", tmp_path / "packed")
    assert pack("build", text, *words).code == 0
    assert "the loss of" in prove(tmp_path / "packed", "trl")


def test_one_sequence_a_pack_is_compared_across_packs(tmp_path: Path) -> None:
    """Padding-free without packing: the rows of a batch become one row."""
    built(DEMO, tmp_path / "packed", "--limit", 20, "--strategy", "none")
    assert "the loss of 2 packed sequences" in prove(tmp_path / "packed", "trl")


def test_every_split_is_tried(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "packed", "--limit", 60, "--eval-fraction", 0.2)
    run = pack("verify", tmp_path / "packed", "--trainer", "hf")
    assert run.code == 0
    assert "train: trainer hf" in run.out and "validation: trainer hf" in run.out


class Changed:
    """A trainer whose loader gives something else."""

    def __init__(self, trainer: Any, change: Callable[[dict[str, Any]], object]) -> None:
        self.trainer, self.change = trainer, change
        self.model, self.compute_loss = trainer.model, trainer.compute_loss

    def get_train_dataloader(self) -> Any:
        for batch in self.trainer.get_train_dataloader():
            self.change(batch)
            yield batch


def shifted(batch: dict[str, Any]) -> None:
    batch["labels"] = batch["labels"].roll(-1)


def unbounded(batch: dict[str, Any]) -> None:
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]


def several_rows(batch: dict[str, Any]) -> None:
    half = batch["input_ids"].shape[1] // 2
    batch["input_ids"] = batch["input_ids"][:, : 2 * half].view(2, half)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: batch.update(attention_mask=torch.ones_like(batch["input_ids"])), "attention_mask"),
        (lambda batch: batch.pop("position_ids"), "no position_ids"),
        (unbounded, "position_ids has"),
        (shifted, "labels has"),
        (several_rows, "input_ids is"),
        (lambda batch: batch.update(cu_seq_lens_q=batch["cu_seq_lens_q"][[0, -1]]), "cu_seq_lens_q is"),
        (lambda batch: batch.update(max_length_q=1), "max_length_q has 1"),
    ],
    ids=["mask", "no positions", "positions", "shifted labels", "rows", "boundaries", "longest"],
)
def test_another_batch_than_was_packed_is_seen(
    packed: Path, change: Callable[[dict[str, Any]], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = TRAINERS["hf"]
    monkeypatch.setitem(TRAINERS, "hf", lambda *given: Changed(make(*given), change))
    with pytest.raises(ProofError, match=words):
        prove(packed, "hf")


def test_a_model_that_mixes_the_sequences_is_seen(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are right, and what is made of them is not: this model never hears of its positions."""
    make = TRAINERS["hf"]

    def deaf(*given: Any) -> Any:
        trainer = make(*given)
        forward = trainer.model.forward
        trainer.model.forward = lambda position_ids=None, **inputs: forward(**inputs)
        return trainer

    monkeypatch.setitem(TRAINERS, "hf", deaf)
    run = pack("verify", packed, "--trainer", "hf")
    assert run.code == 1 and "FAIL" in run.out
    assert "see each other" in " ".join(run.out.split())


def test_trainers_that_nobody_can_run_are_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pack("verify", packed, "--trainer", "nemo")
    assert run.code == 2 and "'nemo'" in run.err and "trl, hf" in run.err
    monkeypatch.setitem(sys.modules, "trl", None)
    run = pack("verify", packed, "--trainer", "trl")
    assert run.code == 2 and "trl is missing" in run.err and "pip install" in run.err


def test_nothing_is_compared_where_no_two_sequences_fit(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "TRIED", 1)
    assert "losses not compared" in prove(packed, "hf")


def test_a_folder_that_is_damaged_is_not_given_to_a_trainer(tmp_path: Path) -> None:
    assert build(DEMO, tmp_path / "packed", "--limit", 20).code == 0
    shard = next((tmp_path / "packed").glob("shard-*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-8])
    run = pack("verify", tmp_path / "packed", "--trainer", "hf")
    assert run.code == 1 and "trainer hf" not in run.out
