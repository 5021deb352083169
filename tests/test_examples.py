"""The examples run, and each of their losses is that of the packs' sequences one by one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "scripts"))

import prove_trainers  # noqa: E402


@pytest.mark.parametrize("name", prove_trainers.EXAMPLES)
def test_an_example_trains_with_the_losses_of_the_single_sequences(name: str, tmp_path: Path) -> None:
    pytest.importorskip(prove_trainers.EXAMPLES[name])
    watch = prove_trainers.prove(name, tmp_path)
    assert watch.sequences > 10 * len(watch.apart)


SHARED = {"demo", "tiny"}
OF_METHODS = {"dpo", "kto", "reward", "grpo", "evaluation", "vision_language", "pretraining", "distillation"}
OF_METHODS |= {"hybrid"}
"""Examples that test_examples_of_methods runs."""


def test_every_example_is_tried() -> None:
    scripts = {path.stem for path in (ROOT / "scripts" / "examples").glob("*.py")}
    assert scripts == {*prove_trainers.EXAMPLES} | SHARED | OF_METHODS


def test_an_example_that_mixes_sequences_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from padless.runtime.varlen_batch import VarlenBatch

    plain = VarlenBatch.model_inputs

    def without_boundaries(self: VarlenBatch) -> dict[str, object]:
        return {name: value for name, value in plain(self).items() if name in ("input_ids", "labels")}

    monkeypatch.setattr(VarlenBatch, "model_inputs", without_boundaries)
    with pytest.raises(AssertionError, match="apart"):
        prove_trainers.prove("plain_pytorch", tmp_path)
