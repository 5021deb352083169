"""GRPO over rollouts that are packed in memory: python scripts/examples/grpo.py"""

import numpy as np
import torch
from tiny import logits, tiny_model

from padless.runtime.in_memory import pack_sequences
from padless.runtime.logps import token_logps
from padless.runtime.loss import step_targets
from padless.runtime.losses import grpo_losses

GROUPS, ANSWERS, WANTED = 8, 8, 7


def rollouts(seed: int) -> list[dict]:
    """Stand-ins for what an inference engine samples; the reward counts a token."""
    made, found = np.random.default_rng(seed), []
    for group in range(GROUPS):
        prompt = made.integers(10, 40, size=made.integers(3, 12))
        answers = [made.integers(5, 15, size=made.integers(4, 40)) for _ in range(ANSWERS)]
        rewards = np.array([(answer == WANTED).mean() for answer in answers])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for answer, reward, advantage in zip(answers, rewards, advantages, strict=True):
            found.append(
                {
                    "prompt_ids": prompt,
                    "response_ids": answer,
                    "advantages": np.full(len(answer), advantage, dtype=np.float32),
                    "reward": float(reward),
                    "group_id": group,
                }
            )
    return found


def main() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        batches = pack_sequences(rollouts(step), max_tokens=512)  # this rank's, as many as on every rank
        for batch in batches:  # the sampling engine gives these, too: its own old_logprobs
            with torch.no_grad():
                batch["old_logprobs"] = token_logps(logits(model, batch), batch)
        for _ in range(2):  # two updates on the same rollouts: the second one is clipped
            targets, total = step_targets(batches), 0.0
            for batch in batches:
                losses = grpo_losses(token_logps(logits(model, batch), batch), batch)
                (losses.sum() / targets).backward()
                total += float(losses.detach().sum()) / targets
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {total:+.5f} over {targets} tokens in {len(batches)} micro-batches")


if __name__ == "__main__":
    main()
