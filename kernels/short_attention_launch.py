"""Launches the kernels of attention for short packed sequences: tile shapes, strides, grids.

Tile shapes were measured on an H200; kernels/NOTES.md has the log. What was compiled is kept and launched
again by the driver (see `launch`), as Triton takes longer than a short row's kernels: a key is made, and
what it stands for worked out at its first sight alone. Importing this module imports Triton.
"""

# Triton's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .launch import Again
from .launch import keep as keep_compiled
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
        "BLOCK_G": _rows_of_a_token(q, k),
        "BLOCK_HALF": max(16, triton.next_power_of_2(half)),
    }


def _rows_of_a_token(q: Tensor, k: Tensor) -> int:
    """Rows of a tile that a token's heads take, those that share keys."""
    rows: int = triton.next_power_of_2(q.shape[1] // k.shape[1])
    return rows


def _reach(x: Tensor, group: int) -> int:
    """More elements than a tile of x [T, H, D] spans, in any kernel."""
    return 256 * x.stride(0) + group * x.stride(1) + x.shape[2]


def _numbers(options: Options) -> tuple[float, float, float]:
    """scale, cap and steepness as the kernels take them: results in base 2."""
    log2e = 1 / math.log(2)
    if options.softcap is None:
        return options.scale * log2e, 0.0, 0.0
    return 1.0, options.softcap * log2e, 2 * log2e * options.scale / options.softcap


class First(NamedTuple):
    """What a kernel takes behind its tensors and counts, worked out when it is launched first."""

    kernel: Any
    scalars: tuple[float, ...]
    integers: tuple[int, ...]
    """Those whose values Triton looks at to compile."""
    constants: dict[str, Any]
    shape: Shape


_LAUNCHES: dict[tuple[Any, ...], Again] = {}


def _launch(
    key: tuple[Any, ...],
    programs: int,
    tensors: tuple[Tensor, ...],
    first: Callable[[], First],
    *counts: int,
) -> None:
    """`key`: all that `first` and compilation look at, addresses apart. Counts are another each time."""
    pointers = [x.data_ptr() for x in tensors]
    if reduce(or_, pointers) & 15:
        key = (*key, alignment(*pointers))
    again = _LAUNCHES.get(key)
    if again is not None:
        stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
        again(stream, *pointers, *counts, programs=programs)
        return
    kernel, scalars, integers, constants, shape = first()
    changing = (*tensors, *counts)
    compiled = kernel[(programs, 1, 1)](
        *changing, *scalars, *integers, **constants,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(_LAUNCHES) >= MAX_KEPT:
        _LAUNCHES.clear()
    arguments = (*changing, *scalars, *integers, *constants.values())
    _LAUNCHES[key] = keep_compiled(compiled, (programs, 1, 1), arguments, len(changing))


def _elsewhere(x: Tensor) -> bool:
    """Whether x is on another CUDA device than the current one, where Triton would launch."""
    device = x.get_device()
    return device >= 0 and device != torch._C._cuda_getDevice()


def turn(k: Tensor, work: WorkList, cos: Tensor, sin: Tensor) -> Tensor:
    """k [T, Hk, D] turned by each token's place in its sequence, contiguous."""
    tokens, heads, dim = k.shape
    new = torch.empty_like(k, memory_format=torch.contiguous_format)
    block_h, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
    block_t = max(1, 2048 // (block_h * block_half))

    def first() -> First:
        blocks = {"BLOCK_T": block_t, "BLOCK_H": block_h, "BLOCK_HALF": block_half}
        constants = {"HEADS": heads, "HALF": dim // 2, **blocks}
        return First(turn_keys, (), k.stride()[:2], constants, Shape(0, 4, 3))

    key = ("turn", heads, dim, k.stride()[:2], k.dtype, cos.dtype, k.get_device())
    _launch(key, -(-tokens // block_t), (k, new, work.starts, cos, sin), first, tokens)
    return new


def _key(q: Tensor, k: Tensor, v: Tensor, work: WorkList, table: Tensor | None, options: Options) -> Any:
    """What the kernels' constants and numbers follow from, strides of gradients apart."""
    _, q_heads, dim = q.shape
    return (
        q_heads, k.shape[1], dim, q.stride(), k.stride(), v.stride(), q.dtype, q.get_device(),
        work.tiles, options, None if table is None else table.dtype,
    )  # fmt: skip


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
    tokens, q_heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((tokens, q_heads), dtype=torch.float32)
    rope = cos is not None and sin is not None
    kept = torch.empty_like(out) if keep and rope else q
    if not work.tokens:
        return Saved(kept, k, out, lse)
    if cos is not None and sin is not None:
        k = turn(k, work, cos, sin)

    def first() -> First:
        shape = shapes_for(q.shape[2]).forward
        constants = _constants(q, k, rope, options, v)
        constants["BLOCK_M"] = work.tiles.query_tokens * _rows_of_a_token(q, k)
        constants["BLOCK_N"] = shape.step
        constants["KEEP_Q"] = keep and rope
        integers = (options.window or 0, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        return First(attention_forward, _numbers(options), integers, constants, shape)

    tables = (q, q) if cos is None or sin is None else (cos, sin)
    tensors = (q, k, v, out, lse, kept, work.starts, work.queries, *tables)
    key = ("forward", keep, *_key(q, k, v, work, cos, options))
    _launch(key, work.query_tiles * k.shape[1], tensors, first)
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
    grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    if not work.tokens:
        return grad_q, grad_k, grad_v
    if grad.stride()[-1] != 1:
        grad = grad.contiguous()
    rope = cos is not None and sin is not None

    def first(kernel: Any, shape: Shape, **blocks: int) -> First:
        constants = _constants(q, k, rope, options, v, grad) | blocks
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2])
        scalars = (*_numbers(options), options.scale)
        return First(kernel, scalars, (options.window or 0, *strides), constants, shape)

    def first_queries() -> First:
        shape = shapes_for(q.shape[2]).queries
        rows = work.tiles.query_tokens * _rows_of_a_token(q, k)
        return first(attention_backward_queries, shape, BLOCK_M=rows, BLOCK_N=shape.step)

    def first_keys() -> First:
        shape = shapes_for(q.shape[2]).keys
        rows = max(shape.step, _rows_of_a_token(q, k))
        return first(attention_backward_keys, shape, BLOCK_M=rows, BLOCK_N=work.tiles.key_tokens)

    key = (*_key(q, k, v, work, cos, options), grad.stride(), grad.dtype)
    heads = k.shape[1]
    tables = (q, q) if cos is None or sin is None else (cos, sin)
    queries = (q, k, v, out, grad, lse, delta, grad_q, work.starts, work.queries, *tables)
    _launch(("queries", *key), work.query_tiles * heads, queries, first_queries)
    keys = (q, k, v, grad, lse, delta, grad_k, grad_v, work.starts, work.keys, *tables)
    _launch(("keys", *key), work.key_tiles * heads, keys, first_keys)
    return grad_q, grad_k, grad_v
