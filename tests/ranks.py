"""What a rank of its own process does in the tests: in a module that a spawned process can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from padless.runtime.loss import step_targets
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch


def numbers(batch: VarlenBatch) -> list[int]:
    """The sequence ids of a batch; none for one without targets."""
    return [number for number in batch["sequence_ids"].tolist() if number >= 0]


def train_rank(path: Path, rank: int, port: int, seeds: int, results: Any) -> None:
    """Go through an epoch for each seed in step with the other rank; put what was seen."""
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    seen, targets = [], []
    for seed in range(seeds):
        for balance, remainder in ((None, "drop"), ("attention", "pad")):
            stream = PackedStream(path, packs_per_batch=2, seed=seed, balance=balance, remainder=remainder)
            for batch in stream:
                # A rank with one batch less would leave the other one waiting here.
                targets.append((batch.num_targets, step_targets([batch])))
                seen.append(numbers(batch))
    results.put((rank, (seen, targets)))
    torch.distributed.destroy_process_group()
