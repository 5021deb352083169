"""Log-probabilities of packed tokens, and their sums by sequence: what preference and RL losses are made of.

    input_ids   [a b c | d e]       logits[t] predicts input_ids[t + 1]
    labels      [_ b c | _ e]       _ is -100, at each sequence's start too, so nothing crosses a boundary
    token_logps [0 B C | 0 E]       aligned with the labels
    sums        [B + C | E]

A softmax over the vocabulary in fp32 is the largest tensor of a training step. Here it exists for a few rows
at a time, forward and backward; the price is that the backward pass computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.varlen_batch import VarlenBatch

CHUNK_VALUES = 2**24
"""Logits in fp32 that exist at a time: 64 MiB."""


def token_logps(logits: torch.Tensor, batch: VarlenBatch, *, temperature: float = 1.0) -> torch.Tensor:
    """log p(token | the tokens before it in its sequence) at every label that is trained, else 0.

    logits [1, T, V] or [T, V] of any floating type, as the model gave them for the batch; `temperature`
    divides them, for tokens that were sampled with it. Returns [1, T] in fp32 (fp64 for fp64), aligned with
    `labels`; gradients flow into the logits, once. Raises CollateError for logits of other tokens.
    """
    labels = batch["labels"][0]
    rows = logits.reshape(-1, logits.shape[-1])
    if len(rows) != len(labels):
        raise CollateError(
            f"logits {[*logits.shape]} are of {len(rows)} tokens and the batch has {len(labels)}; give those "
            "of model(**batch.model_inputs()), without logits_to_keep"
        )
    if temperature <= 0:
        raise CollateError(f"temperature must be above 0, is {temperature}; 1.0 leaves logits as they are")
    found: torch.Tensor = _LabelLogps.apply(rows, labels, temperature)  # type: ignore[no-untyped-call]
    return found[None]


def sequence_sums(values: torch.Tensor, batch: VarlenBatch) -> torch.Tensor:
    """Sums of per-token values [1, T] or [T] by sequence: [N], differentiable, the same at every run."""
    flat = values.reshape(-1)
    offsets = batch["cu_seq_lens_q"].long()
    # No atomics, unlike index_add; boundaries are known to be right, so nothing is looked at on the device.
    # It adds one value after the other: in fp32 a sum over 8,000 tokens would be off by some tenths.
    sums: torch.Tensor = torch.segment_reduce(flat.double(), "sum", offsets=offsets, unsafe=True)
    return sums.to(flat.dtype)


def sequence_targets(batch: VarlenBatch) -> torch.Tensor:
    """How many tokens of each sequence are trained (a response's length, by its mask): [N] fp32."""
    return sequence_sums((batch["labels"] != IGNORE_INDEX).float(), batch)


def sequence_logps(
    logits: torch.Tensor, batch: VarlenBatch, *, mean: bool = False, temperature: float = 1.0
) -> torch.Tensor:
    """The log-probability of each sequence's trained tokens: their sum, or their `mean`: [N].

    A sequence without trained tokens has 0. Otherwise as `token_logps`.
    """
    sums = sequence_sums(token_logps(logits, batch, temperature=temperature), batch)
    return sums / sequence_targets(batch).clamp(min=1) if mean else sums


def sequence_ends(batch: VarlenBatch) -> torch.Tensor:
    """The place of each sequence's last token in the row: [N] int64.

    From the boundaries, never by looking for eos or padding, which occur inside of sequences.
    """
    ends: torch.Tensor = batch["cu_seq_lens_q"][1:].long() - 1
    return ends


class _LabelLogps(torch.autograd.Function):
    """log_softmax(logits / temperature)[t - 1, labels[t]] by rows, with one number saved for each row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        found = torch.zeros(len(labels), dtype=wide, device=logits.device)
        norms = torch.empty(len(labels), dtype=wide, device=logits.device)
        for rows, target in _chunks(logits, labels):
            scores = logits[rows].to(wide) / temperature
            norms[rows] = torch.logsumexp(scores, -1)
            picked = scores.gather(-1, target.clamp(min=0)[:, None])[:, 0] - norms[rows]
            found[rows.start + 1 : rows.stop + 1] = torch.where(target == IGNORE_INDEX, 0, picked)
        ctx.save_for_backward(logits, labels, norms)
        ctx.temperature = temperature
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels, norms = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        grad_logits[-1:] = 0  # the last token predicts nothing
        for rows, target in _chunks(logits, labels):
            mine = grad[rows.start + 1 : rows.stop + 1] / ctx.temperature
            mine = torch.where(target == IGNORE_INDEX, 0, mine)[:, None]
            scores = logits[rows].to(norms.dtype) / ctx.temperature
            # d log p[label] / d scores: one at the label, less the softmax.
            scores = scores.sub_(norms[rows][:, None]).exp_().mul_(-mine)
            grad_logits[rows] = scores.scatter_add_(-1, target.clamp(min=0)[:, None], mine)
        return grad_logits, None, None


def _chunks(logits: torch.Tensor, labels: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Rows that predict a token, so many at a time as may be wide, and the labels that they predict."""
    predicting = max(len(labels) - 1, 0)
    step = max(CHUNK_VALUES // logits.shape[-1], 1)
    slices = [slice(row, min(row + step, predicting)) for row in range(0, predicting, step)]
    return [(rows, labels[rows.start + 1 : rows.stop + 1]) for rows in slices]
