"""What rotary kernels share: a tile's rows of cos and sin, and its pairs, loaded and stored.

Where positions come from and how pairs lie in a head is decided at compile time, here alone, so that
each kernel has all the variants. Importing this module imports Triton.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Where a token's row of cos and sin is found; PLACED: `positions` are places already, [tokens].
INDEX, POSITION_IDS, CU_SEQLENS, GATHERED, PLACED = (tl.constexpr(source) for source in range(5))


@triton.jit
def begin(EARLY: tl.constexpr):
    """Waits for what was launched before, where this was launched before that had ended.

    Programs are then set up while the last ones of the kernel before still run, which saves half a
    microsecond to one of a launch (programmatic dependent launch, from compute capability 9.0 on).
    Nothing may be read or written before; what comes after may be launched so from here on.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def split(flat, length, ONE_ROW: tl.constexpr, LONG_INDEXING: tl.constexpr):
    """The row of the batch and the token in it; a packed row alone is spared a division before any load."""
    if ONE_ROW:
        row = flat * 0
        token = flat
    else:
        row = flat // length
        token = flat % length
    if LONG_INDEXING:
        row = row.to(tl.int64)
        token = token.to(tl.int64)
    return row, token


@triton.jit
def places_of(positions, flat, sequences, search_steps):
    """Each token's place in its sequence: its distance from the last boundary at or before it.

    By bisection: log2(N) loads that hit the cache.
    """
    low = flat * 0
    high = low + sequences
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        before = tl.load(positions + middle) <= flat
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return flat - tl.load(positions + low)


@triton.jit
def load_rows(
    cos,
    sin,
    positions,
    axes,
    flat,
    row,
    token,
    live,
    table_rows,
    sequences,
    search_steps,
    cos_b,
    cos_t,
    cos_d,
    position_a,
    position_b,
    position_t,
    HALF: tl.constexpr,
    SOURCE: tl.constexpr,
    AXES: tl.constexpr,
    INVERSE: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """cos and sin of the tokens, [tokens, 1 or HEADS, pairs] in float32; NaN for positions the table lacks.

    What is beyond the last token or pair is a number, so that what is multiplied by zero stays zero.
    With HEADS above 1 each thread loads what its own heads meet, out of the cache: where a tile has fewer
    threads than a row has pairs, handing rows round through shared memory costs more.
    """
    lane = tl.arange(0, BLOCK_HALF)
    inside = (lane < HALF)[None, :]
    if SOURCE == GATHERED:
        place = (row * cos_b + token * cos_t)[:, None]
        found = live[:, None] & inside
        missing = 0.0
    else:
        if AXES:
            axis = tl.load(axes + lane, mask=lane < HALF, other=0)
            ids = positions + (row * position_b + token * position_t)[:, None] + (axis * position_a)[None, :]
            at = tl.load(ids, mask=live[:, None] & inside, other=0)
        elif SOURCE == POSITION_IDS:
            ids = positions + row * position_b + token * position_t
            at = tl.load(ids, mask=live, other=0)[:, None]
        elif SOURCE == CU_SEQLENS:
            at = tl.where(live, places_of(positions, flat, sequences, search_steps), 0)[:, None]
        elif SOURCE == PLACED:
            at = tl.where(live, positions, 0)[:, None]
        else:
            at = tl.where(live, token, 0)[:, None]
        # A position that the table lacks gives NaN, not what lies behind the table.
        found = inside & (at >= 0) & (at < table_rows)
        missing = float("nan")
        if LONG_INDEXING:
            at = at.to(tl.int64)
        else:
            at = at.to(tl.int32)
        place = at * cos_t
    place = place + (lane * cos_d)[None, :]
    if HEADS > 1:
        place = place[:, None, :] + (tl.arange(0, HEADS) * 0)[None, :, None]
        found = found[:, None, :]
        inside = inside[:, None, :]
    c = tl.load(cos + place, mask=found, other=missing).to(tl.float32)
    s = tl.load(sin + place, mask=found, other=missing).to(tl.float32)
    if SOURCE != GATHERED and HALF < BLOCK_HALF:
        c = tl.where(inside, c, 0.0)
        s = tl.where(inside, s, 0.0)
    if INVERSE:
        s = -s
    if HEADS == 1:
        c = c[:, None, :]
        s = s[:, None, :]
    return c, s


@triton.jit
def load_pairs(
    source,
    mask,
    x_d,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Both sides of each pair, [tokens, heads, pairs] in float32; 0 where there is nothing."""
    if INTERLEAVED:
        lane = tl.arange(0, 2 * BLOCK_HALF)
        inside = mask & (lane < 2 * HALF)[None, None, :]
        if LONG_INDEXING:
            lane = lane.to(tl.int64)
        pairs = tl.load(source + (lane * x_d)[None, None, :], mask=inside, other=0.0)
        a, b = tl.split(tl.reshape(pairs, (BLOCK_T, BLOCK_H, BLOCK_HALF, 2)).to(tl.float32))
    else:
        lane = tl.arange(0, BLOCK_HALF)
        inside = mask & (lane < HALF)[None, None, :]
        if LONG_INDEXING:
            lane = lane.to(tl.int64)
        a = tl.load(source + (lane * x_d)[None, None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + ((lane + HALF) * x_d)[None, None, :], mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(
    target,
    mask,
    y_d,
    a,
    b,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """What load_pairs loads, back, rounded once."""
    dtype = target.dtype.element_ty
    if INTERLEAVED:
        lane = tl.arange(0, 2 * BLOCK_HALF)
        inside = mask & (lane < 2 * HALF)[None, None, :]
        if LONG_INDEXING:
            lane = lane.to(tl.int64)
        pairs = tl.reshape(tl.join(a, b), (BLOCK_T, BLOCK_H, 2 * BLOCK_HALF))
        tl.store(target + (lane * y_d)[None, None, :], pairs.to(dtype), mask=inside)
    else:
        lane = tl.arange(0, BLOCK_HALF)
        inside = mask & (lane < HALF)[None, None, :]
        if LONG_INDEXING:
            lane = lane.to(tl.int64)
        tl.store(target + (lane * y_d)[None, None, :], a.to(dtype), mask=inside)
        tl.store(target + ((lane + HALF) * y_d)[None, None, :], b.to(dtype), mask=inside)
