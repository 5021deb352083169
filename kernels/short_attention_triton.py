"""Forward kernels of attention for short packed sequences, and what they share with the backward ones.

A tile is some tokens' queries of all heads that share keys, as the rows of one matrix product, so that
keys are loaded once for the group. It begins with a sequence or within one, or holds several whole ones;
keys run from its first sequence's start to its end, under one mask: neither before a query's own
sequence nor after the query.

Heads are held as two halves, the pairs of a rotary embedding. Products over the head are sums of two,
and a rotation is arithmetic on what is in registers already, on the way in and on the way out. Keys,
which many tiles read, are turned once beforehand (`turn_keys`): in every tile that cost 108 us of 319 at
16,384 tokens. Importing this module imports Triton.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wide(local, head, step, hop):
    """Places within a tile, for strides that take 32 bits beyond their end even within one."""
    return local.to(tl.int64), head.to(tl.int64), step.to(tl.int64), hop.to(tl.int64)


@triton.jit
def row_sums(x):
    """tl.sum, which is interpreted only where the interpreter was on when Triton was imported."""
    return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def row_tops(x):
    """tl.max along rows; see row_sums."""
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def load_block(base, offsets, live, first, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] from base + offsets; zero in rows that are not live and beyond COLUMNS."""
    column = tl.arange(0, BLOCK)
    mask = live[:, None]
    if COLUMNS < BLOCK:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(base + offsets[:, None] + (first + column)[None, :], mask=mask, other=0.0)


@triton.jit
def store_block(base, offsets, live, first, x, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """x [rows, BLOCK], rounded, to base + offsets where rows are live, up to COLUMNS."""
    column = tl.arange(0, BLOCK)
    mask = live[:, None]
    if COLUMNS < BLOCK:
        mask = mask & (column < COLUMNS)[None, :]
    tl.store(base + offsets[:, None] + (first + column)[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_turns(
    cos,
    sin,
    starts,
    first,
    end,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rows of the tables [S, HALF] for tokens from first to end, in float32: read once a token, then repeated
    for its heads, [BLOCK_T * BLOCK_G, BLOCK_HALF]."""
    token = first + tl.arange(0, BLOCK_T)
    place = token - tl.load(starts + token, mask=token < end, other=0)
    c = load_block(cos, place * HALF, token < end, 0, HALF, BLOCK_HALF).to(tl.float32)
    s = load_block(sin, place * HALF, token < end, 0, HALF, BLOCK_HALF).to(tl.float32)
    c = tl.broadcast_to(c[:, None, :], (BLOCK_T, BLOCK_G, BLOCK_HALF))
    s = tl.broadcast_to(s[:, None, :], (BLOCK_T, BLOCK_G, BLOCK_HALF))
    rows: tl.constexpr = BLOCK_T * BLOCK_G
    return tl.reshape(c, (rows, BLOCK_HALF)), tl.reshape(s, (rows, BLOCK_HALF))


@triton.jit
def turned(a, b, c, s):
    """The pair (a, b) turned, in the type it came in."""
    x = a.to(tl.float32)
    y = b.to(tl.float32)
    return (x * c - y * s).to(a.dtype), (y * c + x * s).to(b.dtype)


@triton.jit
def capped(s, cap, steepness, SOFTCAP: tl.constexpr):
    """cap * tanh(s * steepness / 2) in base 2 where capped, else s; and the tanh's derivative, else 1."""
    if SOFTCAP:
        # tanh x = 1 - 2 / (e^2x + 1), which is right at both infinities.
        t = 1.0 - 2.0 / (tl.exp2(s * steepness) + 1.0)
        return cap * t, 1.0 - t * t
    else:
        return s, 1.0


@triton.jit(do_not_specialize=["tokens"])
def turn_keys(
    k,
    out,
    starts,
    cos,
    sin,
    tokens,
    k_t,
    k_h,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """k [T, Hk, D] turned by each token's place in its sequence, to out, contiguous. Grid: token blocks."""
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    first = tl.program_id(0) * BLOCK_T
    local = row // BLOCK_H
    head = row % BLOCK_H
    live = (local < tokens - first) & (head < HEADS)
    c, s = load_turns(cos, sin, starts, first, tokens, HALF, BLOCK_T, BLOCK_H, BLOCK_HALF)
    k += first.to(tl.int64) * k_t
    out += first.to(tl.int64) * (HEADS * 2 * HALF)
    source = local.to(tl.int64) * k_t + head.to(tl.int64) * k_h
    target = (local * HEADS + head) * (2 * HALF)
    a = load_block(k, source, live, 0, HALF, BLOCK_HALF)
    b = load_block(k, source, live, HALF, HALF, BLOCK_HALF)
    a, b = turned(a, b, c, s)
    store_block(out, target, live, 0, a, HALF, BLOCK_HALF)
    store_block(out, target, live, HALF, b, HALF, BLOCK_HALF)


@triton.jit
def attention_forward(
    q,
    k,
    v,
    out,
    lse,
    q_kept,
    starts,
    work,
    cos,
    sin,
    scale,
    cap,
    steepness,
    window,
    q_t,
    q_h,
    k_t,
    k_h,
    v_t,
    v_h,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEEP_Q: tl.constexpr,
):
    """Grid: query tiles by heads of k, a tile's heads together. Writes out [T, Hq, D] and lse [T, Hq] in base
    2, both contiguous.

    Online softmax (Milakov and Gimelshein 2018) in the order of FlashAttention-2 (Dao 2023), algorithm 1.
    """
    HEAD_DIM: tl.constexpr = 2 * HALF
    BLOCK_D: tl.constexpr = 2 * BLOCK_HALF
    tile = tl.program_id(0) // K_HEADS
    k_head = (tl.program_id(0) % K_HEADS).to(tl.int64)
    first = tl.load(work + 3 * tile)
    end = tl.load(work + 3 * tile + 1)
    key = tl.load(work + 3 * tile + 2)
    if WINDOW:
        key = tl.maximum(key, first - window + 1)
    row = tl.arange(0, BLOCK_M)
    local = row // BLOCK_G
    head = row % BLOCK_G
    token = first + local
    live = (token < end) & (head < GROUP)
    start = tl.load(starts + token, mask=live, other=0)
    step = tl.arange(0, BLOCK_N)
    hop = tl.full((), BLOCK_N, tl.int32)
    if LONG:
        local, head, step, hop = wide(local, head, step, hop)
    q += first.to(tl.int64) * q_t + k_head * GROUP * q_h
    at = local * q_t + head * q_h
    qa = load_block(q, at, live, 0, HALF, BLOCK_HALF)
    qb = load_block(q, at, live, HALF, HALF, BLOCK_HALF)
    flat = (first.to(tl.int64) * K_HEADS + k_head) * GROUP
    to = local * (K_HEADS * GROUP) + head
    if ROPE:
        c, s = load_turns(cos, sin, starts, first, end, HALF, BLOCK_M // BLOCK_G, BLOCK_G, BLOCK_HALF)
        qa, qb = turned(qa, qb, c, s)
        if KEEP_Q:
            store_block(q_kept + flat * HEAD_DIM, to * HEAD_DIM, live, 0, qa, HALF, BLOCK_HALF)
            store_block(q_kept + flat * HEAD_DIM, to * HEAD_DIM, live, HALF, qb, HALF, BLOCK_HALF)
    if WINDOW:
        start = tl.maximum(start, token - window + 1)
    # Finite, so that a row without a key in a block stays a number.
    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    k += key.to(tl.int64) * k_t + k_head * k_h
    v += key.to(tl.int64) * v_t + k_head * v_h
    for _ in range(0, (end - key + BLOCK_N - 1) // BLOCK_N):
        there = step < end - key
        ka = load_block(k, step * k_t, there, 0, HALF, BLOCK_HALF)
        kb = load_block(k, step * k_t, there, HALF, HALF, BLOCK_HALF)
        vs = load_block(v, step * v_t, there, 0, HEAD_DIM, BLOCK_D)
        x = tl.dot(qa, tl.trans(ka))
        x = tl.dot(qb, tl.trans(kb), x)
        x, _slope = capped(x, cap, steepness, SOFTCAP)
        seen = ((key + step)[None, :] <= token[:, None]) & ((key + step)[None, :] >= start[:, None])
        x = tl.where(seen, x, float("-inf"))
        new_top = tl.maximum(top, row_tops(x) * scale)
        p = tl.exp2(x * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + row_sums(p)
        acc = tl.dot(p.to(vs.dtype), vs, acc * shrink[:, None])
        top = new_top
        key += BLOCK_N
        k += hop * k_t
        v += hop * v_t
    # Rows beyond the tile's end saw nothing: they divide zero by zero, and are not written.
    store_block(out + flat * HEAD_DIM, to * HEAD_DIM, live, 0, acc / total[:, None], HEAD_DIM, BLOCK_D)
    tl.store(lse + flat + to, top + tl.log2(total), mask=live)
