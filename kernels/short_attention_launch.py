"""Launches the kernels of attention for short packed sequences: tile shapes, strides, grids.

Tile shapes were measured on an H200; kernels/NOTES.md has the log. Importing this module imports Triton.
"""

# Triton's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .short_attention_backward import attention_backward_keys, attention_backward_queries
from .short_attention_inputs import Options, Saved
from .short_attention_triton import attention_forward, turn_keys
from .short_attention_work import WorkList


class Shape(NamedTuple):
    """How a kernel goes over a tile: keys or rows of queries a step, warps, and stages of loads in flight."""

    step: int
    warps: int
    stages: int


class Shapes(NamedTuple):
    forward: Shape
    queries: Shape
    keys: Shape


def shapes_for(head_dim: int) -> Shapes:
    """The fastest of those tried, on an H200 at T=16,384 in alpaca-like rows."""
    if head_dim <= 64:
        return Shapes(Shape(32, 4, 3), Shape(32, 4, 3), Shape(128, 4, 2))
    if head_dim <= 128:
        return Shapes(Shape(32, 4, 3), Shape(32, 4, 2), Shape(32, 4, 3))
    return Shapes(Shape(32, 4, 2), Shape(32, 4, 1), Shape(32, 4, 2))


def _constants(q: Tensor, k: Tensor, rope: bool, options: Options, *strided: Tensor) -> dict[str, Any]:
    half = q.shape[2] // 2
    group = q.shape[1] // k.shape[1]
    return {
        "K_HEADS": k.shape[1],
        "GROUP": group,
        "HALF": half,
        "ROPE": rope,
        "WINDOW": options.window is not None,
        "SOFTCAP": options.softcap is not None,
        "LONG": max(_reach(x, group) for x in (q, k, *strided)) >= 2**31,
        "BLOCK_G": triton.next_power_of_2(group),
        "BLOCK_HALF": max(16, triton.next_power_of_2(half)),
    }


def _reach(x: Tensor, group: int) -> int:
    """More elements than a tile of x [T, H, D] spans, in any kernel."""
    return 256 * x.stride(0) + group * x.stride(1) + x.shape[2]


def _numbers(options: Options) -> tuple[float, float, float]:
    """scale, cap and steepness as the kernels take them: results in base 2."""
    log2e = 1 / math.log(2)
    if options.softcap is None:
        return options.scale * log2e, 0.0, 0.0
    return 1.0, options.softcap * log2e, 2 * log2e * options.scale / options.softcap


def turn(k: Tensor, work: WorkList, cos: Tensor, sin: Tensor) -> Tensor:
    """k [T, Hk, D] turned by each token's place in its sequence, contiguous."""
    tokens, heads, dim = k.shape
    new = torch.empty((tokens, heads, dim), dtype=k.dtype, device=k.device)
    block_h = triton.next_power_of_2(heads)
    block_half = triton.next_power_of_2(dim // 2)
    block_t = max(1, 2048 // (block_h * block_half))
    turn_keys[(triton.cdiv(tokens, block_t),)](
        k, new, work.starts, cos, sin, tokens, k.stride(0), k.stride(1),
        HEADS=heads, HALF=dim // 2, BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_HALF=block_half, num_warps=4,
    )  # fmt: skip
    return new


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: WorkList,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
    *,
    keep: bool,
) -> Saved:
    """`keep`: the turned q is written, for the way back; otherwise Saved.q is q."""
    rope = cos is not None and sin is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    kept = torch.empty_like(out) if keep and rope else q
    if cos is not None and sin is not None and work.tokens:
        k = turn(k, work, cos, sin)
    if work.tokens:
        shape = shapes_for(q.shape[2]).forward
        constants = _constants(q, k, rope, options, v)
        attention_forward[(work.query_tiles * k.shape[1],)](
            q, k, v, out, lse, kept, work.starts, work.queries, cos if rope else q, sin if rope else q,
            *_numbers(options), options.window or 0,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            **constants, KEEP_Q=keep and rope, BLOCK_M=work.tiles.query_tokens * constants["BLOCK_G"],
            BLOCK_N=shape.step, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    return Saved(kept, k, out, lse)


def backward(
    saved: Saved,
    v: Tensor,
    grad: Tensor,
    work: WorkList,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous, from what forward gave with `keep`."""
    q, k, out, lse = saved
    rope = cos is not None and sin is not None
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    delta = torch.empty_like(lse)
    _, queries, keys = shapes_for(q.shape[2])
    if not work.tokens:
        return grad_q, grad_k, grad_v
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    constants = _constants(q, k, rope, options, v, grad)
    turns = (cos if rope else q, sin if rope else q)
    numbers = (*_numbers(options), options.scale, options.window or 0)
    strides = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        grad.stride(0), grad.stride(1),
    )  # fmt: skip
    attention_backward_queries[(work.query_tiles * k.shape[1],)](
        q, k, v, out, grad, lse, delta, grad_q, work.starts, work.queries, *turns, *numbers, *strides,
        **constants, BLOCK_M=work.tiles.query_tokens * constants["BLOCK_G"], BLOCK_N=queries.step,
        num_warps=queries.warps, num_stages=queries.stages,
    )  # fmt: skip
    attention_backward_keys[(work.key_tiles * k.shape[1],)](
        q, k, v, grad, lse, delta, grad_k, grad_v, work.starts, work.keys, *turns, *numbers, *strides,
        **constants, BLOCK_M=max(keys.step, constants["BLOCK_G"]), BLOCK_N=work.tiles.key_tokens,
        num_warps=keys.warps, num_stages=keys.stages,
    )  # fmt: skip
    return grad_q, grad_k, grad_v
