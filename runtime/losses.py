"""Losses over packed batches: DPO, SimPO, ORPO, KTO, reward models, GRPO, distillation.

    logps = sequence_logps(model(**inputs).logits, batch)              # [N], packer's pairs side by side
    losses = dpo_losses(logps, reference_logps, pairs_of(batch))       # [P], one a pair
    (losses.sum() / pairs_of_the_step).backward()

Each gives a loss for every pair, sequence or token instead of a mean: packs hold varying numbers of them, so
a mean over a batch would weigh batches, not pairs. Divide the sum by the whole step's number, over
accumulation and ranks. The formulas are those of the papers; each function names its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.varlen_batch import VarlenBatch


class Pairs(NamedTuple):
    """Places of the sequences of pairs in a batch, [P] int64 each."""

    chosen: torch.Tensor
    rejected: torch.Tensor


def pairs_of(batch: VarlenBatch) -> Pairs:
    """The pairs of a batch in the order of their `pair_id`, told by `is_chosen`; without other sequences.

    How many there are depends on the data, so on a GPU this waits for it: call it before `batch.to(device)`.
    Raises CollateError where the columns are missing, or half a pair is in another batch.
    """
    if missing := [name for name in ("pair_id", "is_chosen") if name not in batch]:
        raise CollateError(
            f"the batch has no {' and no '.join(missing)}: pairs come from folders of --format preference"
        )
    pair = batch["pair_id"]
    places = torch.nonzero(pair >= 0)[:, 0]
    key = 2 * pair[places].long() + (batch["is_chosen"][places] == 0)
    key, order = key.sort()
    places = places[order]
    chosen, rejected = places[0::2], places[1::2]
    whole = len(places) % 2 == 0 and bool((key[0::2] % 2 == 0).all() and (key[1::2] == key[0::2] + 1).all())
    if not whole:
        ids, counts = (key // 2).unique(return_counts=True)
        torn = ids[counts != 2].tolist() or ids.tolist()
        raise CollateError(
            f"pair_id {torn[0]} has not just one chosen and one rejected sequence in this batch: build the "
            "folder again, so that the two of a pair share a pack, and take whole packs of one folder"
        )
    return Pairs(chosen, rejected)


def dpo_losses(
    logps: torch.Tensor,
    reference_logps: torch.Tensor,
    pairs: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """DPO (Rafailov et al. 2023, eq. 7; label smoothing: cDPO, Mitchell 2023): [P].

    `logps` and `reference_logps` [N] are sums over each answer (`sequence_logps`).
    """
    ratios = logps - reference_logps
    margin = beta * (ratios[pairs.chosen] - ratios[pairs.rejected])
    losses = -logsigmoid(margin) * (1 - label_smoothing)
    return losses - logsigmoid(-margin) * label_smoothing


def simpo_losses(
    mean_logps: torch.Tensor, pairs: Pairs, *, beta: float = 2.0, gamma: float = 1.0
) -> torch.Tensor:
    """SimPO (Meng et al. 2024, eq. 6), no reference model: [P].

    `mean_logps` [N] are means over each answer (`sequence_logps(..., mean=True)`), `gamma` the wanted margin.
    """
    return -logsigmoid(beta * (mean_logps[pairs.chosen] - mean_logps[pairs.rejected]) - gamma)


def orpo_losses(mean_logps: torch.Tensor, pairs: Pairs, *, weight: float = 0.1) -> torch.Tensor:
    """ORPO (Hong et al. 2024, eq. 6 and 7), no reference model: [P].

    The chosen answer's negative `mean_logps` [N] and, by `weight`, the odds ratio of the two answers.
    """
    chosen, rejected = mean_logps[pairs.chosen], mean_logps[pairs.rejected]
    odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen - weight * logsigmoid(odds)


def kto_losses(
    logps: torch.Tensor,
    reference_logps: torch.Tensor,
    label: torch.Tensor,
    *,
    kl: torch.Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """KTO (Ethayarajh et al. 2024, eq. 8): [N], 0 for sequences without a label.

    `label` [N] is the batch's column: 1 wanted, 0 unwanted, -1 none. `kl` is the estimate of the policy's
    distance from the reference, over the whole step (mean of `logps - reference_logps` of prompts with other
    prompts' answers); it is clamped at 0, and no gradient flows through it.
    """
    ratios = logps - reference_logps
    anchor = torch.as_tensor(kl, dtype=ratios.dtype, device=ratios.device).detach().clamp(min=0)
    wanted = desirable_weight * (1 - torch.sigmoid(beta * (ratios - anchor)))
    unwanted = undesirable_weight * (1 - torch.sigmoid(beta * (anchor - ratios)))
    return torch.where(label == 1, wanted, torch.where(label == 0, unwanted, 0))


def reward_losses(
    rewards: torch.Tensor, pairs: Pairs, *, margin: torch.Tensor | None = None, center: float = 0.0
) -> torch.Tensor:
    """A reward model's loss over pairs (Bradley-Terry; margin: Llama 2, Touvron et al. 2023, eq. 2): [P].

    `rewards` [N] is the score at each sequence's last token (`scores[0, sequence_ends(batch)]`), `margin` [N]
    how much better the chosen answer is than the rejected one, the batch's column. `center` pulls the sum of
    a pair's rewards to 0 (Eisenstein et al. 2023).
    """
    chosen, rejected = rewards[pairs.chosen], rewards[pairs.rejected]
    wanted = 0 if margin is None else margin[pairs.chosen]
    return -logsigmoid(chosen - rejected - wanted) + center * (chosen + rejected) ** 2


def grpo_losses(
    logps: torch.Tensor,
    batch: VarlenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    reference_logps: torch.Tensor | None = None,
) -> torch.Tensor:
    """GRPO (Shao et al. 2024, eq. 3 and 4) of each trained token, 0 elsewhere: [1, T].

    `logps` [1, T] from `token_logps`; the batch's `advantages` and `old_logprobs` [1, T] are aligned with its
    labels, which are the response mask; `advantages` [N] hold for each sequence's tokens alike. Without
    `old_logprobs` the policy is taken for the one that sampled.
    `beta` weighs the distance from `reference_logps` [1, T]. For the mean over tokens divide the sum by
    `step_targets(batches)`; for the mean of the sequences' means multiply by `sequence_weights(batch)` and
    divide by the step's sequences (both in padless.runtime.loss). Raises CollateError without `advantages`.
    """
    if "advantages" not in batch:
        raise CollateError(
            "the batch has no advantages, one for each token: they come with rollouts (--format rollout, or "
            "pack_sequences)"
        )
    advantages, old = batch["advantages"], batch.get("old_logprobs")
    if advantages.ndim == 1:
        advantages = advantages[batch["seq_idx"].long()]
    ratio = torch.exp(logps - (logps.detach() if old is None else old))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if beta:
        if reference_logps is None:
            raise CollateError(f"beta is {beta} and there are no reference_logps; give them, or beta=0")
        apart = reference_logps - logps
        losses = losses + beta * (torch.exp(apart) - apart - 1)
    return torch.where(batch["labels"] == IGNORE_INDEX, 0, losses)


def _log1mexp(logps: torch.Tensor) -> torch.Tensor:
    """log(1 - p), exact where p is near 1; an answer of probability 1 counts as just below."""
    return torch.log(-torch.expm1(logps.clamp(max=-1e-7)))


def distillation_losses(
    logits: torch.Tensor, batch: VarlenBatch, *, temperature: float = 1.0, rest: bool = True
) -> torch.Tensor:
    """KL(teacher || model) over the teacher's candidates of each trained token, 0 elsewhere: [1, T].

    `logits` [1, T, V] of the whole batch; the batch's `teacher_ids` and `teacher_logprobs` [1, T, K] are
    aligned with its labels: row t is about token t, so the logits of t - 1 answer to it. With `rest` all
    other tokens count as one candidate more, with what is left of both distributions; without it those of
    the candidates are renormalized, and only then `temperature` divides both sides' logarithms (Hinton et al.
    2015; the loss is times its square, so that gradients keep their size). Multiply by the batch's
    `loss_weight` where it has one, and divide the sum by `step_targets(batches)`. Raises CollateError without
    the columns, or for `rest` with a temperature.
    """
    if missing := [name for name in ("teacher_ids", "teacher_logprobs") if name not in batch]:
        raise CollateError(
            f"the batch has no {' and no '.join(missing)}: a teacher's candidates come from tokenized "
            "records with both columns"
        )
    if temperature <= 0 or (rest and temperature != 1):
        raise CollateError(
            f"temperature is {temperature}: it must be above 0, and 1 with rest=True (what is left of a "
            "distribution has no logarithm to divide)"
        )
    scores = logits.reshape(-1, logits.shape[-1])[:-1].float()
    ids, theirs = batch["teacher_ids"][0, 1:].long(), batch["teacher_logprobs"][0, 1:].float()
    ours = scores.gather(-1, ids)
    if rest:
        ours = _with_rest(ours - scores.logsumexp(-1, keepdim=True))
        theirs = _with_rest(theirs)
    else:
        ours, theirs = (one / temperature for one in (ours, theirs))
        ours, theirs = (one - one.logsumexp(-1, keepdim=True) for one in (ours, theirs))
    apart = (theirs.exp() * (theirs - ours)).sum(-1) * temperature**2
    trained = batch["labels"][0, 1:] != IGNORE_INDEX
    return torch.nn.functional.pad(torch.where(trained, apart, 0), (1, 0))[None]


def _with_rest(logps: torch.Tensor) -> torch.Tensor:
    """[T, K] with one column more: the logarithm of what the candidates leave, at least 1e-7."""
    left = 1 - logps.exp().sum(-1, keepdim=True)
    return torch.cat([logps, left.clamp(min=1e-7).log()], -1)
