"""RMS norm of each head of q and k fused with their rotary embedding: `qk_norm_rope`, one launch each way.

As separate operations in PyTorch norm and rotation read and write q and k fourteen times. Fused they
are read and written once, and the way back reads q, k and their gradients once: it computes norms again
instead of keeping them. So q and k are kept for it, and nothing here is in place.

The norms' weights train: their gradients are added up in a fixed order, by a small launch of its own, and
are the same bits each run on a device. Where there is no Triton kernel to run the reference computes the
same.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .autograd import direct, once
from .qk_norm_rope_ref import NormInputs, check_norm, norm_rotate_ref, norm_rotate_ref_back
from .rope import lying_like, runs_kernel
from .rope_inputs import RopeInputs, check_inputs, check_length

Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    plus_one: bool = False,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    frequency_axes: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Each head of q and k over its root mean square, times its weight [D], and turned, as new tensors.

    q is [T, Hq, D] or [B, T, Hq, D], k the same with Hk heads, at any strides; float16, bfloat16 or
    float32. The norm is over all D dimensions (Zhang and Sennrich 2019, RMSNorm), and rounds as the
    models' own: x / rms is rounded, then multiplied by the weight (Qwen3); with `plus_one` x / rms is
    multiplied by 1 + weight, then rounded (Gemma 3, Qwen3-Next). The rotation is that of
    `rope_qk(q, k, cos, sin, ...)`, in float32 and rounded once. Weights have q's type, or are float32.

    Differentiable, once, in q, k and both weights. Raises ValueError and TypeError, naming shapes, before
    anything is launched.
    """
    if max_seqlen is not None:
        check_length(cos, max_seqlen)
    given = RopeInputs(cos, sin, position_ids, cu_seqlens, frequency_axes, rotary_dim, interleaved)
    norm = NormInputs(q_weight, k_weight, eps, plus_one)
    if q.ndim == 3 and k.ndim == 3:
        new_q, new_k = _apply(q[None], k[None], norm, given)
        return new_q[0], new_k[0]
    return _apply(q, k, norm, given)


def _apply(q: Tensor, k: Tensor, norm: NormInputs, given: RopeInputs) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        traced: tuple[Tensor, Tensor] = _traced(q, k, *norm, *given.settled())
        return traced
    q_weight, k_weight, *rest = norm
    if torch.is_grad_enabled() and (
        q_weight.requires_grad or k_weight.requires_grad or q.requires_grad or k.requires_grad
    ):
        if given.cos.requires_grad or given.sin.requires_grad:
            raise ValueError("cos and sin require grad, and rotary tables get none here; detach them")
        out: tuple[Tensor, Tensor] = _norm_rotate_qk(q, k, q_weight, k_weight, rest, given)
        return out
    return _forward(q, k, norm, given)


@cache
def _kernels() -> ModuleType:
    """What launches the kernels; Triton is imported when one is first needed."""
    from . import qk_norm_rope_launch

    return qk_norm_rope_launch


def _forward(q: Tensor, k: Tensor, norm: NormInputs, given: RopeInputs) -> tuple[Tensor, Tensor]:
    """Without autograd's knowledge: by the kernel where it runs, else by the reference."""
    if runs_kernel(q):
        turned: tuple[Tensor, Tensor] = _kernels().norm_rotate(q, k, norm, given)
        return turned
    given = given.settled()
    check_inputs(q, k, given)
    check_norm(q, norm)
    return norm_rotate_ref(q, k, norm, given)


def _backward(
    q: Tensor, k: Tensor, grad_q: Tensor, grad_k: Tensor, norm: NormInputs, given: RopeInputs, weights: bool
) -> Gradients:
    if runs_kernel(q):
        grads: Gradients = _kernels().norm_rotate_back(q, k, grad_q, grad_k, norm, given, weights)
        return grads
    return norm_rotate_ref_back(q, k, grad_q, grad_k, norm, given.settled())


class _NormRotateQK(torch.autograd.Function):
    """Keeps its inputs, and computes norms again on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        rest: list[Any],
        given: RopeInputs,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, q_weight, k_weight, *given[:5])
        ctx.rest, ctx.given = rest, given[5:]
        return _forward(q, k, NormInputs(q_weight, k_weight, *rest), given)

    @staticmethod
    @once
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, *tensors = ctx.saved_tensors
        norm = NormInputs(q_weight, k_weight, *ctx.rest)
        weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        given = RopeInputs(*tensors, *ctx.given)
        return (*_backward(q, k, grad_q, grad_k, norm, given, weights), None, None)


_norm_rotate_qk = direct(_NormRotateQK)


@torch.library.custom_op("padless::qk_norm_rope", mutates_args=())
def _traced(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    plus_one: bool,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    frequency_axes: Tensor | None,
    rotary_dim: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """The forward pass as one operator, for torch.compile; eager calls take the shorter way around it."""
    given = RopeInputs(cos, sin, position_ids, cu_seqlens, frequency_axes, rotary_dim, interleaved)
    new_q, new_k = _forward(q, k, NormInputs(q_weight, k_weight, eps, plus_one), given)
    return lying_like(q, new_q), lying_like(k, new_k)


@_traced.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


@torch.library.custom_op("padless::qk_norm_rope_backward", mutates_args=())
def _traced_back(
    q: Tensor,
    k: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    plus_one: bool,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    frequency_axes: Tensor | None,
    rotary_dim: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The way back as one operator; both weights' gradients are always among its results."""
    given = RopeInputs(cos, sin, position_ids, cu_seqlens, frequency_axes, rotary_dim, interleaved)
    norm = NormInputs(q_weight, k_weight, eps, plus_one)
    new_q, new_k, new_q_weight, new_k_weight = _backward(q, k, grad_q, grad_k, norm, given, True)
    assert new_q_weight is not None and new_k_weight is not None
    return lying_like(q, new_q), lying_like(k, new_k), new_q_weight.clone(), new_k_weight.clone()


@_traced_back.register_fake
def _(
    q: Tensor, k: Tensor, grad_q: Tensor, grad_k: Tensor, q_weight: Tensor, k_weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, q_weight, k_weight))


def _traced_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], *inputs[6:11])
    ctx.rest, ctx.given = inputs[4:6], inputs[11:]


def _traced_backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Any, ...]:
    q, k, q_weight, k_weight, *tensors = ctx.saved_tensors
    grads = _traced_back(q, k, grad_q, grad_k, q_weight, k_weight, *ctx.rest, *tensors, *ctx.given)
    return (*grads, *(None,) * 9)


_traced.register_autograd(_traced_backward, setup_context=_traced_setup)
