"""The rotary kernel: q and k in one launch, several tokens by several heads a program.

It moves each element once each way and nothing else of size: a table for 8,192 positions stays in
cache. So what is tuned is the tile (16-byte accesses, enough bytes in flight) and the path to the
launch, which at 2,048 tokens takes longer than the kernel: what depends on shapes and strides alone is
worked out once and kept (`_LAUNCHES`), and the compiled kernel is then called past Triton's binder.

The backward pass is the same kernel with the sine's sign turned. Importing this module imports Triton.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rope_inputs import DTYPES, RopeInputs, check_apart, check_inputs, span

MAX_KEPT = 4096
"""Launches remembered before starting over: packed rows come in many lengths."""

# Where a token's row of cos and sin is found.
INDEX, POSITION_IDS, CU_SEQLENS, GATHERED = (tl.constexpr(source) for source in range(4))


@triton.jit
def _turn_heads(
    x,
    y,
    row,
    token,
    live,
    first_head,
    cos,
    sin,
    x_b,
    x_t,
    x_h,
    x_d,
    y_b,
    y_t,
    y_h,
    y_d,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """A tile [tokens, heads, pairs] of x to y; cos and sin are [tokens, 1, pairs] in float32."""
    head = first_head + tl.arange(0, BLOCK_H)
    mask = live[:, None, None] & (head < HEADS)[None, :, None]
    if LONG_INDEXING:
        head = head.to(tl.int64)
    source = x + (row * x_b + token * x_t)[:, None, None] + (head * x_h)[None, :, None]
    target = y + (row * y_b + token * y_t)[:, None, None] + (head * y_h)[None, :, None]
    if INTERLEAVED:
        lane = tl.arange(0, 2 * BLOCK_HALF)
        inside = mask & (lane < 2 * HALF)[None, None, :]
        if LONG_INDEXING:
            lane = lane.to(tl.int64)
        pairs = tl.load(source + (lane * x_d)[None, None, :], mask=inside)
        a, b = tl.split(tl.reshape(pairs, (BLOCK_T, BLOCK_H, BLOCK_HALF, 2)).to(tl.float32))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
        turned = tl.reshape(turned, (BLOCK_T, BLOCK_H, 2 * BLOCK_HALF))
        tl.store(target + (lane * y_d)[None, None, :], turned.to(y.dtype.element_ty), mask=inside)
    else:
        lane = tl.arange(0, BLOCK_HALF)
        inside = mask & (lane < HALF)[None, None, :]
        if LONG_INDEXING:
            lane = lane.to(tl.int64)
        a = tl.load(source + (lane * x_d)[None, None, :], mask=inside).to(tl.float32)
        b = tl.load(source + ((lane + HALF) * x_d)[None, None, :], mask=inside).to(tl.float32)
        new_a = (a * cos - b * sin).to(y.dtype.element_ty)
        new_b = (b * cos + a * sin).to(y.dtype.element_ty)
        tl.store(target + (lane * y_d)[None, None, :], new_a, mask=inside)
        tl.store(target + ((lane + HALF) * y_d)[None, None, :], new_b, mask=inside)
    if not IN_PLACE and 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        inside = mask & (rest < HEAD_DIM)[None, None, :]
        if LONG_INDEXING:
            rest = rest.to(tl.int64)
        kept = tl.load(source + (rest * x_d)[None, None, :], mask=inside)
        tl.store(target + (rest * y_d)[None, None, :], kept, mask=inside)


@triton.jit(do_not_specialize=["tokens", "length", "table_rows", "sequences", "search_steps"])
def rope_kernel(
    q,
    k,
    new_q,
    new_k,
    cos,
    sin,
    positions,
    axes,
    tokens,
    length,
    table_rows,
    sequences,
    search_steps,
    q_b,
    q_t,
    q_h,
    q_d,
    k_b,
    k_t,
    k_h,
    k_d,
    new_q_b,
    new_q_t,
    new_q_h,
    new_q_d,
    new_k_b,
    new_k_t,
    new_k_h,
    new_k_d,
    cos_b,
    cos_t,
    cos_d,
    position_a,
    position_b,
    position_t,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOURCE: tl.constexpr,
    AXES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Grid: one axis (the others end at 65,535), head blocks of q, then of k, fastest."""
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = Q_BLOCKS + (K_HEADS + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(0) % BLOCKS
    flat = tl.program_id(0) // BLOCKS * BLOCK_T + tl.arange(0, BLOCK_T)
    live = flat < tokens
    row = flat // length
    token = flat % length
    if LONG_INDEXING:
        row = row.to(tl.int64)
        token = token.to(tl.int64)

    lane = tl.arange(0, BLOCK_HALF)
    known = live[:, None] & (lane < HALF)[None, :]
    if SOURCE == GATHERED:
        place = (row * cos_b + token * cos_t)[:, None]
        found = known
    else:
        if AXES:
            axis = tl.load(axes + lane, mask=lane < HALF, other=0)
            ids = positions + (row * position_b + token * position_t)[:, None] + (axis * position_a)[None, :]
            at = tl.load(ids, mask=known, other=0)
        elif SOURCE == POSITION_IDS:
            ids = positions + row * position_b + token * position_t
            at = tl.load(ids, mask=live, other=0)[:, None]
        elif SOURCE == CU_SEQLENS:
            # The last boundary at or before each token, by bisection: log2(N) loads that hit the cache.
            low = tl.full((BLOCK_T,), 0, tl.int32)
            high = low + sequences
            for _ in range(search_steps):
                middle = (low + high + 1) // 2
                before = tl.load(positions + middle) <= flat
                low = tl.where(before, middle, low)
                high = tl.where(before, high, middle - 1)
            at = (flat - tl.load(positions + low))[:, None]
        else:
            at = token[:, None]
        # A position that the table lacks gives NaN, not what lies behind the table.
        found = known & (at >= 0) & (at < table_rows)
        if LONG_INDEXING:
            at = at.to(tl.int64)
        else:
            at = at.to(tl.int32)
        place = at * cos_t
    c = tl.load(cos + place + (lane * cos_d)[None, :], mask=found, other=float("nan")).to(tl.float32)
    s = tl.load(sin + place + (lane * cos_d)[None, :], mask=found, other=float("nan")).to(tl.float32)
    if INVERSE:
        s = -s
    c = c[:, None, :]
    s = s[:, None, :]
    # fmt: off
    if block < Q_BLOCKS:
        _turn_heads(
            q, new_q, row, token, live, block * BLOCK_H, c, s,
            q_b, q_t, q_h, q_d, new_q_b, new_q_t, new_q_h, new_q_d,
            Q_HEADS, HALF, HEAD_DIM, INTERLEAVED, IN_PLACE, LONG_INDEXING,
            BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    else:
        _turn_heads(
            k, new_k, row, token, live, (block - Q_BLOCKS) * BLOCK_H, c, s,
            k_b, k_t, k_h, k_d, new_k_b, new_k_t, new_k_h, new_k_d,
            K_HEADS, HALF, HEAD_DIM, INTERLEAVED, IN_PLACE, LONG_INDEXING,
            BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    # fmt: on


class Tile(NamedTuple):
    """How much one program turns."""

    tokens: int
    heads: int
    warps: int


def tile_for(q_heads: int, k_heads: int, rotary_dim: int, tokens: int) -> Tile:
    """About 4,096 elements a program, eight to a thread; fewer where that would leave the device idle."""
    half = triton.next_power_of_2(rotary_dim // 2)
    heads = min(8, triton.next_power_of_2(max(q_heads, k_heads)))
    per_token = heads * 2 * half
    budget = 4096 if tokens >= 4096 else 2048
    return Tile(max(1, min(16, budget // per_token)), heads, 4)


class _Launch(NamedTuple):
    """What one combination of shapes and strides needs; `kernel` is compiled for it."""

    kernel: Any
    grid: tuple[int, int, int]
    sizes: tuple[int, int, int]
    numbers: tuple[Any, ...]
    """All arguments after search_steps, in the kernel's order."""


_LAUNCHES: dict[tuple[Any, ...], _Launch] = {}
_APART: set[tuple[Any, ...]] = set()
"""Distances in bytes from q to k, with their shapes and strides, that were found free of overlap."""


def rotate(
    q: Tensor, k: Tensor, new_q: Tensor, new_k: Tensor, given: RopeInputs, *, inverse: bool = False
) -> None:
    """q and k [B, T, H, D], turned, into new_q and new_k, which may be q and k; checks on first sight."""
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return rotate(q, k, new_q, new_k, given, inverse=inverse)
    cos, sin, ids, bounds, axes, rotary_dim, interleaved = given
    in_place = new_q is q
    positions = ids if ids is not None else bounds
    address, other = q.data_ptr(), k.data_ptr()
    key = (
        q.shape, q.stride(), k.shape, k.stride(), q.dtype, k.dtype, q.device, k.device,
        cos.shape, cos.stride(), cos.dtype, cos.device, sin.shape, sin.stride(), sin.dtype, sin.device,
        None if ids is None else (ids.shape, ids.stride(), ids.dtype, ids.device),
        None if bounds is None else (bounds.dtype, bounds.ndim, bounds.stride(), bounds.device),
        None if axes is None else (axes.shape, axes.dtype, axes.device),
        rotary_dim, interleaved, inverse, in_place,
        # Triton compiles for addresses that are multiples of 16, or not: all four share one answer each.
        address % 16, other % 16, cos.data_ptr() % 16, sin.data_ptr() % 16,
        0 if positions is None else positions.data_ptr() % 16,
        0 if axes is None else axes.data_ptr() % 16,
        None if in_place else (new_q.stride(), new_k.stride(), new_q.data_ptr() % 16, new_k.data_ptr() % 16),
    )  # fmt: skip
    launch = _LAUNCHES.get(key)
    if in_place and (launch is None or -launch.sizes[2] < other - address < launch.sizes[2]):
        # Only neighbours in memory can overlap, and those of a fused projection always lie alike.
        neighbours = (other - address, key[:5])
        if neighbours not in _APART:
            check_apart(q, k)
            _APART.add(neighbours)
    sequences = 0 if bounds is None else bounds.shape[0] - 1
    if launch is None:
        if len(_LAUNCHES) >= MAX_KEPT:
            _LAUNCHES.clear()
            _APART.clear()
        check_inputs(q, k, given)
        _launch_first(key, q, k, new_q, new_k, given, inverse, sequences)
        return
    if bounds is not None and sequences < 1:
        check_inputs(q, k, given)
    launch.kernel[launch.grid](
        q, k, new_q, new_k, cos, sin, positions if positions is not None else cos,
        axes if axes is not None else cos, launch.sizes[0], launch.sizes[1], cos.shape[0],
        sequences, sequences.bit_length() + 1, *launch.numbers,
    )  # fmt: skip


def _launch_first(
    key: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    new_q: Tensor,
    new_k: Tensor,
    given: RopeInputs,
    inverse: bool,
    sequences: int,
) -> None:
    """Launches through Triton, which compiles where it must, and keeps what came of it."""
    cos, sin, ids, bounds, axes, rotary_dim, interleaved = given
    if q.dtype not in DTYPES:
        raise TypeError(f"q and k are {q.dtype}; the kernel takes {', '.join(str(d) for d in DTYPES)}")
    if cos.stride() != sin.stride():
        raise ValueError(f"cos and sin have strides {cos.stride()} and {sin.stride()}; they must be the same")
    batch, length, q_heads, head_dim = q.shape
    tokens, k_heads = batch * length, k.shape[2]
    if tokens == 0 or head_dim == 0:
        return
    source = INDEX
    position_strides = (0, 0, 0)
    positions = ids if ids is not None else bounds
    if cos.ndim == 3:
        source, cos_strides = GATHERED, (cos.stride(0) if cos.shape[0] > 1 else 0, *cos.stride()[1:])
    else:
        cos_strides = (0, *cos.stride())
        if ids is not None:
            source = POSITION_IDS
            flat = ids.ndim - (axes is not None) == 1
            per_row = 0 if flat or ids.shape[-2] == 1 else ids.stride(-2)
            position_strides = (ids.stride(0) if axes is not None else 0, per_row, ids.stride(-1))
        elif bounds is not None:
            source = CU_SEQLENS
    tile = tile_for(q_heads, k_heads, rotary_dim, tokens)
    blocks = -(-q_heads // tile.heads) + -(-k_heads // tile.heads)
    grid = (-(-tokens // tile.tokens) * blocks, 1, 1)
    touched = [q, k, new_q, new_k, cos] + ([] if ids is None else [ids])
    long_indexing = max(span(x) for x in touched) >= 2**31 or tokens + tile.tokens >= 2**31
    half = rotary_dim // 2
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "HEAD_DIM": head_dim,
        "SOURCE": source.value,
        "AXES": axes is not None,
        "INTERLEAVED": interleaved,
        "INVERSE": inverse,
        "IN_PLACE": new_q is q,
        "LONG_INDEXING": long_indexing,
        "BLOCK_T": tile.tokens,
        "BLOCK_H": tile.heads,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - rotary_dim)),
    }
    strides = (
        *q.stride(),
        *k.stride(),
        *new_q.stride(),
        *new_k.stride(),
        *cos_strides,
        *position_strides,
    )
    # Without fused multiply-add the kernel rounds as PyTorch does, and memory is the limit anyway.
    kernel = rope_kernel[grid](
        q, k, new_q, new_k, cos, sin, positions if positions is not None else cos,
        axes if axes is not None else cos, tokens, length, cos.shape[0],
        sequences, sequences.bit_length() + 1, *strides, **constants,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    if kernel is not None:  # the interpreter compiles nothing
        reach = max(span(q), span(k)) * q.element_size()
        _LAUNCHES[key] = _Launch(kernel, grid, (tokens, length, reach), (*strides, *constants.values()))
