"""The path to the launches of norm and rotation; kept and keyed as in rope_launch."""

# Triton's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .launch import Again, keep
from .qk_norm_rope_backward import norm_rope_backward_kernel, sum_parts_kernel
from .qk_norm_rope_ref import NormInputs, check_norm
from .qk_norm_rope_triton import norm_rope_kernel
from .rope_inputs import RopeInputs, check_inputs
from .rope_launch import (
    MAX_KEPT,
    Launch,
    Tile,
    alignment,
    check_types,
    is_long,
    key_of,
    source_of,
)

_LAUNCHES: dict[tuple[Any, ...], Launch] = {}
_SUMS: dict[tuple[Any, ...], Again] = {}
MOST_TOKENS = 64
"""Tokens that a program takes on the way back at most."""
STAGES = 3
"""Tiles on their way from memory while one is computed."""


def norm_rotate(q: Tensor, k: Tensor, norm: NormInputs, given: RopeInputs) -> tuple[Tensor, Tensor]:
    """q and k [B, T, H, D], normed and turned, as new tensors; checks on first sight."""
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    _launch((q, k, new_q, new_k), None, norm, given)
    return new_q, new_k


def norm_rotate_back(
    q: Tensor, k: Tensor, grad_q: Tensor, grad_k: Tensor, norm: NormInputs, given: RopeInputs, weights: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q and k [B, T, H, D], and with `weights` of both weights [D]; each in its type.

    The weights' gradients are the same bits each time on one device: programs add up their tokens in
    order, and what they found is added up in order.
    """
    device = q.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(q.device):
            return norm_rotate_back(q, k, grad_q, grad_k, norm, given, weights)
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    tile = backward_tile(q, k)
    groups = -(-q.shape[0] * q.shape[1] // (tile.tokens * _steps(q, tile))) if weights else 0
    q_rows, k_rows = (groups * -(-heads // tile.heads) for heads in (q.shape[2], k.shape[2]))
    partials = torch.empty((q_rows + k_rows, q.shape[-1]), dtype=torch.float32, device=q.device)
    _launch((q, k, grad_q, grad_k, new_q, new_k), partials, norm, given)
    if not weights:
        return new_q, new_k, None, None
    grad_q_weight, grad_k_weight = (torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in norm[:2])
    _sum_parts(partials, grad_q_weight, grad_k_weight, q_rows, k_rows)
    return new_q, new_k, grad_q_weight, grad_k_weight


def _sum_parts(partials: Tensor, grad_q: Tensor, grad_k: Tensor, q_rows: int, k_rows: int) -> None:
    key = (partials.device, grad_q.shape, grad_q.dtype, grad_k.dtype)
    again = _SUMS.get(key)
    if again is not None:
        stream = torch._C._cuda_getCurrentRawStream(partials.get_device())
        again(stream, partials.data_ptr(), grad_q.data_ptr(), grad_k.data_ptr(), q_rows, k_rows)
        return
    head_dim = partials.shape[1]
    # All parts of a short row at once: a second load after a first is a microsecond.
    grid, changing = (2, -(-head_dim // 8), 1), (partials, grad_q, grad_k, q_rows, k_rows)
    constants = {"HEAD_DIM": head_dim, "BLOCK_ROWS": 1024, "BLOCK_D": 8}
    compiled: Any = sum_parts_kernel[grid](*changing, **constants, num_warps=8)
    if compiled is not None:
        _SUMS[key] = keep(compiled, grid, (*changing, *constants.values()), len(changing))


def forward_tile(q: Tensor, k: Tensor) -> Tile:
    """1,024 elements by one warp, whose lanes have a head's squares to add up among few of them.

    Up to 4,096 tokens, which fill a device once or twice, 2,048 by four.
    """
    if q.shape[0] * q.shape[1] <= 4096:
        return _tile(q, k, 2048, 16, 4)
    return _tile(q, k, 1024, 8, 1)


def backward_tile(q: Tensor, k: Tensor) -> Tile:
    """What a program holds at a time on the way back: 1,024 elements by two warps."""
    return _tile(q, k, 1024, 8, 2)


def _tile(q: Tensor, k: Tensor, elements: int, heads: int, warps: int) -> Tile:
    """So many elements in at most so many heads, then in several tokens."""
    per_head = triton.next_power_of_2(q.shape[3])
    heads = min(heads, triton.next_power_of_2(max(q.shape[2], k.shape[2])), max(1, elements // per_head))
    return Tile(max(1, min(16, elements // (heads * per_head))), heads, warps)


def _steps(q: Tensor, tile: Tile) -> int:
    """Tiles that a program goes through on the way back: it writes its part of a weight's gradient once."""
    tokens = q.shape[0] * q.shape[1]
    return max(1, min(MOST_TOKENS, max(16, tokens // 256)) // tile.tokens)


def _launch(heads: tuple[Tensor, ...], partials: Tensor | None, norm: NormInputs, given: RopeInputs) -> None:
    """`heads` are what the kernel takes of shape [B, T, H, D], q and k first; with partials, the way back."""
    q, k = heads[:2]
    device = q.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(q.device):
            return _launch(heads, partials, norm, given)
    cos, sin, ids, bounds, axes, _, _ = given
    q_weight, k_weight, eps, plus_one = norm
    tensors = (
        *heads, *(() if partials is None else (partials,)), q_weight, k_weight, cos, sin,
        ids if ids is not None else bounds if bounds is not None else cos, axes if axes is not None else cos,
    )  # fmt: skip
    pointers = tuple(x.data_ptr() for x in tensors)
    key = (
        key_of(q, k, given), tuple(x.stride() for x in heads[2:]), len(heads), partials is None,
        partials is not None and partials.shape[0] > 0, plus_one,
        q_weight.shape, q_weight.dtype, q_weight.device, q_weight.stride(),
        k_weight.shape, k_weight.dtype, k_weight.device, k_weight.stride(), alignment(*pointers),
    )  # fmt: skip
    launch = _LAUNCHES.get(key)
    sequences = 0 if bounds is None else bounds.shape[0] - 1
    scalars: tuple[float, ...] = (cos.shape[0], sequences, sequences.bit_length() + 1, eps)
    if partials is not None:
        scalars += (_steps(q, backward_tile(q, k)),)
    if launch is None or (bounds is not None and sequences < 1):
        check_inputs(q, k, given)
        check_norm(q, norm)
        check_types(q, given)
        _launch_first(key, heads, tensors, scalars, partials, norm, given)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    launch.again(stream, *pointers, launch.tokens, launch.length, *scalars)


def _launch_first(
    key: tuple[Any, ...],
    heads: tuple[Tensor, ...],
    tensors: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    partials: Tensor | None,
    norm: NormInputs,
    given: RopeInputs,
) -> None:
    """Launches through Triton, which compiles where it must, and keeps what came of it."""
    q, k = heads[:2]
    batch, length, q_heads, head_dim = q.shape
    tokens, k_heads = batch * length, k.shape[2]
    if tokens == 0 or head_dim == 0:
        return
    source, row_strides = source_of(given)
    half = given.turned // 2
    kernel: Any
    if partials is None:
        kernel, tile, steps = norm_rope_kernel, forward_tile(q, k), 1
        rounded = norm.plus_one or torch.promote_types(norm.q_weight.dtype, q.dtype) == q.dtype
    else:
        kernel, tile = norm_rope_backward_kernel, backward_tile(q, k)
        steps = _steps(q, tile)
    blocks = -(-q_heads // tile.heads) + -(-k_heads // tile.heads)
    grid = (-(-tokens // (tile.tokens * steps)) * blocks, 1, 1)
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "HEAD_DIM": head_dim,
        "SOURCE": source,
        "AXES": given.frequency_axes is not None,
        "INTERLEAVED": given.interleaved,
        "PLUS_ONE": norm.plus_one,
        **({"ROUNDED": rounded} if partials is None else {"WEIGHTS": partials.shape[0] > 0}),
        "LONG_INDEXING": is_long(tokens, *heads, given.cos, given.position_ids),
        "ONE_ROW": batch == 1,
        **({} if partials is None else {"STAGES": STAGES, "GROUP": MOST_TOKENS}),
        "BLOCK_T": tile.tokens,
        "BLOCK_H": tile.heads,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - given.turned)),
    }
    strides = (*(step for x in heads for step in x.stride()), *row_strides)
    # On the way there the kernel rounds as PyTorch does, without fused multiply-add.
    fused = partials is not None
    changing = (*tensors, tokens, length, *scalars)
    compiled = kernel[grid](*changing, *strides, **constants, num_warps=tile.warps, enable_fp_fusion=fused)
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(_LAUNCHES) >= MAX_KEPT:
        _LAUNCHES.clear()
    again = keep(compiled, grid, (*changing, *strides, *constants.values()), len(changing))
    _LAUNCHES[key] = Launch(again, tokens, length, given.cos.shape[0], 0)
