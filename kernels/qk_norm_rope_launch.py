"""The path to the launches of norm and rotation; kept and keyed as in rope_launch."""

# Triton's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from .launch import keep
from .qk_norm_rope_backward import norm_rope_backward_kernel
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
    tile_for,
)

_LAUNCHES: dict[tuple[Any, ...], Launch] = {}


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
    order, and PyTorch's sum over programs has a fixed order.
    """
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    shape = (_programs(q, _backward_tile(q, k)) if weights else 0, 2, q.shape[-1])
    partials = torch.empty(shape, dtype=torch.float32, device=q.device)
    _launch((q, k, grad_q, grad_k, new_q, new_k), partials, norm, given)
    if not weights:
        return new_q, new_k, None, None
    grad_q_weight, grad_k_weight = partials.sum(0)
    return new_q, new_k, grad_q_weight.to(norm.q_weight.dtype), grad_k_weight.to(norm.k_weight.dtype)


def _backward_tile(q: Tensor, k: Tensor) -> Tile:
    """Twice the forward one by twice the threads: as much for each thread, and half the partial sums."""
    tile = tile_for(q.shape[2], k.shape[2], q.shape[3])
    return Tile(2 * tile.tokens, tile.heads, 2 * tile.warps)


def _programs(q: Tensor, tile: Tile) -> int:
    """How many programs go backward: as many as a device holds at a time, and no more than have tokens."""
    most = _most_programs(q.get_device()) if q.is_cuda else 3
    return min(most, -(-q.shape[0] * q.shape[1] // tile.tokens))


@cache
def _most_programs(device: int) -> int:
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


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
    scalars = (cos.shape[0], sequences, sequences.bit_length() + 1, eps)
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
        kernel, tile = norm_rope_kernel, tile_for(q_heads, k_heads, head_dim)
        blocks = -(-q_heads // tile.heads) + -(-k_heads // tile.heads)
        grid = (-(-tokens // tile.tokens) * blocks, 1, 1)
        rounded = norm.plus_one or torch.promote_types(norm.q_weight.dtype, q.dtype) == q.dtype
        own = {"ROUNDED": rounded}
    else:
        kernel, tile = norm_rope_backward_kernel, _backward_tile(q, k)
        grid = (_programs(q, tile), 1, 1)
        own = {"WEIGHTS": partials.shape[0] > 0}
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "HEAD_DIM": head_dim,
        "SOURCE": source,
        "AXES": given.frequency_axes is not None,
        "INTERLEAVED": given.interleaved,
        "PLUS_ONE": norm.plus_one,
        **own,
        "LONG_INDEXING": is_long(tokens, *heads, given.cos, given.position_ids),
        "BLOCK_T": tile.tokens,
        "BLOCK_H": tile.heads,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - given.turned)),
    }
    strides = (*(step for x in heads for step in x.stride()), *row_strides)
    # Without fused multiply-add the kernel rounds as PyTorch does, and memory is the limit anyway.
    changing = (*tensors, tokens, length, *scalars)
    compiled = kernel[grid](*changing, *strides, **constants, num_warps=tile.warps, enable_fp_fusion=False)
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(_LAUNCHES) >= MAX_KEPT:
        _LAUNCHES.clear()
    again = keep(compiled, grid, (*changing, *strides, *constants.values()), len(changing))
    _LAUNCHES[key] = Launch(again, tokens, length, given.cos.shape[0], 0)
