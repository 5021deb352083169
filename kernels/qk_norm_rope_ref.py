"""RMS norm of each head of q and k, then the rotation, in plain PyTorch: what the kernels compute.

It serves CPUs and devices without Triton, and is what the kernels are held against.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rope_inputs import RopeInputs
from .rope_ref import rotate_ref


class NormInputs(NamedTuple):
    """All that norms q and k."""

    q_weight: Tensor
    """[D]"""
    k_weight: Tensor
    eps: float
    """Added to the mean square of a head."""
    plus_one: bool
    """The weight is 1 + w, and meets x before it is rounded (Gemma), not after (Llama)."""


def norm_rotate_ref(q: Tensor, k: Tensor, norm: NormInputs, given: RopeInputs) -> tuple[Tensor, Tensor]:
    """q and k [B, T, H, D], each head over its root mean square times the weight, and turned.

    Raises what `rotate_ref` raises.
    """
    normed = [_norm(x, w, norm) for x, w in ((q, norm.q_weight), (k, norm.k_weight))]
    new_q, new_k = rotate_ref(normed[0], normed[1], given)
    return new_q.to(q.dtype), new_k.to(k.dtype)


def _norm(x: Tensor, weight: Tensor, norm: NormInputs) -> Tensor:
    """Rounded where Qwen3RMSNorm rounds; with plus_one where Gemma3RMSNorm does (transformers 5)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.plus_one:
        return (wide * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return weight * wide.to(x.dtype)


def norm_rotate_ref_back(
    q: Tensor, k: Tensor, grad_q: Tensor, grad_k: Tensor, norm: NormInputs, given: RopeInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and both weights, in float32 (float64 for float64 inputs) and rounded once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    turned = rotate_ref(grad_q.to(wide), grad_k.to(wide), given, inverse=True)
    dq, dq_weight = _norm_back(q, turned[0], norm.q_weight, norm)
    dk, dk_weight = _norm_back(k, turned[1], norm.k_weight, norm)
    return dq, dk, dq_weight, dk_weight


def _norm_back(x: Tensor, grad: Tensor, weight: Tensor, norm: NormInputs) -> tuple[Tensor, Tensor]:
    """With n = x / rms, y = n w: dn = w dy, dx = (dn - n mean(n dn)) / rms, and dw the sum of n dy."""
    wide = x.to(grad.dtype)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    normed = wide * scale
    met = normed if norm.plus_one else normed.to(x.dtype).to(grad.dtype)
    d_normed = grad * (weight.to(grad.dtype) + norm.plus_one)
    d_x = scale * (d_normed - normed * (normed * d_normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), (grad * met).sum(dim=(0, 1, 2)).to(weight.dtype)


def check_norm(q: Tensor, norm: NormInputs) -> None:
    """Raises ValueError or TypeError, naming shapes, for weights that cannot norm q's heads."""
    for name, weight in (("q_weight", norm.q_weight), ("k_weight", norm.k_weight)):
        if weight.shape != q.shape[-1:]:
            raise ValueError(f"{name} is {list(weight.shape)} and heads have {q.shape[-1]}: it must be [D]")
        if weight.dtype not in (q.dtype, torch.float32):
            raise TypeError(f"{name} is {weight.dtype}; it must be q's {q.dtype} or torch.float32")
        if weight.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {weight.device}; move it there once")
        if not weight.is_contiguous():
            raise ValueError(f"{name} has stride {weight.stride()}; it must be contiguous")
    if norm.q_weight.dtype != norm.k_weight.dtype:
        raise TypeError(f"q_weight is {norm.q_weight.dtype} and k_weight {norm.k_weight.dtype}")
