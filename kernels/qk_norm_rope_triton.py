"""RMS norm of each head of q and k, then the rotation, in one launch; each element moves once each way.

A program takes several tokens by several heads, as in rope_triton. Importing this module imports Triton;
the backward kernel is in qk_norm_rope_backward, what launches both in qk_norm_rope_launch.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .rope_tiles import load_pairs, load_rows, split, store_pairs


@triton.jit
def total(x, axis: tl.constexpr):
    """tl.sum; that itself is interpreted only where the interpreter was on when Triton was imported."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@triton.jit
def load_rest(source, mask, x_d, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_REST: tl.constexpr):
    """What lies beyond the rotary part, [tokens, heads, rest] in float32; 0 where there is nothing."""
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    inside = mask & (rest < HEAD_DIM)[None, None, :]
    return tl.load(source + (rest.to(tl.int64) * x_d)[None, None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rest(
    target, mask, y_d, value, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_REST: tl.constexpr
):
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    inside = mask & (rest < HEAD_DIM)[None, None, :]
    tl.store(
        target + (rest.to(tl.int64) * y_d)[None, None, :], value.to(target.dtype.element_ty), mask=inside
    )


@triton.jit
def lanes(HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Where a head holds the first and the second side of each pair."""
    lane = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        first = 2 * lane
        second = 2 * lane + 1
    else:
        first = lane
        second = lane + HALF
    return first, second, lane < HALF


@triton.jit
def load_weight(
    weight,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The weight of both sides of each pair [tokens, heads, lanes] and of the rest [1, 1, lanes], in float32.

    In a tile's shape, so that each thread loads what its own elements meet: handing them round costs more.
    """
    first, second, inside = lanes(HALF, INTERLEAVED, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    each = (tl.arange(0, BLOCK_T) * 0)[:, None, None] + (tl.arange(0, BLOCK_H) * 0)[None, :, None]
    inside = inside[None, None, :]
    a = tl.load(weight + (first[None, None, :] + each), mask=inside, other=0.0).to(tl.float32)
    b = tl.load(weight + (second[None, None, :] + each), mask=inside, other=0.0).to(tl.float32)
    r = tl.load(weight + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)
    if PLUS_ONE:
        a += 1.0
        b += 1.0
        r += 1.0
    return a, b, r[None, None, :]


@triton.jit
def normed(x, scale, dtype: tl.constexpr, PLUS_ONE: tl.constexpr):
    """x over its root mean square, as the weight meets it: Llama's and Qwen3's norms round here."""
    x = x * scale
    if not PLUS_ONE:
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def _norm_turn_heads(
    x,
    y,
    weight,
    cos,
    sin,
    positions,
    axes,
    flat,
    row,
    token,
    live,
    first_head,
    table_rows,
    sequences,
    search_steps,
    eps,
    x_b,
    x_t,
    x_h,
    x_d,
    y_b,
    y_t,
    y_h,
    y_d,
    cos_b,
    cos_t,
    cos_d,
    position_a,
    position_b,
    position_t,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOURCE: tl.constexpr,
    AXES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """A tile [tokens, heads, pairs] of x, normed and turned, to y."""
    dtype: tl.constexpr = x.dtype.element_ty
    head = first_head + tl.arange(0, BLOCK_H)
    mask = live[:, None, None] & (head < HEADS)[None, :, None]
    if LONG_INDEXING:
        head = head.to(tl.int64)
    source = x + (row * x_b + token * x_t)[:, None, None] + (head * x_h)[None, :, None]
    target = y + (row * y_b + token * y_t)[:, None, None] + (head * y_h)[None, :, None]
    # fmt: off
    a, b = load_pairs(
        source, mask, x_d, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_T, BLOCK_H, BLOCK_HALF,
    )
    # After the tile is asked for: what hands rows round waits for them, and the tile would wait behind it.
    c, s = load_rows(
        cos, sin, positions, axes, flat, row, token, live, table_rows, sequences, search_steps,
        cos_b, cos_t, cos_d, position_a, position_b, position_t,
        HALF, SOURCE, AXES, False, LONG_INDEXING, BLOCK_T, BLOCK_HALF, 1,
    )
    wa, wb, wr = load_weight(
        weight, HALF, HEAD_DIM, INTERLEAVED, PLUS_ONE, BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
    )
    # fmt: on
    squares = total(a * a + b * b, 2)
    if 2 * HALF < HEAD_DIM:
        r = load_rest(source, mask, x_d, HALF, HEAD_DIM, BLOCK_REST)
        squares += total(r * r, 2)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, :, None]
    a = normed(a, scale, dtype, PLUS_ONE) * wa
    b = normed(b, scale, dtype, PLUS_ONE) * wb
    if ROUNDED:
        a = a.to(dtype).to(tl.float32)
        b = b.to(dtype).to(tl.float32)
    # fmt: off
    store_pairs(
        target, mask, y_d, a * c - b * s, b * c + a * s,
        HALF, INTERLEAVED, LONG_INDEXING, BLOCK_T, BLOCK_H, BLOCK_HALF,
    )
    # fmt: on
    if 2 * HALF < HEAD_DIM:
        r = normed(r, scale, dtype, PLUS_ONE) * wr
        store_rest(target, mask, y_d, r, HALF, HEAD_DIM, BLOCK_REST)


@triton.jit(do_not_specialize=["tokens", "length", "table_rows", "sequences", "search_steps"])
def norm_rope_kernel(
    q,
    k,
    new_q,
    new_k,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    axes,
    tokens,
    length,
    table_rows,
    sequences,
    search_steps,
    eps,
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
    PLUS_ONE: tl.constexpr,
    ROUNDED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Grid: one axis, head blocks of q, then of k, fastest."""
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = Q_BLOCKS + (K_HEADS + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(0) % BLOCKS
    flat = tl.program_id(0) // BLOCKS * BLOCK_T + tl.arange(0, BLOCK_T)
    live = flat < tokens
    row, token = split(flat, length, ONE_ROW, LONG_INDEXING)
    # fmt: off
    if block < Q_BLOCKS:
        _norm_turn_heads(
            q, new_q, q_weight, cos, sin, positions, axes, flat, row, token, live, block * BLOCK_H,
            table_rows, sequences, search_steps, eps,
            q_b, q_t, q_h, q_d, new_q_b, new_q_t, new_q_h, new_q_d,
            cos_b, cos_t, cos_d, position_a, position_b, position_t,
            Q_HEADS, HALF, HEAD_DIM, SOURCE, AXES, INTERLEAVED, PLUS_ONE, ROUNDED, LONG_INDEXING,
            BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    else:
        _norm_turn_heads(
            k, new_k, k_weight, cos, sin, positions, axes, flat, row, token, live,
            (block - Q_BLOCKS) * BLOCK_H, table_rows, sequences, search_steps, eps,
            k_b, k_t, k_h, k_d, new_k_b, new_k_t, new_k_h, new_k_d,
            cos_b, cos_t, cos_d, position_a, position_b, position_t,
            K_HEADS, HALF, HEAD_DIM, SOURCE, AXES, INTERLEAVED, PLUS_ONE, ROUNDED, LONG_INDEXING,
            BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    # fmt: on
