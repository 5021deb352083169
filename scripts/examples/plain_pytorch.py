"""A loop of your own: batches from a PackedStream, everything that the model is told in model_inputs()."""

from __future__ import annotations

import torch
from demo import demo_model, demo_packs

from padless.runtime.stream import PackedStream

model = demo_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stream = PackedStream(demo_packs().path, packs_per_batch=2)

for step, batch in enumerate(stream):
    loss = model(**batch.model_inputs()).loss  # on a GPU: batch.to("cuda").model_inputs()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f} over {batch['num_targets']} trained tokens")
    state = stream.state_dict()  # load_state_dict(state) goes on with the next batch
