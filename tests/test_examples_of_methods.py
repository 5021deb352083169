"""The examples of training methods run as they are written, and what they train gets better."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parent.parent / "scripts" / "examples"
Run = Callable[[str], str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as `python scripts/examples/NAME` does, and give what it prints."""

    def printed(name: str) -> str:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize("name", ["dpo.py", "kto.py", "reward.py"])
def test_losses_over_answers_fall(name: str, run: Run) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) over", run(name))]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.02


def test_documents_with_the_middle_last_are_learnt(run: Run) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) over", run("pretraining.py"))]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.02


def test_a_model_comes_nearer_to_its_teacher(run: Run) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) over", run("distillation.py"))]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.02


def test_a_hybrid_model_is_learnt_one_by_one_where_no_kernel_keeps_sequences_apart(run: Run) -> None:
    printed = run("hybrid.py")
    assert "one sequence at a time: " in printed and "without `causal_conv1d`" in printed
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) over", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5


def test_what_is_said_of_images_is_learnt(run: Run) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) over 36 images", run("vision_language.py"))]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5


def test_grpo_improves_its_objective_on_the_same_rollouts(run: Run) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([+-][0-9.]+) over", run("grpo.py"))]
    assert len(losses) == 8
    assert all(second < first for first, second in zip(losses[::2], losses[1::2], strict=True))


def test_evaluation_names_the_hardest_records(run: Run) -> None:
    printed = run("evaluation.py")
    assert re.search(r"perplexity [0-9.]+ over [0-9]+ tokens", printed)
    assert len(re.findall(r"^record [0-9]+: loss", printed, re.MULTILINE)) == 3
