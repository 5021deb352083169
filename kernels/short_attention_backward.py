"""Backward kernels of attention for short packed sequences: first queries' gradients, then keys' and values'.

Scores are computed in both, seven products instead of the five of one kernel that does it all. That one
needs a sum over key tiles for the queries' gradients: atomics, or float32 memory of four times q's size,
or key tiles that hold whole sequences, whose idle lanes (1.69 times the mask's, against 1.36 for 64) cost
about what is saved. Here every gradient is written once, by one program: the same bits each run, and
no memory but a float32 a head and token. Importing this module imports Triton.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .short_attention_triton import capped, load_block, load_turns, row_sums, store_block, turned, wide


@triton.jit
def attention_backward_queries(
    q,
    k,
    v,
    out,
    grad,
    lse,
    delta,
    grad_q,
    starts,
    work,
    cos,
    sin,
    scale,
    cap,
    steepness,
    back,
    window,
    q_t,
    q_h,
    k_t,
    k_h,
    v_t,
    v_h,
    g_t,
    g_h,
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
):
    """Grid: query tiles by heads of k, a tile's heads together. Writes grad_q like out, and delta [T, Hq],
    the sum of grad * out."""
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
    grad += first.to(tl.int64) * g_t + k_head * GROUP * g_h
    flat = (first.to(tl.int64) * K_HEADS + k_head) * GROUP
    to = local * (K_HEADS * GROUP) + head
    qa = load_block(q, local * q_t + head * q_h, live, 0, HALF, BLOCK_HALF)
    qb = load_block(q, local * q_t + head * q_h, live, HALF, HALF, BLOCK_HALF)
    g = load_block(grad, local * g_t + head * g_h, live, 0, HEAD_DIM, BLOCK_D)
    o = load_block(out + flat * HEAD_DIM, to * HEAD_DIM, live, 0, HEAD_DIM, BLOCK_D)
    along = row_sums(g.to(tl.float32) * o.to(tl.float32))
    tl.store(delta + flat + to, along, mask=live)
    weight = tl.load(lse + flat + to, mask=live, other=float("inf"))
    if WINDOW:
        start = tl.maximum(start, token - window + 1)
    da = tl.full((BLOCK_M, BLOCK_HALF), 0.0, tl.float32)
    db = tl.full((BLOCK_M, BLOCK_HALF), 0.0, tl.float32)
    k += key.to(tl.int64) * k_t + k_head * k_h
    v += key.to(tl.int64) * v_t + k_head * v_h
    for _ in range(0, (end - key + BLOCK_N - 1) // BLOCK_N):
        there = step < end - key
        ka = load_block(k, step * k_t, there, 0, HALF, BLOCK_HALF)
        kb = load_block(k, step * k_t, there, HALF, HALF, BLOCK_HALF)
        vs = load_block(v, step * v_t, there, 0, HEAD_DIM, BLOCK_D)
        x = tl.dot(qa, tl.trans(ka))
        x = tl.dot(qb, tl.trans(kb), x)
        x, slope = capped(x, cap, steepness, SOFTCAP)
        seen = ((key + step)[None, :] <= token[:, None]) & ((key + step)[None, :] >= start[:, None])
        p = tl.where(seen, tl.exp2(x * scale - weight[:, None]), 0.0)
        dp = tl.dot(g, tl.trans(vs))
        ds = (p * (dp - along[:, None]) * slope).to(ka.dtype)
        da = tl.dot(ds, ka, da)
        db = tl.dot(ds, kb, db)
        key += BLOCK_N
        k += hop * k_t
        v += hop * v_t
    da *= back
    db *= back
    if ROPE:
        c, s = load_turns(cos, sin, starts, first, end, HALF, BLOCK_M // BLOCK_G, BLOCK_G, BLOCK_HALF)
        da, db = turned(da, db, c, -s)
    store_block(grad_q + flat * HEAD_DIM, to * HEAD_DIM, live, 0, da, HALF, BLOCK_HALF)
    store_block(grad_q + flat * HEAD_DIM, to * HEAD_DIM, live, HALF, db, HALF, BLOCK_HALF)


@triton.jit
def attention_backward_keys(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    grad_k,
    grad_v,
    starts,
    work,
    cos,
    sin,
    scale,
    cap,
    steepness,
    back,
    window,
    q_t,
    q_h,
    k_t,
    k_h,
    v_t,
    v_h,
    g_t,
    g_h,
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
):
    """Grid: key tiles by heads of k. Writes grad_k and grad_v [T, Hk, D], contiguous, summed over the group.

    Scores are kept transposed, [keys, queries]: as they leave one product they enter the next.
    """
    HEAD_DIM: tl.constexpr = 2 * HALF
    BLOCK_D: tl.constexpr = 2 * BLOCK_HALF
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    tile = tl.program_id(0) // K_HEADS
    k_head = (tl.program_id(0) % K_HEADS).to(tl.int64)
    first = tl.load(work + 3 * tile)
    end = tl.load(work + 3 * tile + 1)
    last = tl.load(work + 3 * tile + 2)
    if WINDOW:
        last = tl.minimum(last, end + window - 1)
    row = tl.arange(0, BLOCK_M)
    local = row // BLOCK_G
    head = row % BLOCK_G
    step = tl.arange(0, BLOCK_N)
    hop = tl.full((), BLOCK_T, tl.int32)
    if LONG:
        local, head, step, hop = wide(local, head, step, hop)
    there = step < end - first
    k += first.to(tl.int64) * k_t + k_head * k_h
    v += first.to(tl.int64) * v_t + k_head * v_h
    ka = load_block(k, step * k_t, there, 0, HALF, BLOCK_HALF)
    kb = load_block(k, step * k_t, there, HALF, HALF, BLOCK_HALF)
    vs = load_block(v, step * v_t, there, 0, HEAD_DIM, BLOCK_D)
    da = tl.full((BLOCK_N, BLOCK_HALF), 0.0, tl.float32)
    db = tl.full((BLOCK_N, BLOCK_HALF), 0.0, tl.float32)
    dv = tl.full((BLOCK_N, BLOCK_D), 0.0, tl.float32)
    q += first.to(tl.int64) * q_t + k_head * GROUP * q_h
    grad += first.to(tl.int64) * g_t + k_head * GROUP * g_h
    flat = (first.to(tl.int64) * K_HEADS + k_head) * GROUP
    lse += flat
    delta += flat
    to = local * (K_HEADS * GROUP) + head
    query = first
    for _ in range(0, (last - first + BLOCK_T - 1) // BLOCK_T):
        token = query + local
        live = (token < last) & (head < GROUP)
        qa = load_block(q, local * q_t + head * q_h, live, 0, HALF, BLOCK_HALF)
        qb = load_block(q, local * q_t + head * q_h, live, HALF, HALF, BLOCK_HALF)
        g = load_block(grad, local * g_t + head * g_h, live, 0, HEAD_DIM, BLOCK_D)
        weight = tl.load(lse + to, mask=live, other=float("inf"))
        along = tl.load(delta + to, mask=live, other=0.0)
        start = tl.load(starts + token, mask=live, other=0)
        if WINDOW:
            start = tl.maximum(start, token - window + 1)
        x = tl.dot(ka, tl.trans(qa))
        x = tl.dot(kb, tl.trans(qb), x)
        x, slope = capped(x, cap, steepness, SOFTCAP)
        seen = ((first + step)[:, None] <= token[None, :]) & ((first + step)[:, None] >= start[None, :])
        p = tl.where(seen, tl.exp2(x * scale - weight[None, :]), 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv)
        dp = tl.dot(vs, tl.trans(g))
        ds = (p * (dp - along[None, :]) * slope).to(qa.dtype)
        da = tl.dot(ds, qa, da)
        db = tl.dot(ds, qb, db)
        query += BLOCK_T
        q += hop * q_t
        grad += hop * g_t
        lse += BLOCK_T * K_HEADS * GROUP
        delta += BLOCK_T * K_HEADS * GROUP
    da *= back
    db *= back
    if ROPE:
        c, s = load_turns(cos, sin, starts, first, end, HALF, BLOCK_N, 1, BLOCK_HALF)
        da, db = turned(da, db, c, -s)
    flat = (first.to(tl.int64) * K_HEADS + k_head) * HEAD_DIM
    to = step * (K_HEADS * HEAD_DIM)
    store_block(grad_k + flat, to, there, 0, da, HALF, BLOCK_HALF)
    store_block(grad_k + flat, to, there, HALF, db, HALF, BLOCK_HALF)
    store_block(grad_v + flat, to, there, 0, dv, HEAD_DIM, BLOCK_D)
