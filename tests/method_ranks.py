"""A step of each method as one of two ranks, with LoRA and accumulation, beside the same step unpacked.

In a module that a spawned process can import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from unpacked import VOCAB, alone, batch_of, logits_of, random_sequences, tiny_model

from padless.runtime.logps import sequence_ends, sequence_logps, token_logps
from padless.runtime.loss import step_targets, step_total
from padless.runtime.losses import (
    distillation_losses,
    dpo_losses,
    grpo_losses,
    kto_losses,
    pairs_of,
    reward_losses,
)
from padless.runtime.models import prepare_model
from padless.runtime.varlen_batch import VarlenBatch

CANDIDATES = 3
SEQUENCES = random_sequences([8, 6, 5, 3, 9, 4, 7, 2], [3, 3, 0, 2, 4, 2, 1, 1])
"""Pairs side by side, the chosen one first; a micro-batch has one pair, a rank two micro-batches."""
MARGIN, KL = [0.0, 0.5, 1.0, 1.5], 0.1
_made = torch.Generator().manual_seed(0)
ADVANTAGES = [torch.randn(len(ids), generator=_made).tolist() for ids, _ in SEQUENCES]
OLD = [(torch.randn(len(ids), generator=_made) * 0.1 - 4).tolist() for ids, _ in SEQUENCES]
TEACHER_IDS = [
    torch.stack([torch.randperm(VOCAB, generator=_made)[:CANDIDATES] for _ in ids]).tolist()
    for ids, _ in SEQUENCES
]
TEACHER_LOGPS = [(torch.randn(len(ids), CANDIDATES, generator=_made) - 3).tolist() for ids, _ in SEQUENCES]


class Tuned(torch.nn.Module):
    """A tiny model under LoRA, and a head of rewards that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        import peft

        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
        )
        base = tiny_model()
        torch.manual_seed(1)
        self.model: Any = peft.get_peft_model(base, config)
        self.head = torch.nn.Linear(32, 1, bias=False)

    def scores(self, inputs: dict[str, Any]) -> Tensor:
        """[T]."""
        hidden = self.model.get_base_model().model(**inputs).last_hidden_state[0]
        scores: Tensor = self.head(hidden)[:, 0]
        return scores

    def fixed(self, logps: Callable[[], Tensor]) -> Tensor:
        """Those of the model without its adapters, the usual reference under LoRA."""
        with torch.no_grad(), self.model.disable_adapter():
            return logps()


def micro_batch(pair: int) -> VarlenBatch:
    two = slice(2 * pair, 2 * pair + 2)
    return batch_of(
        SEQUENCES[two],
        token={
            "advantages": ADVANTAGES[two],
            "old_logprobs": OLD[two],
            "teacher_ids": TEACHER_IDS[two],
            "teacher_logprobs": TEACHER_LOGPS[two],
        },
        sequence={
            "pair_id": [pair, pair],
            "is_chosen": [1, 0],
            "label": [1, 0],
            "margin": [MARGIN[pair]] * 2,
        },
    )


def _dpo(tuned: Tuned, batch: VarlenBatch) -> Tensor:
    def logps() -> Tensor:
        return sequence_logps(logits_of(tuned.model, batch), batch)

    return dpo_losses(logps(), tuned.fixed(logps), pairs_of(batch))


def _kto(tuned: Tuned, batch: VarlenBatch) -> Tensor:
    def logps() -> Tensor:
        return sequence_logps(logits_of(tuned.model, batch), batch)

    return kto_losses(logps(), tuned.fixed(logps), batch["label"], kl=KL)


def _reward(tuned: Tuned, batch: VarlenBatch) -> Tensor:
    inputs = {name: value for name, value in batch.model_inputs().items() if name != "labels"}
    return reward_losses(tuned.scores(inputs)[sequence_ends(batch)], pairs_of(batch), margin=batch["margin"])


METHODS: dict[str, tuple[Callable[[Tuned, VarlenBatch], Tensor], str]] = {
    "sft": (lambda tuned, batch: -token_logps(logits_of(tuned.model, batch), batch), "targets"),
    "dpo": (_dpo, "losses"),
    "kto": (_kto, "losses"),
    "reward": (_reward, "losses"),
    "grpo": (
        lambda tuned, batch: grpo_losses(token_logps(logits_of(tuned.model, batch), batch), batch),
        "targets",
    ),
    "distillation": (
        lambda tuned, batch: distillation_losses(logits_of(tuned.model, batch), batch),
        "targets",
    ),
}
"""Losses of a micro-batch, and what the step's sum is divided by."""


def unpacked(tuned: Tuned, method: str) -> Tensor:
    """The mean of the whole step, one sequence at a time, by the papers' formulas."""

    def ratio(number: int) -> Tensor:
        ours = alone(tuned.model, *SEQUENCES[number]).sum()
        return ours - tuned.fixed(lambda: alone(tuned.model, *SEQUENCES[number]).sum())

    def score(number: int) -> Tensor:
        return tuned.scores({"input_ids": torch.tensor([SEQUENCES[number][0]])})[-1]

    numbers, pairs = range(len(SEQUENCES)), range(len(SEQUENCES) // 2)
    if method == "dpo":
        return torch.stack([-logsigmoid(0.1 * (ratio(2 * n) - ratio(2 * n + 1))) for n in pairs]).mean()
    if method == "kto":
        signs = [1 if n % 2 == 0 else -1 for n in numbers]
        return torch.stack([1 - torch.sigmoid(0.1 * signs[n] * (ratio(n) - KL)) for n in numbers]).mean()
    if method == "reward":
        apart = [score(2 * n) - score(2 * n + 1) - MARGIN[n] for n in pairs]
        return -logsigmoid(torch.stack(apart)).mean()
    found = []
    for number, (ids, prompt) in enumerate(SEQUENCES):
        logps = tuned.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(max(prompt, 1), len(ids)):
            mine = logps[place - 1]
            if method == "sft":
                found.append(-mine[ids[place]])
            elif method == "grpo":
                moved, advantage = torch.exp(mine[ids[place]] - OLD[number][place]), ADVANTAGES[number][place]
                found.append(-torch.minimum(moved * advantage, moved.clamp(0.8, 1.2) * advantage))
            else:
                theirs = torch.tensor(TEACHER_LOGPS[number][place])
                ours = mine[torch.tensor(TEACHER_IDS[number][place])]
                rest = (1 - theirs.exp().sum()).clamp(min=1e-7), (1 - ours.exp().sum()).clamp(min=1e-7)
                apart = (theirs.exp() * (theirs - ours)).sum()
                found.append(apart + rest[0] * (rest[0].log() - rest[1].log()))
    return torch.stack(found).mean()


def step_rank(rank: int, port: int, results: Any) -> None:
    """Put, for each method, how far loss and gradients are from those of the step unpacked."""
    address = f"tcp://127.0.0.1:{port}"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    tuned, plain = Tuned(), Tuned()
    prepare_model(tuned.model, check=True)
    batches = [micro_batch(2 * rank + number) for number in range(2)]
    found = {}
    for method, (losses_of, per) in METHODS.items():
        tuned.zero_grad()
        losses = [losses_of(tuned, batch) for batch in batches]
        total = step_targets(batches) if per == "targets" else step_total(sum(map(len, losses)))
        loss = torch.zeros(())
        for mine in losses:
            (mine.sum() / total).backward()
            loss += mine.detach().sum() / total
        torch.distributed.all_reduce(loss)
        trained = [one for one in tuned.parameters() if one.requires_grad]
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
        for grad in grads:
            torch.distributed.all_reduce(grad)
        plain.zero_grad()
        wanted = unpacked(plain, method)
        wanted.backward()
        theirs = [one.grad for one in plain.parameters() if one.requires_grad]
        apart = [
            float((grad - (0 if other is None else other)).abs().max())
            for grad, other in zip(grads, theirs, strict=True)
        ]
        largest = max(float(grad.abs().max()) for grad in grads)
        found[method] = (abs(float(loss - wanted)), max(apart), largest)
    results.put((rank, found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
