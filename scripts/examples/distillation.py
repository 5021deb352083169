"""Distillation from a teacher's best candidates: python scripts/examples/distillation.py"""

import tempfile
from pathlib import Path

import torch
from tiny import logits, packed, tiny_model

from padless.runtime.loss import step_targets
from padless.runtime.losses import distillation_losses
from padless.runtime.stream import PackedStream

CANDIDATES, VOCABULARY = 8, 2048


def taught(count: int) -> list[dict]:
    """Records as an inference engine gives them: ids, and for each what the teacher held for likely."""
    teacher, made = tiny_model(seed=1), torch.Generator().manual_seed(0)
    teacher.lm_head.weight.data.mul_(20)  # a random model holds all tokens for about as likely
    rows = []
    for _ in range(count):
        length = int(torch.randint(8, 60, (), generator=made))
        ids = torch.randint(5, 60, (length,), generator=made)
        with torch.no_grad():
            # A model may have more rows than its tokenizer has tokens.
            logps = teacher(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)[:, :VOCABULARY]
        best = logps.topk(CANDIDATES)
        rows.append(
            {
                "input_ids": ids.tolist(),
                # Row t is about token t, so the first has none.
                "teacher_ids": [None, *best.indices.tolist()],
                "teacher_logprobs": [None, *best.values.tolist()],
            }
        )
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = packed(Path(scratch), taught(64))
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for epoch in range(4):
            batches = [*PackedStream(folder, packs_per_batch=2, epoch=epoch)]
            targets, total = step_targets(batches), 0.0
            for batch in batches:
                losses = distillation_losses(logits(model, batch), batch)
                (losses.sum() / targets).backward()
                total += float(losses.detach().sum()) / targets
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch}: loss {total:.5f} over {targets} tokens, {CANDIDATES} candidates each")


if __name__ == "__main__":
    main()
