"""accelerate deals the batches of a PackBatchSampler to its ranks: as many to each, none twice."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from demo import demo_model, demo_packs
from torch.utils.data import DataLoader

from padless.runtime.collate import collate
from padless.runtime.dataset import PackBatchSampler

accelerator = Accelerator(cpu=True)
packs = demo_packs()
sampler = PackBatchSampler(packs, packs_per_batch=2, world_size=accelerator.num_processes)
loader = DataLoader(packs, batch_sampler=sampler, collate_fn=collate)
model = demo_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, batch in enumerate(loader):
    loss = model(**batch.model_inputs()).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.4f}")
