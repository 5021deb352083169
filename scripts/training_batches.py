"""Batches of a packed folder for the arms of bench_training.py: its sequences padded, or its packs.

Only the reader is needed: the machine that trains has no packer. What arms are compared on are the same
sequences in the same drawn order.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from padless.runtime.collate import collate
from padless.runtime.prefetch import Prefetch
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch

GROUP = 50
"""Batches whose sequences are sorted by length together, as transformers' group_by_length does it."""

Sequence = tuple[np.ndarray, np.ndarray]
"""Ids and labels, [n] each."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a model is called with, and what it holds."""

    inputs: dict[str, Any]
    tokens: int
    """Real ones."""
    targets: int
    """Trained ones."""
    sequences: int | None = None
    """How many there are, where what is filled up counts as more."""
    shape_number: int = 0
    """Which of a few shapes it was filled up to."""

    @property
    def lengths(self) -> list[int]:
        """Of its sequences; waits for the device."""
        if "packed_seq_lengths" in self.inputs:  # Unsloth's
            lengths = self.inputs["packed_seq_lengths"]
        elif "cu_seq_lens_q" in self.inputs:
            lengths = self.inputs["cu_seq_lens_q"].diff()
        else:
            lengths = self.inputs["attention_mask"].sum(1)
        return [int(length) for length in lengths.tolist()[: self.sequences]]

    @property
    def computed(self) -> int:
        """Tokens that the model computes, padding among them."""
        return int(self.inputs["input_ids"].numel())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its ids."""
        return tuple(self.inputs["input_ids"].shape)


def sequences_of(path: Path) -> list[Sequence]:
    """All sequences of a folder."""
    reader = PackedReader(path)
    found = []
    for number in range(len(reader)):
        pack = reader[number]
        ends = np.cumsum(pack.seq_lengths).tolist()
        for length, end in zip(pack.seq_lengths.tolist(), ends, strict=True):
            found.append((pack.input_ids[end - length : end], pack.labels[end - length : end]))
    return found


def drawn(sequences: list[Sequence], rows: int, *, grouped: bool, seed: int = 0) -> list[list[Sequence]]:
    """Batches of so many sequences, in random order; grouped: each with others of like length."""
    order = np.random.default_rng(seed).permutation(len(sequences))
    if grouped:
        lengths = np.array([len(ids) for ids, _ in sequences])
        parts = (order[first : first + GROUP * rows] for first in range(0, len(order), GROUP * rows))
        order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    batches = [order[first : first + rows] for first in range(0, len(order) - rows + 1, rows)]
    if grouped:  # in another order, or the longest of each group would come first
        batches = [batches[number] for number in np.random.default_rng(seed).permutation(len(batches))]
    return [[sequences[number] for number in batch] for batch in batches]


def widest(batches: list[list[Sequence]]) -> list[Sequence]:
    """The batch that computes most when it is padded."""
    return max(batches, key=lambda batch: len(batch) * max(len(ids) for ids, _ in batch))


def padded(sequences: list[Sequence], device: str) -> Batch:
    """As transformers' default collator pads: to the longest of the batch, with an attention mask."""
    longest = max(len(ids) for ids, _ in sequences)
    shape = len(sequences), longest
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, -100)
    for row, (tokens, wanted) in enumerate(sequences):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        labels[row, : len(tokens)] = torch.from_numpy(wanted.astype(np.int64))
        mask[row, : len(tokens)] = 1
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return Batch(
        inputs={name: x.to(device) for name, x in inputs.items()} | {"use_cache": False},
        tokens=int(mask.sum()),
        targets=int((labels != -100).sum()),
    )


def packed(sequences: list[Sequence], device: str) -> Batch:
    """The same sequences in one row."""
    row = {
        "input_ids": np.concatenate([ids for ids, _ in sequences]),
        "labels": np.concatenate([labels for _, labels in sequences]),
        "seq_lengths": np.array([len(ids) for ids, _ in sequences], dtype=np.int32),
        "sequence_ids": np.arange(len(sequences)),
    }
    return of_varlen(collate([row]), device)


def of_varlen(batch: VarlenBatch, device: str) -> Batch:
    """A batch of padless: ids, labels, positions and boundaries, which is also what TRL's collator gives."""
    inputs = batch.to(device).model_inputs()
    return Batch(inputs=inputs, tokens=inputs["input_ids"].numel(), targets=batch.num_targets)


def streamed(path: Path, packs: int, device: str) -> Generator[Batch, None, None]:
    """An endless stream of packs, made in a thread and copied beside the step, as in training."""
    batches = Prefetch(PackedStream(path, packs_per_batch=packs, rank=0, world_size=1), device=device)
    while True:
        for batch in batches:
            yield of_varlen(batch, device)
