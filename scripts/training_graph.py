"""Training steps under CUDA graphs: batches of a few shapes, and one launch for a step.

The model is launched from Python once for each shape, while it is captured; a step after that copies a batch
over the captured one and replays. What a graph keeps holds for all batches of its shape: the number of
sequences, the longest one and the most trained tokens, for which attention and loss are computed. Packs of
short sequences hold many and train little of them, so a graph for all would compute for the worst of either.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_batches import Batch
from training_clock import Marks, Trainer, mark

from padless.runtime.errors import CollateError
from padless.runtime.reader import PackedReader
from padless.runtime.static import pad_batch
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch

WARM_UP = 3
"""Steps before the first capture, on a stream of their own, as torch asks for."""
SHAPES = 6
FULL = 15 / 16
"""Packs less full are left out: what fills them up would be the longest sequence of all."""


def shapes_of(folder: Path, packs: int) -> list[dict[str, int]]:
    """What `pad_batch` is told for batches of so many packs, of few sequences to many; the last fits all."""
    table = PackedReader(folder).sequence_columns("pack", "length", "num_targets")
    packed = table["pack"] >= 0
    pack, length, trained = (table[name][packed] for name in ("pack", "length", "num_targets"))
    sizes, counts = np.bincount(pack, weights=length).astype(int), np.bincount(pack)
    targets, longest = np.bincount(pack, weights=trained).astype(int), np.zeros_like(counts)
    np.maximum.at(longest, pack, length)
    tokens = packs * -(-int(sizes.max()) // 128) * 128
    kept = np.flatnonzero(sizes >= FULL * sizes.max())
    filled = tokens - packs * int(sizes[kept].min())
    parts = [part for part in np.array_split(kept[np.argsort(counts[kept])], SHAPES) if len(part)]
    return [
        {
            "tokens": tokens,
            "sequences": packs * int(counts[part].max()) + 1,
            "max_length": min(tokens, max(int(longest[part].max()), filled)),
            "targets": packs * int(targets[part].max()),
        }
        for part in (*parts, kept)
    ]


def of_few_shapes(folder: Path, packs: int, device: str) -> Generator[Batch, None, None]:
    """An endless stream of packs, filled up to one of a few shapes; one that is not full is left out."""
    shapes = shapes_of(folder, packs)
    stream = PackedStream(folder, packs_per_batch=packs, rank=0, world_size=1)
    while True:
        for batch in stream:
            real, count = batch["input_ids"].numel(), len(batch["cu_seq_lens_q"]) - 1
            number, filled = _filled(batch, shapes)
            if filled is None:
                continue
            if device != "cpu":
                filled = filled.pin_memory()
            inputs = filled.to(device, non_blocking=True).model_inputs()
            known = {"tokens": real, "targets": batch.num_targets, "sequences": count}
            yield Batch(inputs=inputs, **known, shape_number=number)


def _filled(batch: VarlenBatch, shapes: list[dict[str, int]]) -> tuple[int, VarlenBatch | None]:
    """In the first shape that it fits, and which that is; None where it fits none."""
    for number, shape in enumerate(shapes):
        with suppress(CollateError):
            return number, pad_batch(batch, **shape)
    return 0, None


@dataclass(kw_only=True)
class GraphTrainer(Trainer):
    """A model and its optimizer (capturable), whose steps are replayed."""

    graphs: dict[int, tuple[Batch, Any, torch.Tensor]] = field(default_factory=dict)
    """For each shape the batch that was captured, the graph, and the loss that it writes."""

    def capture(self, batch: Batch) -> None:
        """Run some steps on a batch, then record one on batches of its shape."""
        # A number would be recorded as it is.
        targets = torch.tensor(float(batch.targets), device=batch.inputs["input_ids"].device)
        held = replace(batch, targets=targets)  # type: ignore[arg-type]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(1 if self.graphs else WARM_UP):
                super().step(held)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)  # those of another graph
        # One is replayed after the other, and none needs what another left: they share their memory.
        pool = next((graph.pool() for _, graph, _ in self.graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            loss = self.gradients(held)
            self.optimizer.step()
        self.graphs[batch.shape_number] = held, graph, loss

    def step(self, batch: Batch) -> tuple[Marks, torch.Tensor]:
        """One update; its parts cannot be told apart."""
        if batch.shape_number not in self.graphs:
            self.capture(batch)
        held, graph, loss = self.graphs[batch.shape_number]
        began = mark()
        for name, value in held.inputs.items():
            if isinstance(value, torch.Tensor):
                value.copy_(batch.inputs[name], non_blocking=True)
        held.targets.fill_(batch.targets)  # type: ignore[attr-defined]
        graph.replay()
        ended = mark()
        return (began, ended, ended), loss.clone()
