"""The backward kernel of RMS norm and rotation: gradients of q and k, and of both weights' parts.

A program takes some heads, of q or of k, of a few tiles of tokens, those of all programs interleaved, so that
what is asked for at a time lies close together; it adds up the weight's gradient in registers and writes its
part once, which is little beside what it reads. The parts are added
afterwards in a fixed order, by sum_parts_kernel: no atomics, so that a run gives the same bits twice. x / rms
meets a weight's gradient unrounded, which is nearer to the exact one than a model's own norm comes.
What the forward pass computed is computed again instead of kept: that costs no memory and no traffic.
Importing this module imports Triton.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .qk_norm_rope_triton import lanes, load_rest, load_weight, store_rest, total
from .rope_tiles import CU_SEQLENS, PLACED, begin, load_pairs, load_rows, places_of, split, store_pairs


@triton.jit
def _heads_back(
    x,
    grad,
    out,
    wa,
    wb,
    wr,
    row,
    token,
    live,
    first_head,
    cos,
    sin,
    eps,
    sum_a,
    sum_b,
    sum_r,
    x_b,
    x_t,
    x_h,
    x_d,
    g_b,
    g_t,
    g_h,
    g_d,
    o_b,
    o_t,
    o_h,
    o_d,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """A tile's gradient to out; the sums [tokens, heads, lanes] of the weight's gradient, with it added."""
    head = first_head + tl.arange(0, BLOCK_H)
    mask = live[:, None, None] & (head < HEADS)[None, :, None]
    if LONG_INDEXING:
        head = head.to(tl.int64)
    source = x + (row * x_b + token * x_t)[:, None, None] + (head * x_h)[None, :, None]
    coming = grad + (row * g_b + token * g_t)[:, None, None] + (head * g_h)[None, :, None]
    target = out + (row * o_b + token * o_t)[:, None, None] + (head * o_h)[None, :, None]
    # fmt: off
    a, b = load_pairs(
        source, mask, x_d, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_T, BLOCK_H, BLOCK_HALF,
    )
    ga, gb = load_pairs(
        coming, mask, g_d, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_T, BLOCK_H, BLOCK_HALF,
    )
    # fmt: on
    squares = total(a * a + b * b, 2)
    if 2 * HALF < HEAD_DIM:
        r = load_rest(source, mask, x_d, HALF, HEAD_DIM, BLOCK_REST)
        dr = load_rest(coming, mask, g_d, HALF, HEAD_DIM, BLOCK_REST)
        squares += total(r * r, 2)
    # 0 where there is no head: its inverse may be infinite.
    scale = tl.where(mask, tl.rsqrt(squares / HEAD_DIM + eps)[:, :, None], 0.0)
    # With n = x scale and y = n w, of dy turned back: t = scale dy, u = w t;
    # dw is the sum of x t, and dx = u - x scale^2 mean(x u).
    ta = (ga * cos + gb * sin) * scale
    tb = (gb * cos - ga * sin) * scale
    if WEIGHTS:
        sum_a += ta * a
        sum_b += tb * b
    ta *= wa
    tb *= wb
    along = total(a * ta + b * tb, 2)
    if 2 * HALF < HEAD_DIM:
        tr = dr * scale
        if WEIGHTS:
            sum_r += tr * r
        tr *= wr
        along += total(r * tr, 2)
    along = along[:, :, None] * (scale * scale / HEAD_DIM)
    # fmt: off
    store_pairs(
        target, mask, o_d, ta - a * along, tb - b * along,
        HALF, INTERLEAVED, LONG_INDEXING, BLOCK_T, BLOCK_H, BLOCK_HALF,
    )
    # fmt: on
    if 2 * HALF < HEAD_DIM:
        store_rest(target, mask, o_d, tr - r * along, HALF, HEAD_DIM, BLOCK_REST)
    return sum_a, sum_b, sum_r


@triton.jit
def _tiles_back(
    x,
    grad,
    out,
    weight,
    partial,
    cos,
    sin,
    positions,
    axes,
    group,
    groups,
    first_head,
    tokens,
    length,
    table_rows,
    sequences,
    search_steps,
    eps,
    steps,
    x_b,
    x_t,
    x_h,
    x_d,
    g_b,
    g_t,
    g_h,
    g_d,
    o_b,
    o_t,
    o_h,
    o_d,
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
    WEIGHTS: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    ONE_ROW: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Some heads' gradients over each `groups`-th tile; the weight's part [HEAD_DIM] in fp32 to partial."""
    sum_a = tl.full((BLOCK_T, BLOCK_H, BLOCK_HALF), 0.0, tl.float32)
    sum_b = tl.full((BLOCK_T, BLOCK_H, BLOCK_HALF), 0.0, tl.float32)
    sum_r = tl.full((BLOCK_T, BLOCK_H, BLOCK_REST), 0.0, tl.float32)
    # fmt: off
    wa, wb, wr = load_weight(
        weight, HALF, HEAD_DIM, INTERLEAVED, PLUS_ONE, BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
    )
    # fmt: on
    # Before the loop, which would load nothing ahead of a search in it.
    PLACE: tl.constexpr = PLACED if SOURCE == CU_SEQLENS else SOURCE
    if SOURCE == CU_SEQLENS:
        every = tl.arange(0, GROUP)
        every = (group + every // BLOCK_T * groups) * BLOCK_T + every % BLOCK_T
        places = places_of(positions, every, sequences, search_steps)
        places = tl.reshape(places, (GROUP // BLOCK_T, BLOCK_T))
    for step in tl.range(0, steps, num_stages=STAGES):
        flat = (group + step * groups) * BLOCK_T + tl.arange(0, BLOCK_T)
        live = flat < tokens
        row, token = split(flat, length, ONE_ROW, LONG_INDEXING)
        at = positions
        if SOURCE == CU_SEQLENS:
            own = (tl.arange(0, GROUP // BLOCK_T) == step)[:, None]
            at = total(tl.where(own, places, 0), 0)
        # fmt: off
        c, s = load_rows(
            cos, sin, at, axes, flat, row, token, live, table_rows, sequences, search_steps,
            cos_b, cos_t, cos_d, position_a, position_b, position_t,
            HALF, PLACE, AXES, False, LONG_INDEXING, BLOCK_T, BLOCK_HALF, BLOCK_H,
        )
        sum_a, sum_b, sum_r = _heads_back(
            x, grad, out, wa, wb, wr, row, token, live, first_head, c, s, eps, sum_a, sum_b, sum_r,
            x_b, x_t, x_h, x_d, g_b, g_t, g_h, g_d, o_b, o_t, o_h, o_d,
            HEADS, HALF, HEAD_DIM, INTERLEAVED, PLUS_ONE, WEIGHTS, LONG_INDEXING,
            BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
        # fmt: on
    if WEIGHTS:
        first, second, inside = lanes(HALF, INTERLEAVED, BLOCK_HALF)
        tl.store(partial + first, total(total(sum_a, 1), 0), mask=inside)
        tl.store(partial + second, total(total(sum_b, 1), 0), mask=inside)
        if 2 * HALF < HEAD_DIM:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            tl.store(partial + rest, total(total(sum_r, 1), 0), mask=rest < HEAD_DIM)


@triton.jit(do_not_specialize=["tokens", "length", "table_rows", "sequences", "search_steps", "steps"])
def norm_rope_backward_kernel(
    q,
    k,
    grad_q,
    grad_k,
    new_q,
    new_k,
    partials,
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
    steps,
    q_b,
    q_t,
    q_h,
    q_d,
    k_b,
    k_t,
    k_h,
    k_d,
    grad_q_b,
    grad_q_t,
    grad_q_h,
    grad_q_d,
    grad_k_b,
    grad_k_t,
    grad_k_h,
    grad_k_d,
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
    WEIGHTS: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    ONE_ROW: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Grid: one axis, head blocks of q, then of k, fastest, as forward.

    partials [groups * (Q_BLOCKS + K_BLOCKS), HEAD_DIM]: those of q, then those of k.
    """
    begin(EARLY)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (K_HEADS + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = Q_BLOCKS + K_BLOCKS
    block = tl.program_id(0) % BLOCKS
    group = tl.program_id(0) // BLOCKS
    groups = tl.num_programs(0) // BLOCKS
    # fmt: off
    if block < Q_BLOCKS:
        partial = partials + (group * Q_BLOCKS + block) * HEAD_DIM
        _tiles_back(
            q, grad_q, new_q, q_weight, partial, cos, sin, positions, axes, group, groups, block * BLOCK_H,
            tokens, length, table_rows, sequences, search_steps, eps, steps,
            q_b, q_t, q_h, q_d, grad_q_b, grad_q_t, grad_q_h, grad_q_d, new_q_b, new_q_t, new_q_h, new_q_d,
            cos_b, cos_t, cos_d, position_a, position_b, position_t,
            Q_HEADS, HALF, HEAD_DIM, SOURCE, AXES, INTERLEAVED, PLUS_ONE, WEIGHTS, LONG_INDEXING,
            ONE_ROW, STAGES, GROUP, BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    else:
        partial = partials + (groups * Q_BLOCKS + group * K_BLOCKS + block - Q_BLOCKS) * HEAD_DIM
        _tiles_back(
            k, grad_k, new_k, k_weight, partial, cos, sin, positions, axes, group, groups,
            (block - Q_BLOCKS) * BLOCK_H, tokens, length, table_rows, sequences, search_steps, eps, steps,
            k_b, k_t, k_h, k_d, grad_k_b, grad_k_t, grad_k_h, grad_k_d, new_k_b, new_k_t, new_k_h, new_k_d,
            cos_b, cos_t, cos_d, position_a, position_b, position_t,
            K_HEADS, HALF, HEAD_DIM, SOURCE, AXES, INTERLEAVED, PLUS_ONE, WEIGHTS, LONG_INDEXING,
            ONE_ROW, STAGES, GROUP, BLOCK_T, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )
    # fmt: on


@triton.jit(do_not_specialize=["q_rows", "k_rows"])
def sum_parts_kernel(
    partials,
    grad_q_weight,
    grad_k_weight,
    q_rows,
    k_rows,
    HEAD_DIM: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """partials [q_rows + k_rows, HEAD_DIM] added up to both weights' gradients. Grid: (2, columns)."""
    begin(EARLY)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (column < HEAD_DIM)[None, :]
    first = 0
    rows = q_rows
    if tl.program_id(0) == 1:
        first = q_rows
        rows = k_rows
    sums = tl.full((BLOCK_ROWS, BLOCK_D), 0.0, tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        at = (first + row)[:, None] * HEAD_DIM + column[None, :]
        sums += tl.load(partials + at, mask=(row < rows)[:, None] & inside, other=0.0)
    if tl.program_id(0) == 0:
        tl.store(
            grad_q_weight + column,
            total(sums, 0).to(grad_q_weight.dtype.element_ty),
            mask=column < HEAD_DIM,
        )
    else:
        tl.store(
            grad_k_weight + column,
            total(sums, 0).to(grad_k_weight.dtype.element_ty),
            mask=column < HEAD_DIM,
        )
