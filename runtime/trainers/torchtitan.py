"""Packs in torchtitan: a data loader for its configuration that reads a packed folder as it lies there.

    Trainer.Config(
        ...,
        dataloader=PacksDataLoader.Config(dataset_path="packed"),
        training=TrainingConfig(seq_len=8192, local_batch_size=4, ...),  # the folder's max_length; packs
    )

torchtitan sees a new sequence where positions begin at 0 again, under FlexAttention and its varlen
attention. Its plain SDPA attention looks at no boundaries at all, and is not for packs.
Rows are filled up to seq_len, with a sequence of its own that is trained nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader

from padless.runtime.format import IGNORE_INDEX
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch

Row = tuple[dict[str, Tensor], Tensor]
"""`input` and `positions`, and the label of the token after each one: int64 [seq_len] each."""


class PacksDataLoader(ParallelAwareDataloader):  # type: ignore[misc]
    """This data-parallel rank's packs, `local_batch_size` a batch; its state is torchtitan's checkpoint's."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """`dataset_path`, a packed folder or its URL, and torchtitan's settings of workers."""

        split: str | None = None
        """Which split of a folder of several."""

        infinite: bool = True
        """Epoch after epoch, each in an order of its own. False is for a validator: every pack once."""

        seed: int = 0
        """Of the order."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **_: Any,
    ) -> None:
        """Made by torchtitan's trainer. Raises ValueError for a folder whose packs are longer than seq_len,
        with further columns (weights, images), which its training would not look at, or with fewer packs
        than workers; and what PackedStream raises.
        """
        if not config.dataset_path:
            raise ValueError("dataset_path is not set: give the packed folder")
        stream = PackedStream(
            config.dataset_path,
            split=config.split,
            rank=dp_rank,
            world_size=dp_world_size,
            seed=config.seed,
            shuffle=config.infinite,
            remainder="drop" if config.infinite else "pad",
        )
        length = stream.reader.buckets[-1].max_length
        if seq_len < length:
            raise ValueError(
                f"seq_len is {seq_len}, and {config.dataset_path} has packs of up to {length} tokens: set "
                "seq_len to that, or make shorter packs with pack-dataset repack --max-length"
            )
        if further := [column.name for column in stream.reader.manifest.extras]:
            raise ValueError(
                f"{config.dataset_path} has the further columns {', '.join(further)}, which torchtitan's "
                "training does not look at: build it from records without what gives them, or train in a "
                "loop that uses them"
            )
        if config.infinite and len(stream) < config.num_workers:
            # A worker would look for its first pack for ever, and the trainer would wait for it.
            raise ValueError(
                f"num_workers is {config.num_workers}, which is more than the packs that an epoch of "
                f"{config.dataset_path} has for a rank: set num_workers to {len(stream)} at most"
            )
        super().__init__(
            _Rows(stream, seq_len, infinite=config.infinite),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            snapshot_every_n_steps=snapshot_every_n_steps,
            batch_size=local_batch_size,
        )


class _Rows(IterableDataset[Row], Stateful):
    """A stream's packs, filled up to one length."""

    def __init__(self, stream: PackedStream, seq_len: int, *, infinite: bool) -> None:
        self._stream, self._seq_len, self._infinite = stream, seq_len, infinite

    def __iter__(self) -> Iterator[Row]:
        while True:
            for batch in self._stream:
                yield _row(batch, self._seq_len)
            if not self._infinite:
                return

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stream.load_state_dict(state_dict)


def _row(batch: VarlenBatch, seq_len: int) -> Row:
    """One pack; a sequence's first label is -100, so no sequence foretells the next one's first token."""
    ids, positions = batch["input_ids"][0], batch["position_ids"][0]
    left = seq_len - len(ids)
    labels = torch.cat([batch["labels"][0, 1:], torch.full((left + 1,), IGNORE_INDEX)])
    inputs = torch.cat([ids, torch.zeros(left, dtype=torch.int64)])
    return {"input": inputs, "positions": torch.cat([positions, torch.arange(left)])}, labels
