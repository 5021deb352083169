"""Each method under LoRA, accumulating on two ranks: loss and gradients are those of the step unpacked."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from method_ranks import METHODS, step_rank  # noqa: E402
from ranks import run_two  # noqa: E402


def test_two_ranks_that_accumulate_under_lora_train_as_one_row_at_a_time() -> None:
    """BR-025, BR-026: sums are divided by what the whole step has, over micro-batches and ranks."""
    found = run_two(lambda rank, port: (step_rank, (rank, port)))
    assert [*found[0]] == [*found[1]] == [*METHODS]
    for apart in found.values():
        for method, (loss, gradients, largest) in apart.items():
            assert loss < 1e-5 and gradients < 1e-5, (method, loss, gradients)
            assert largest > 1e-3, method
