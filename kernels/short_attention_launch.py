"""Launches the kernels of attention for short packed sequences: tile shapes, strides, grids.

Tile shapes were measured on an H200; kernels/NOTES.md has the log. What was compiled is kept and launched
again past Triton's binder, which takes longer than a short row's kernels; the grid alone is another each
time. Importing this module imports Triton.
"""

# Triton's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .rope_launch import MAX_KEPT, alignment
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


class Kept(NamedTuple):
    """A compiled kernel, and its arguments after the scalars: integers, then constants."""

    run: Any
    function: Any
    metadata: Any
    numbers: tuple[Any, ...]


_LAUNCHES: dict[tuple[Any, ...], Kept] = {}


def _launch(
    name: str,
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    integers: tuple[int, ...],
    constants: dict[str, Any],
    shape: Shape,
) -> None:
    """Arguments in the kernel's order; integers are those whose values Triton looks at to compile."""
    device = tensors[0].get_device()
    pointers = tuple([x.data_ptr() for x in tensors])
    types = tuple([x.dtype for x in tensors])
    key = (name, device, types, integers, *constants.values(), alignment(*pointers))
    kept = _LAUNCHES.get(key)
    if kept is not None:
        kept.run(
            programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), kept.function, kept.metadata,
            None, None, None, *pointers, *scalars, *kept.numbers,
        )  # fmt: skip
        return
    compiled = kernel[(programs, 1, 1)](
        *tensors, *scalars, *integers, **constants,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(_LAUNCHES) >= MAX_KEPT:
        _LAUNCHES.clear()
    numbers = (*integers, *constants.values())
    _LAUNCHES[key] = Kept(compiled.run, compiled.function, compiled.packed_metadata, numbers)


def _elsewhere(x: Tensor) -> bool:
    """Whether x is on another CUDA device than the current one, where Triton would launch."""
    device = x.get_device()
    return device >= 0 and device != torch._C._cuda_getDevice()


def turn(k: Tensor, work: WorkList, cos: Tensor, sin: Tensor) -> Tensor:
    """k [T, Hk, D] turned by each token's place in its sequence, contiguous."""
    tokens, heads, dim = k.shape
    new = torch.empty((tokens, heads, dim), dtype=k.dtype, device=k.device)
    block_h, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
    block_t = max(1, 2048 // (block_h * block_half))
    constants = {
        "HEADS": heads,
        "HALF": dim // 2,
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
        "BLOCK_HALF": block_half,
    }
    # fmt: off
    _launch(
        "turn", turn_keys, -(-tokens // block_t), (k, new, work.starts, cos, sin), (tokens,),
        k.stride()[:2], constants, Shape(0, 4, 3),
    )
    # fmt: on
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
    if _elsewhere(q):
        with torch.cuda.device(q.device):
            return forward(q, k, v, work, cos, sin, options, keep=keep)
    rope = cos is not None and sin is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    kept = torch.empty_like(out) if keep and rope else q
    if not work.tokens:
        return Saved(kept, k, out, lse)
    if cos is not None and sin is not None:
        k = turn(k, work, cos, sin)
    cos, sin = (q, q) if cos is None or sin is None else (cos, sin)
    shape = shapes_for(q.shape[2]).forward
    constants = _constants(q, k, rope, options, v)
    constants["BLOCK_M"] = work.tiles.query_tokens * constants["BLOCK_G"]
    constants["BLOCK_N"] = shape.step
    constants["KEEP_Q"] = keep and rope
    # fmt: off
    _launch(
        "forward", attention_forward, work.query_tiles * k.shape[1],
        (q, k, v, out, lse, kept, work.starts, work.queries, cos, sin),
        _numbers(options), (options.window or 0, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        constants, shape,
    )
    # fmt: on
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
    if _elsewhere(v):
        with torch.cuda.device(v.device):
            return backward(saved, v, grad, work, cos, sin, options)
    q, k, out, lse = saved
    rope = cos is not None and sin is not None
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    delta = torch.empty_like(lse)
    if not work.tokens:
        return grad_q, grad_k, grad_v
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    cos, sin = (q, q) if cos is None or sin is None else (cos, sin)
    _, queries, keys = shapes_for(q.shape[2])
    constants = _constants(q, k, rope, options, v, grad)
    scalars = (*_numbers(options), options.scale)
    integers = (options.window or 0, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2])
    # fmt: off
    _launch(
        "queries", attention_backward_queries, work.query_tiles * k.shape[1],
        (q, k, v, out, grad, lse, delta, grad_q, work.starts, work.queries, cos, sin), scalars, integers,
        constants | {"BLOCK_M": work.tiles.query_tokens * constants["BLOCK_G"], "BLOCK_N": queries.step},
        queries,
    )
    _launch(
        "keys", attention_backward_keys, work.key_tiles * k.shape[1],
        (q, k, v, grad, lse, delta, grad_k, grad_v, work.starts, work.keys, cos, sin), scalars, integers,
        constants | {"BLOCK_M": max(keys.step, constants["BLOCK_G"]), "BLOCK_N": work.tiles.key_tokens},
        keys,
    )
    # fmt: on
    return grad_q, grad_k, grad_v
