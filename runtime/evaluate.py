"""Loss and perplexity of a packed set, as if every sequence went through the model alone, and each one's own.

    found = evaluate(prepare_model(model), "packed/validation")
    found.perplexity, found.worst(10)     # the ten sequences with the highest loss, by their records

Sums and counts are kept until the end, so neither packing nor the size of batches changes a figure, and a
sequence without trained tokens counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.logps import sequence_logps, sequence_targets
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The loss over all ranks, and the sequences of this one in the order of their records."""

    loss: float
    """Of a trained token, in nats; 0 where none is trained."""
    targets: int
    sequences: dict[str, Array]
    """[sequences] each: sequence_id, record, source (number), row, part, loss (their sum), targets."""

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:  # more than 709 nats: a model that is broken, and still has a loss
            return math.inf

    def worst(self, count: int) -> list[dict[str, Any]]:
        """The sequences of the highest loss for a token, as rows of `sequences`."""
        means = self.sequences["loss"] / np.maximum(self.sequences["targets"], 1)
        rows = np.argsort(-means, kind="stable")[:count].tolist()
        return [{name: column.item(row) for name, column in self.sequences.items()} for row in rows]


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    path: str | Path,
    *,
    packs_per_batch: int = 1,
    split: str | None = None,
    plan: str | None = None,
    device: torch.device | str | int = "cpu",
    with_pixels: Callable[[VarlenBatch], VarlenBatch] | None = None,
) -> Evaluation:
    """Run a packed folder through a causal model that keeps packed sequences apart, each pack once.

    Of a folder with images `with_pixels` gives each batch its pixels:
    `lambda batch: padless.runtime.pixels.with_pixels(batch, processor, root="photos")`. With
    torch.distributed each rank calls it, evaluates its part, and gets the loss over all. The model is in eval
    mode meanwhile. Raises what PackedStream raises.
    """
    reader = PackedReader(path, split=split)
    stream = PackedStream(
        path, packs_per_batch=packs_per_batch, shuffle=False, remainder="pad", split=split, plan=plan
    )
    was_training = model.training
    model.eval()
    ids: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    try:
        for batch in stream:
            batch = (batch if with_pixels is None else with_pixels(batch)).to(device)
            inputs = {name: value for name, value in batch.model_inputs().items() if name != "labels"}
            ids.append(batch["sequence_ids"])
            losses.append(-sequence_logps(model(**inputs).logits, batch).double())
            targets.append(sequence_targets(batch))
    finally:
        model.train(was_training)
    numbers = torch.cat(ids).cpu().numpy()
    found = {"loss": torch.cat(losses).cpu().numpy(), "targets": torch.cat(targets).long().cpu().numpy()}
    total = torch.tensor([found["loss"].sum(), found["targets"].sum()], dtype=torch.float64, device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    order = np.argsort(numbers, kind="stable")
    order = order[numbers[order] >= 0]  # below 0: a batch for a rank without packs
    table = reader.sequence_columns("record", "source", "row", "part")
    sequences = {"sequence_id": numbers[order]}
    sequences |= {name: column[numbers[order]] for name, column in table.items()}
    sequences |= {name: column[order] for name, column in found.items()}
    return Evaluation(
        loss=float(total[0] / total[1].clamp(min=1)), targets=int(total[1]), sequences=sequences
    )
