"""Causal attention of packed sequences in plain PyTorch, one sequence at a time, written to be read.

It serves CPUs and devices without Triton, and is what the kernels are held against. It computes in
float32 (float64 for float64 inputs) and rounds once, at the end. Its cost is a square of each sequence in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .short_attention_inputs import Options


def attend_ref(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, cos: Tensor | None, sin: Tensor | None, options: Options
) -> Tensor:
    """Attention [T, Hq, D] of q over k and v [T, Hk, D]; starts [T] is where each token's sequence begins."""
    q_wide, k_wide = _turn(q, starts, cos, sin), _turn(k, starts, cos, sin)
    out = torch.empty_like(q_wide)
    for part in _sequences(starts):
        weights, _ = _weights(q_wide[part], k_wide[part], options)
        out[part] = torch.einsum("kgij,jkd->ikgd", weights, v[part].to(weights.dtype)).flatten(1, 2)
    return out.to(q.dtype)


def attend_ref_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    starts: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: the products of FlashAttention-2 (Dao 2023), algorithm 2, untiled."""
    q_wide, k_wide = _turn(q, starts, cos, sin), _turn(k, starts, cos, sin)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q_wide, k_wide, k_wide))
    for part in _sequences(starts):
        qs, ks = _grouped(q_wide[part], k), k_wide[part]
        vs, gs = v[part].to(qs.dtype), grad[part].to(qs.dtype).view_as(qs)
        weights, slope = _weights(q_wide[part], ks, options)
        grad_v[part] = torch.einsum("kgij,ikgd->jkd", weights, gs)
        by_weight = torch.einsum("ikgd,jkd->kgij", gs, vs)
        along = (by_weight * weights).sum(-1, keepdim=True)
        by_score = weights * (by_weight - along) * slope * options.scale
        grad_q[part] = torch.einsum("kgij,jkd->ikgd", by_score, ks).flatten(1, 2)
        grad_k[part] = torch.einsum("kgij,ikgd->jkd", by_score, qs)
    back = None if sin is None else -sin
    grad_q, grad_k = _turn(grad_q, starts, cos, back), _turn(grad_k, starts, cos, back)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _sequences(starts: Tensor) -> Iterator[slice]:
    counts = torch.unique_consecutive(starts, return_counts=True)[1].tolist()
    first = 0
    for count in counts:
        yield slice(first, first + count)
        first += count


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """q [L, Hq, D] as [L, Hk, Hq / Hk, D]."""
    return q.view(len(q), k.shape[1], -1, q.shape[2])


def _weights(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor | float]:
    """Softmax of one sequence's scores [Hk, Hq / Hk, L, L], and the softcap's derivative."""
    scores = torch.einsum("ikgd,jkd->kgij", _grouped(q, k), k) * options.scale
    slope: Tensor | float = 1.0
    if options.softcap is not None:
        capped = torch.tanh(scores / options.softcap)
        scores, slope = options.softcap * capped, 1 - capped * capped
    tokens = torch.arange(len(q), device=q.device)
    past = tokens[:, None] - tokens
    seen = past >= 0
    if options.window is not None:
        seen &= past < options.window
    return scores.masked_fill(~seen, -torch.inf).softmax(-1), slope


def _turn(x: Tensor, starts: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """x [T, H, D], wider; where there are tables its pairs (i, i + D/2) turned by each token's place."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if cos is None or sin is None:
        return x
    place = torch.arange(len(x), device=x.device) - starts
    c, s = (t[place][:, None].to(x.dtype) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)
