"""The path to the launches of norm and rotation; kept and keyed as in rope_launch."""

# Triton's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

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
    SHORT,
    Launch,
    Tile,
    alignment,
    check_types,
    early,
    is_long,
    kind_of,
    source_of,
)

_LAUNCHES: dict[tuple[Any, ...], Launch] = {}
_SUMS: dict[tuple[Any, ...], Again] = {}
GROUP = 64
"""Tokens that a program takes on the way back at most."""
STAGES = 3
"""Tiles on their way from memory while one is computed, where there are few programs."""


class Parts(NamedTuple):
    """How the way back divides its tokens, and what it finds for the weights' gradients."""

    steps: int
    """Tiles that a program goes through: it writes its part of a weight's gradient once."""
    groups: int
    """Programs for the same heads; a tile is the next one's, and then again the first one's."""
    q_rows: int
    """Programs that write a part of q's weight's gradient."""
    k_rows: int


def norm_rotate(q: Tensor, k: Tensor, norm: NormInputs, given: RopeInputs) -> tuple[Tensor, Tensor]:
    """q and k [B, T, H, D], normed and turned, as new tensors; checks on first sight."""
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    _launch((q, k, new_q, new_k), None, None, norm, given)
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
    parts = parts_of(q.shape, k.shape[2], weights)
    _, _, q_rows, k_rows = parts
    partials = torch.empty((q_rows + k_rows, q.shape[3]), dtype=torch.float32, device=q.device)
    _launch((q, k, grad_q, grad_k, new_q, new_k), partials, parts, norm, given)
    if not weights:
        return new_q, new_k, None, None
    grad_q_weight, grad_k_weight = torch.empty_like(norm.q_weight), torch.empty_like(norm.k_weight)
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
    soon = early(partials)
    constants = {"HEAD_DIM": head_dim, "EARLY": bool(soon), "BLOCK_ROWS": 2048, "BLOCK_D": 8}
    compiled: Any = sum_parts_kernel[grid](*changing, **constants, num_warps=16, **soon)
    if compiled is not None:
        _SUMS[key] = keep(compiled, grid, (*changing, *constants.values()), len(changing))


def forward_tile(q_heads: int, k_heads: int, head_dim: int) -> Tile:
    """1,024 elements by one warp, whose lanes have a head's squares to add up among few of them."""
    return _tile(q_heads, k_heads, head_dim, 1024, 4, 1)


def backward_tile(q_heads: int, k_heads: int, head_dim: int) -> Tile:
    """What a program holds at a time on the way back: 1,024 elements by two warps."""
    return _tile(q_heads, k_heads, head_dim, 1024, 8, 2)


def _tile(q_heads: int, k_heads: int, head_dim: int, elements: int, heads: int, warps: int) -> Tile:
    """So many elements in at most so many heads, then in several tokens."""
    per_head = triton.next_power_of_2(head_dim)
    heads = min(heads, triton.next_power_of_2(max(q_heads, k_heads)), max(1, elements // per_head))
    return Tile(max(1, min(16, elements // (heads * per_head))), heads, warps)


@lru_cache(MAX_KEPT)
def parts_of(shape: tuple[int, int, int, int], k_heads: int, weights: bool) -> Parts:
    """For q of this shape; without weights' gradients a program has one tile and no row."""
    batch, length, q_heads, head_dim = shape
    tokens = batch * length
    tile = backward_tile(q_heads, k_heads, head_dim)
    tiles = -(-tokens // tile.tokens)
    if not weights or not tiles:
        return Parts(1, tiles, 0, 0)
    steps = max(1, min(GROUP, max(12, tokens // 256)) // tile.tokens)
    # Odd: at 32,768 tokens 512 groups took longer than any number of groups near it.
    groups = -(-tiles // steps) | 1
    q_rows, k_rows = (groups * -(-heads // tile.heads) for heads in (q_heads, k_heads))
    return Parts(-(-tiles // groups), groups, q_rows, k_rows)


def _launch(
    heads: tuple[Tensor, ...],
    partials: Tensor | None,
    parts: Parts | None,
    norm: NormInputs,
    given: RopeInputs,
) -> None:
    """`heads` are what the kernel takes of shape [B, T, H, D], q and k first; with partials, the way back."""
    q, k, *others = heads
    device = q.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(q.device):
            return _launch(heads, partials, parts, norm, given)
    cos, sin, ids, bounds, axes, _, _ = given
    q_weight, k_weight, eps, plus_one = norm
    at_cos = cos.data_ptr()
    tables = (
        at_cos, sin.data_ptr(),
        ids.data_ptr() if ids is not None else bounds.data_ptr() if bounds is not None else at_cos,
        at_cos if axes is None else axes.data_ptr(),
    )  # fmt: skip
    own = (*heads, q_weight, k_weight) if partials is None else (*heads, partials, q_weight, k_weight)
    pointers = [*[x.data_ptr() for x in own], *tables]
    key = (
        q.shape, q.stride(), k.shape, k.stride(), q.dtype, k.dtype, device, k.get_device(),
        kind_of(given, tables), *[x.stride() for x in others], None if parts is None else parts.q_rows > 0,
        plus_one, q_weight.shape, q_weight.dtype, q_weight.get_device(), q_weight.stride(),
        k_weight.shape, k_weight.dtype, k_weight.get_device(), k_weight.stride(),
        alignment(*pointers) if reduce(or_, pointers) & 15 else None,
    )  # fmt: skip
    launch = _LAUNCHES.get(key)
    sequences = 0 if bounds is None else bounds.shape[0] - 1
    if launch is not None and (bounds is None or sequences > 0):
        again, tokens, length, table_rows, _, _ = launch
        steps = () if parts is None else parts[:1]
        again(
            torch._C._cuda_getCurrentRawStream(device), *pointers, tokens, length,
            table_rows, sequences, sequences.bit_length() + 1, eps, *steps,
        )  # fmt: skip
        return
    given = given.settled()
    check_inputs(q, k, given)
    check_norm(q, norm)
    check_types(q, given)
    positions = ids if ids is not None else bounds if bounds is not None else cos
    tensors = (*own, cos, sin, positions, cos if axes is None else axes)
    scalars: tuple[float, ...] = (cos.shape[0], sequences, sequences.bit_length() + 1, eps)
    if parts is not None:
        scalars += parts[:1]
    _launch_first(key, heads, tensors, scalars, parts, norm, given)


def _launch_first(
    key: tuple[Any, ...],
    heads: tuple[Tensor, ...],
    tensors: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    parts: Parts | None,
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
    # Forward programs are many and small: waiting costs them more than it gains, at 2,048 tokens too.
    soon = {} if parts is None else early(q)
    kernel: Any
    if parts is None:
        kernel, tile = norm_rope_kernel, forward_tile(q_heads, k_heads, head_dim)
        groups = -(-tokens // tile.tokens)
        rounded = norm.plus_one or torch.promote_types(norm.q_weight.dtype, q.dtype) == q.dtype
    else:
        kernel, tile = norm_rope_backward_kernel, backward_tile(q_heads, k_heads, head_dim)
        groups = parts.groups
    blocks = -(-q_heads // tile.heads) + -(-k_heads // tile.heads)
    grid = (groups * blocks, 1, 1)
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "HEAD_DIM": head_dim,
        "SOURCE": source,
        "AXES": given.frequency_axes is not None,
        "INTERLEAVED": given.interleaved,
        "PLUS_ONE": norm.plus_one,
        **({"ROUNDED": rounded} if parts is None else {"WEIGHTS": parts.q_rows > 0}),
        "LONG_INDEXING": is_long(tokens, *heads, given.cos, given.position_ids),
        "ONE_ROW": batch == 1,
        **({} if parts is None else {"EARLY": bool(soon)}),
        **({} if parts is None else {"STAGES": STAGES if tokens <= SHORT and parts.steps > 1 else 1}),
        **({} if parts is None else {"GROUP": GROUP}),
        "BLOCK_T": tile.tokens,
        "BLOCK_H": tile.heads,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - given.turned)),
    }
    strides = (*(step for x in heads for step in x.stride()), *row_strides)
    # On the way there the kernel rounds as PyTorch does, without fused multiply-add.
    fused = parts is not None
    changing = (*tensors, tokens, length, *scalars)
    compiled = kernel[grid](
        *changing, *strides, **constants, num_warps=tile.warps, enable_fp_fusion=fused, **soon
    )
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(_LAUNCHES) >= MAX_KEPT:
        _LAUNCHES.clear()
    again = keep(compiled, grid, (*changing, *strides, *constants.values()), len(changing))
    _LAUNCHES[key] = Launch(again, tokens, length, given.cos.shape[0], 0, set())
