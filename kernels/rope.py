"""Rotary embeddings of q and k: `rope_qk_` in place, `rope_qk` into new tensors; one kernel launch each way.

In place saves the memory of q and k, in every layer, and may change what somebody else still needs.
What autograd saved is watched: the version counters of q and k go up, so that an operator upstream
that saved its output (exp does, linear layers and the norms of Llama, Qwen and Gemma do not) raises in
its backward pass instead of taking turned values. Gradients are turned in place only where the caller
says so (`reuse_grads`): autograd may hand the same gradient to somebody else.

Where there is no Triton kernel to run (CPU tensors without TRITON_INTERPRET=1, float64, other devices)
the reference in rope_ref computes the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .autograd import direct
from .rope_inputs import RopeInputs, check_apart, check_inputs, check_length
from .rope_ref import rotate_ref


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    frequency_axes: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k turned by their positions, as new tensors; differentiable in q and k.

    q is [T, Hq, D] or [B, T, Hq, D], k the same with Hk heads, at any strides; float16, bfloat16 or
    float32, computed in float32 and rounded once. The leading R dimensions of each head turn, in pairs
    (i, i + R/2), or `interleaved` (2i, 2i + 1); the others stay.

    - cos, sin [S, R/2]: tables (see `rope_tables`). A token's position is its `position_ids` [T] or [B, T];
      or, with `cu_seqlens` int32 [N + 1] over the B * T tokens, its place in its sequence; or its place in
      the row. With `frequency_axes` int32 [R/2] (see `mrope_axes`) position_ids are [A, T] or [A, B, T] and
      frequency i turns by row frequency_axes[i].
    - cos, sin [B or 1, T, R]: gathered for each token, as transformers hands them to
      apply_rotary_pos_emb; the first R/2 columns are used. With `rotary_dim` R they may have R/2 columns.

    `max_seqlen`, where known, is checked against the table. A position beyond the table is a ValueError on
    the CPU; on a device, where looking would wait for it, that token becomes NaN.

    Raises ValueError and TypeError, naming shapes, before anything is launched.
    """
    if max_seqlen is not None:
        check_length(cos, max_seqlen)
    given = RopeInputs(cos, sin, position_ids, cu_seqlens, frequency_axes, rotary_dim, interleaved)
    return _apply(q, k, given, False, False)


def rope_qk_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    frequency_axes: Tensor | None = None,
    max_seqlen: int | None = None,
    reuse_grads: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope_qk` in place: q and k are overwritten, and returned. Go on with what is returned.

    Under autograd the returned tensors carry the history; where q or k is a view (a transposed or split
    projection), the old handles hold the turned values with the old history, and are not to be used on.
    With `reuse_grads` the backward pass turns its gradients in place too, and allocates nothing: for callers
    who know that nobody else keeps them, as where q and k go into an attention and nowhere else.

    Raises ValueError where q or k overlaps itself or the other in memory, RuntimeError for a leaf that
    requires grad, and what `rope_qk` raises.
    """
    if max_seqlen is not None:
        check_length(cos, max_seqlen)
    given = RopeInputs(cos, sin, position_ids, cu_seqlens, frequency_axes, rotary_dim, interleaved)
    return _apply(q, k, given, True, reuse_grads)


def _apply(
    q: Tensor, k: Tensor, given: RopeInputs, in_place: bool, reuse_grads: bool
) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        if rows := q.ndim == 3 == k.ndim:
            q, k = q[None], k[None]
        new_q, new_k = _traced(q, k, *given.settled(), False)
        if in_place:  # an intermediate that is overwritten costs the compiled program no copy
            new_q, new_k = q.copy_(new_q), k.copy_(new_k)
        return (new_q[0], new_k[0]) if rows else (new_q, new_k)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        if given.cos.requires_grad or given.sin.requires_grad:
            raise ValueError("cos and sin require grad, and rotary tables get none here; detach them")
        if in_place:
            for x in (q, k):
                # A view that a custom function returns has a base without history, which requires none.
                base = x if x._base is None else x._base
                if base.is_leaf and x.requires_grad and base.requires_grad:
                    raise RuntimeError("a leaf that requires grad cannot be turned in place; use rope_qk")
        turned: tuple[Tensor, Tensor] = _rotate_qk(q, k, given, False, in_place, reuse_grads)
        return turned
    return _rotate(q, k, given, False, in_place)


def _rotate(q: Tensor, k: Tensor, given: RopeInputs, inverse: bool, in_place: bool) -> tuple[Tensor, Tensor]:
    """Turns without autograd's knowledge: by the kernel where it runs, else by the reference."""
    if runs_kernel(q):
        new_q, new_k = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
        _kernel()(q, k, new_q, new_k, given, inverse)
        return new_q, new_k
    if q.ndim == 3 == k.ndim:
        rows = _rotate(q[None], k[None], given, inverse, in_place)
        return (q, k) if in_place else (rows[0][0], rows[1][0])
    given = given.settled()
    check_inputs(q, k, given)
    if in_place:
        check_apart(q, k)
    new_q, new_k = rotate_ref(q, k, given, inverse=inverse)
    if in_place:
        with torch.no_grad():
            q.copy_(new_q)
            k.copy_(new_k)
        return q, k
    return new_q, new_k


def runs_kernel(q: Tensor) -> bool:
    """Whether Triton takes q: on a CUDA device, or by its interpreter; float64 is left to the reference."""
    if q.is_cuda:
        return q.dtype != torch.float64
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and q.device.type == "cpu"
    return interpreted and q.dtype != torch.float64


@cache
def _kernel() -> Callable[..., None]:
    """What launches the kernel; Triton is imported when one is first needed."""
    from .rope_launch import rotate

    return rotate


class _RotateQK(torch.autograd.Function):
    """A rotation is orthogonal: its gradient is the rotation back, the same launch with -sin."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, given: RopeInputs, inverse: bool, in_place: bool, reuse_grads: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*given[:5])
        ctx.rest, ctx.inverse, ctx.reuse_grads = given[5:], inverse, reuse_grads
        new_q, new_k = _rotate(q, k, given, inverse, in_place)
        if not in_place:
            return new_q, new_k
        if q._base is None and k._base is None:
            ctx.mark_dirty(q, k)
            return q, k
        # A function that changes views in place may mark only one as dirty, so these are returned as
        # new handles, and the version counters say to whoever saved q or k that they are no more.
        # (detach is the cheapest new handle; a view costs autograd three times as much.)
        torch.autograd.graph.increment_version((q, k))
        return q.detach(), k.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = RopeInputs(*ctx.saved_tensors, *ctx.rest)
        if torch.is_grad_enabled():  # create_graph: the gradient is to be differentiated again
            grad_q, grad_k = _rotate_qk(*grads, given, not ctx.inverse, False, False)
        else:
            grad_q, grad_k = _rotate(grads[0], grads[1], given, not ctx.inverse, ctx.reuse_grads)
        return grad_q, grad_k, None, None, None, None


_rotate_qk = direct(_RotateQK)


def lying_like(x: Tensor, new: Tensor) -> Tensor:
    """`new` with the strides of torch.empty_like(x), which compiled programs were promised."""
    promised = torch.empty_like(x, device="meta").stride()
    return new if new.stride() == promised else torch.empty_like(x, dtype=new.dtype).copy_(new)


@torch.library.custom_op("padless::rope_qk", mutates_args=())
def _traced(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    frequency_axes: Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """The rotation as one operator, for torch.compile; eager calls take the shorter way around it."""
    given = RopeInputs(cos, sin, position_ids, cu_seqlens, frequency_axes, rotary_dim, interleaved)
    new_q, new_k = _rotate(q, k, given, inverse, False)
    return lying_like(q, new_q), lying_like(k, new_k)


@_traced.register_fake
def _(q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _traced_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[2:7])
    ctx.rest = inputs[7:]


def _traced_backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Any, ...]:
    rotary_dim, interleaved, inverse = ctx.rest
    turned = _traced(grad_q, grad_k, *ctx.saved_tensors, rotary_dim, interleaved, not inverse)
    return (*turned, *(None,) * 8)


_traced.register_autograd(_traced_backward, setup_context=_traced_setup)
