"""KTO over packed, labelled answers: python scripts/examples/kto.py"""

import tempfile
from pathlib import Path

import torch
from tiny import logits, packed, tiny_model

from padless.runtime.logps import sequence_logps
from padless.runtime.losses import kto_losses
from padless.runtime.stream import PackedStream

ROWS = [
    {"prompt": f"What is {n} + {n}? ", "completion": f"It is {2 * n + n % 2}.", "label": n % 2 == 0}
    for n in range(60)
]
"""For the estimate of KL: every prompt with the next one's answer."""
MISMATCHED = [{**row, "completion": ROWS[n - 1]["completion"], "label": True} for n, row in enumerate(ROWS)]


def ratios(model, reference, stream):
    """log p - log p of the reference, of all sequences."""
    found = []
    with torch.no_grad():
        for batch in stream:
            found.append(
                sequence_logps(logits(model, batch), batch) - sequence_logps(logits(reference, batch), batch)
            )
    return torch.cat(found)


def main() -> None:
    model, reference = tiny_model(), tiny_model().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        stream = PackedStream(packed(Path(folder), ROWS), packs_per_batch=2)
        mismatched = PackedStream(packed(Path(other), MISMATCHED))
        for epoch in range(4):
            kl = ratios(model, reference, mismatched).mean()  # at scale: of a few packs at each step
            total, count = 0.0, 0
            for batch in stream:
                logps = sequence_logps(logits(model, batch), batch)
                with torch.no_grad():
                    fixed = sequence_logps(logits(reference, batch), batch)
                losses = kto_losses(logps, fixed, batch["label"], kl=kl)
                losses.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                total, count = total + float(losses.detach().sum()), count + len(losses)
            print(f"epoch {epoch}: loss {total / count:.4f} over {count} answers")


if __name__ == "__main__":
    main()
