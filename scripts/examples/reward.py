"""A reward model over packed pairs with margins: python scripts/examples/reward.py"""

import tempfile
from pathlib import Path

import torch
from dpo import ROWS
from tiny import packed, tiny_model

from padless.runtime.logps import sequence_ends
from padless.runtime.losses import pairs_of, reward_losses
from padless.runtime.stream import PackedStream

MARGINS = [{**row, "margin": 1.0 if number % 2 else 0.5} for number, row in enumerate(ROWS)]
"""How much better the chosen answer is; a folder of records without has no such column."""


def main() -> None:
    model = tiny_model()
    head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        stream = PackedStream(packed(Path(folder), MARGINS), packs_per_batch=2)
        for epoch in range(4):
            total, count = 0.0, 0
            for batch in stream:
                inputs = {name: value for name, value in batch.model_inputs().items() if name != "labels"}
                hidden = model.model(**inputs).last_hidden_state[0]
                rewards = head(hidden[sequence_ends(batch)])[:, 0]  # [N], by boundaries, never by padding
                losses = reward_losses(rewards, pairs_of(batch), margin=batch["margin"])
                losses.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                total, count = total + float(losses.detach().sum()), count + len(losses)
            print(f"epoch {epoch}: loss {total / count:.4f} over {count} pairs")


if __name__ == "__main__":
    main()
