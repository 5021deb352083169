"""Evaluation of packed sets: the perplexity of the sequences alone, and each one's loss with its record."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from building import TOKENIZER, built, write_lines  # noqa: E402
from unpacked import alone, random_sequences, tiny_model  # noqa: E402

from padless.runtime.evaluate import evaluate  # noqa: E402

LENGTHS, PROMPTS = [7, 3, 12, 5, 9, 2, 8, 4, 6, 10], [2, 1, 6, 0, 3, 1, 7, 2, 4, 1]
SEQUENCES = random_sequences(LENGTHS, PROMPTS)


def folder(path: Path, sequences: list[tuple[list[int], int]], *options: object) -> Path:
    rows = [
        {"input_ids": ids, "loss_mask": [int(n >= prompt) for n in range(len(ids))]}
        for ids, prompt in sequences
    ]
    source = write_lines(path / "rows.jsonl", rows)
    built(source, path / "packed", "--tokenizer", TOKENIZER, "--max-length", 16, *options)
    return path / "packed"


@pytest.mark.parametrize("strategy", ["bfd", "none"])
@pytest.mark.parametrize("packs_per_batch", [1, 4])
def test_packed_perplexity_is_that_of_the_sequences_alone(
    tmp_path: Path, strategy: str, packs_per_batch: int
) -> None:
    """BR-174: the same sum and count packed or not, whatever the batch."""
    model: Any = tiny_model().train()
    found = evaluate(
        model, folder(tmp_path, SEQUENCES, "--strategy", strategy), packs_per_batch=packs_per_batch
    )
    each = [-alone(model, *one).detach().double() for one in SEQUENCES]
    assert found.targets == sum(len(losses) for losses in each)
    assert found.loss == pytest.approx(float(torch.cat(each).mean()), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert model.training
    sequences = found.sequences
    assert sequences["record"].tolist() == sequences["row"].tolist() == [*range(10)]
    assert sequences["targets"].tolist() == [len(losses) for losses in each]
    assert sequences["loss"].tolist() == pytest.approx([float(one.sum()) for one in each], abs=1e-4)
    means = [float(losses.mean()) for losses in each]
    worst = found.worst(3)
    assert [row["record"] for row in worst] == sorted(range(10), key=lambda n: -means[n])[:3]


def test_one_short_row_is_counted_once(tmp_path: Path) -> None:
    """BR-175: one row of 3 tokens, two packs a batch."""
    model = tiny_model()
    found = evaluate(model, folder(tmp_path, [([4, 5, 6], 1)]), packs_per_batch=2)
    assert found.targets == 2 and len(found.sequences["loss"]) == 1
    assert found.loss == pytest.approx(float(-alone(model, [4, 5, 6], 1).detach().mean()), abs=1e-5)


def test_a_sequence_without_targets_counts_for_nothing(tmp_path: Path) -> None:
    """BR-049: such a record is left out of the folder, and the loss is that of the others, finite."""
    sequences = [*SEQUENCES[:3], ([8, 9, 8], 3)]
    found = evaluate(tiny_model(), folder(tmp_path, sequences, "--max-drop-share", 1))
    assert found.sequences["record"].tolist() == [0, 1, 2] and math.isfinite(found.loss)
