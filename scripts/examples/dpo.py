"""DPO over packed pairs: python scripts/examples/dpo.py"""

import tempfile
from pathlib import Path

import torch
from tiny import logits, packed, tiny_model

from padless.runtime.logps import sequence_logps
from padless.runtime.losses import dpo_losses, pairs_of
from padless.runtime.stream import PackedStream

ROWS = [
    {
        "prompt": f"What is {n} + {n}? ",
        "chosen": f"It is {2 * n}.",
        "rejected": f"Maybe {2 * n + 1}, who knows.",
    }
    for n in range(40)
]


def main() -> None:
    model, reference = tiny_model(), tiny_model().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        stream = PackedStream(packed(Path(folder), ROWS), packs_per_batch=2)  # the two of a pair share a pack
        for epoch in range(4):
            total, count = 0.0, 0
            for batch in stream:
                pairs = pairs_of(batch)
                logps = sequence_logps(logits(model, batch), batch)
                with torch.no_grad():
                    fixed = sequence_logps(logits(reference, batch), batch)
                losses = dpo_losses(logps, fixed, pairs, beta=0.1)
                (losses.sum() / len(losses)).backward()  # over accumulation and ranks: the step's pairs
                optimizer.step()
                optimizer.zero_grad()
                total, count = total + float(losses.detach().sum()), count + len(losses)
            print(f"epoch {epoch}: loss {total / count:.4f} over {count} pairs")


if __name__ == "__main__":
    main()
