"""Training steps under a CUDA graph: batches of one shape, and one launch for a step.

The model is launched from Python once, while it is captured; each step after that copies a batch over the
captured one and replays. What a graph keeps is the same in all batches: shapes, the longest sequence and the
most trained tokens that there can be, for which attention and loss are computed. So it pays where launching
takes longer than computing.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch
from training_batches import Batch
from training_clock import Marks, Trainer, mark

from padless.runtime.reader import PackedReader
from padless.runtime.static import pad_batch
from padless.runtime.stream import PackedStream

WARM_UP = 3
"""Steps before the capture, on a stream of their own, as torch asks for."""


def one_shape(folder: Path, packs: int, device: str) -> Generator[Batch, None, None]:
    """An endless stream of packs, filled up to one number of tokens and of sequences."""
    reader = PackedReader(folder)
    table = reader.sequence_columns("pack", "length", "num_targets")
    packed = table["pack"] >= 0
    pack, length, trained = (table[name][packed] for name in ("pack", "length", "num_targets"))
    sizes = np.bincount(pack, weights=length)
    tokens = packs * -(-int(sizes.max()) // 128) * 128
    longest = max(int(length.max()), tokens - packs * int(sizes.min()))
    shape = {
        "tokens": tokens,
        "sequences": packs * int(np.bincount(pack).max()) + 1,
        "max_length": min(1 << (longest - 1).bit_length(), tokens),
        "targets": packs * int(np.bincount(pack, weights=trained).max()),
    }
    stream = PackedStream(folder, packs_per_batch=packs, rank=0, world_size=1)
    while True:
        for batch in stream:
            real, count = batch["input_ids"].numel(), len(batch["cu_seq_lens_q"]) - 1
            filled = pad_batch(batch, **shape)
            if device != "cpu":
                filled = filled.pin_memory()
            inputs = filled.to(device, non_blocking=True).model_inputs()
            yield Batch(inputs=inputs, tokens=real, targets=batch.num_targets, sequences=count)


class GraphTrainer(Trainer):
    """A model and its optimizer (capturable), whose steps are replayed."""

    def capture(self, batch: Batch) -> None:
        """Run some steps on a batch, then record one."""
        # A number would be recorded as it is.
        targets = torch.tensor(float(batch.targets), device=batch.inputs["input_ids"].device)
        held = Batch(inputs=batch.inputs, tokens=batch.tokens, targets=targets)  # type: ignore[arg-type]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                super().step(held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.gradients(held)
            self.optimizer.step()
        self.held, self.graph, self.loss = held, graph, loss

    def step(self, batch: Batch) -> tuple[Marks, torch.Tensor]:
        """One update; its parts cannot be told apart."""
        began = mark()
        for name, value in self.held.inputs.items():
            if isinstance(value, torch.Tensor):
                value.copy_(batch.inputs[name], non_blocking=True)
        self.held.targets.fill_(batch.targets)  # type: ignore[attr-defined]
        self.graph.replay()
        ended = mark()
        return (began, ended, ended), self.loss.clone()
