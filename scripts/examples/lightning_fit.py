"""Lightning: a PackedStream as the loader, which shards itself; use_distributed_sampler stays off."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from demo import demo_model, demo_packs
from torch.utils.data import DataLoader

from padless.runtime.stream import PackedStream


class Tuning(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = demo_model()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch.model_inputs()).loss
        print(f"step {number}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


stream = PackedStream(demo_packs().path, packs_per_batch=2)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Tuning(), DataLoader(stream, batch_size=None))
