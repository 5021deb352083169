"""The rotary kernel: q and k in one launch, several tokens by several heads a program.

It moves each element once each way and nothing else of size: a table for 8,192 positions stays in
cache. The backward pass is the same kernel with the sine's sign turned. Importing this module imports
Triton; what launches the kernel is in rope_launch.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .rope_tiles import GATHERED, begin, load_pairs, load_rows, split, store_pairs


@triton.jit
def _turn_heads(
    x,
    y,
    row,
    token,
    live,
    first_head,
    flat,
    cos,
    sin,
    positions,
    axes,
    table_rows,
    sequences,
    search_steps,
    cos_b,
    cos_t,
    cos_d,
    position_a,
    position_b,
    position_t,
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
    """A tile [tokens, heads, pairs] of x to y."""
    head = first_head + tl.arange(0, BLOCK_H)
    mask = live[:, None, None] & (head < HEADS)[None, :, None]
    if LONG_INDEXING:
        head = head.to(tl.int64)
    source = x + (row * x_b + token * x_t)[:, None, None] + (head * x_h)[None, :, None]
    target = y + (row * y_b + token * y_t)[:, None, None] + (head * y_h)[None, :, None]
    # fmt: off
    # Gathered rows come from memory and the tile is sent for first; a table's lie in cache, behind a
    # position, and asking for those last would hold up all that is computed.
    LATE: tl.constexpr = SOURCE == GATHERED
    if not LATE:
        c, s = load_rows(
            cos, sin, positions, axes, flat, row, token, live, table_rows, sequences, search_steps,
            cos_b, cos_t, cos_d, position_a, position_b, position_t,
            HALF, SOURCE, AXES, INVERSE, LONG_INDEXING, BLOCK_T, BLOCK_HALF, 1,
        )
    a, b = load_pairs(
        source, mask, x_d, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_T, BLOCK_H, BLOCK_HALF,
    )
    if LATE:
        c, s = load_rows(
            cos, sin, positions, axes, flat, row, token, live, table_rows, sequences, search_steps,
            cos_b, cos_t, cos_d, position_a, position_b, position_t,
            HALF, SOURCE, AXES, INVERSE, LONG_INDEXING, BLOCK_T, BLOCK_HALF, 1,
        )
    store_pairs(
        target, mask, y_d, a * c - b * s, b * c + a * s,
        HALF, INTERLEAVED, LONG_INDEXING, BLOCK_T, BLOCK_H, BLOCK_HALF,
    )
    # fmt: on
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
    ONE_ROW: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Grid: one axis (the others end at 65,535), head blocks of q, then of k, fastest."""
    begin(EARLY)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = Q_BLOCKS + (K_HEADS + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(0) % BLOCKS
    flat = tl.program_id(0) // BLOCKS * BLOCK_T + tl.arange(0, BLOCK_T)
    live = flat < tokens
    row, token = split(flat, length, ONE_ROW, LONG_INDEXING)
    # fmt: off
    if block < Q_BLOCKS:
        _turn_heads(
            q, new_q, row, token, live, block * BLOCK_H, flat, cos, sin, positions, axes,
            table_rows, sequences, search_steps, cos_b, cos_t, cos_d, position_a, position_b, position_t,
            q_b, q_t, q_h, q_d, new_q_b, new_q_t, new_q_h, new_q_d,
            Q_HEADS, HALF, HEAD_DIM, SOURCE, AXES, INTERLEAVED, INVERSE, IN_PLACE, LONG_INDEXING,
            BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    else:
        _turn_heads(
            k, new_k, row, token, live, (block - Q_BLOCKS) * BLOCK_H, flat, cos, sin, positions, axes,
            table_rows, sequences, search_steps, cos_b, cos_t, cos_d, position_a, position_b, position_t,
            k_b, k_t, k_h, k_d, new_k_b, new_k_t, new_k_h, new_k_d,
            K_HEADS, HALF, HEAD_DIM, SOURCE, AXES, INTERLEAVED, INVERSE, IN_PLACE, LONG_INDEXING,
            BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    # fmt: on
