"""The path to the rotary kernel's launch, which at 2,048 tokens would take longer than the kernel.

What depends on shapes, strides and types alone is worked out once and kept: the checks, the tile, the
compiled kernel. A later call makes a key, looks it up and hands addresses on (see `launch`).
"""

# Triton's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
import triton
from torch import Tensor

from .launch import Again, keep
from .rope_inputs import DTYPES, RopeInputs, check_apart, check_inputs, span
from .rope_tiles import CU_SEQLENS, GATHERED, INDEX, POSITION_IDS
from .rope_triton import rope_kernel

MAX_KEPT = 4096
"""Launches remembered before starting over: packed rows come in many lengths."""


SHORT = 4096
"""Tokens up to which a device is filled once or twice. Waiting, in each of many programs, costs more than
a launch before the last kernel has ended then gains: a tenth at 8,192 by one warp a program."""


class Tile(NamedTuple):
    """How much one program turns."""

    tokens: int
    heads: int
    warps: int


def tile_for(q_heads: int, k_heads: int, head_dim: int, tokens: int = 2**31) -> Tile:
    """1,024 elements, by two warps where a token has as many, otherwise by one; twice that for short rows.

    Measured on an H200 at 32/8 and 64/8 heads of 128 and 14/2 of 64. Heads are a power of two that
    divides both counts, where there is one of four or more: what a tile has beyond the last head is idle.
    Up to 4,096 tokens the device is filled once or twice, and larger tiles leave less to wait for.
    """
    common = (q_heads | k_heads) & -(q_heads | k_heads)
    most = triton.next_power_of_2(max(q_heads, k_heads))
    heads = min(8, most, max(4, common)) if common > 1 else min(8, most)
    per_token = heads * triton.next_power_of_2(head_dim)
    if per_token < 1024:
        return Tile(min(16, 1024 // per_token), heads, 1)
    return Tile(1, 2 * heads, 4) if tokens <= SHORT and 2 * heads <= q_heads else Tile(1, heads, 2)


class Launch(NamedTuple):
    """What one combination of shapes, strides and types needs to be launched again."""

    again: Again
    tokens: int
    length: int
    table_rows: int
    reach: int
    """Bytes that q or k spans, the larger: further apart they cannot overlap."""
    apart: set[int]
    """Distances in bytes from q to k that were found free of overlap."""


_LAUNCHES: dict[tuple[Any, ...], Launch] = {}


def _key_of(given: RopeInputs) -> tuple[Any, ...]:
    """All that checks and compilation look at, addresses apart."""
    cos, sin, ids, bounds, axes, rotary_dim, interleaved = given
    return (
        cos.shape, cos.stride(), cos.dtype, cos.device, sin.shape, sin.stride(), sin.dtype, sin.device,
        None if ids is None else (ids.shape, ids.stride(), ids.dtype, ids.device),
        None if bounds is None else (bounds.dtype, bounds.ndim, bounds.stride(), bounds.device),
        None if axes is None else (axes.shape, axes.dtype, axes.device),
        rotary_dim, interleaved,
    )  # fmt: skip


_KINDS: dict[tuple[Any, ...], int] = {}
"""Numbers for what _key_of gave, never given twice: short to hash, in every layer's key."""
_numbers = count()


class _Last(NamedTuple):
    """What the last call was given beside q and k: a step's layers are all given the same."""

    tensors: tuple[Callable[[], Tensor | None], ...]
    """Weak references, cos to frequency_axes: the tensors may go, and are then no longer these."""
    rest: tuple[Any, ...]
    """Their addresses: a tensor may get other memory (one of another shape in the same memory is still all
    there); rotary_dim and interleaved."""
    kind: int


def _nothing() -> None:
    """Stands for a reference to what is not given."""


_last = _Last((_nothing,) * 5, (), -1)


def kind_of(given: RopeInputs, addresses: tuple[int, ...]) -> int:
    """A number that stands for all but addresses and values: for shapes, strides, types and options.

    Kept from the last call where it was given these very tensors, at these addresses.
    """
    global _last
    cos, sin, ids, bounds, axes, rotary_dim, interleaved = given
    (its_cos, its_sin, its_ids, its_bounds, its_axes), its_rest, kind = _last
    rest = (*addresses, rotary_dim, interleaved)
    if (
        its_cos() is cos and its_sin() is sin and its_ids() is ids and its_bounds() is bounds
        and its_axes() is axes and its_rest == rest
    ):  # fmt: skip
        return kind
    key = _key_of(given)
    found = _KINDS.get(key)
    if found is None:
        if len(_KINDS) >= MAX_KEPT:
            _KINDS.clear()
        found = _KINDS[key] = next(_numbers)
    _last = _Last(tuple([_nothing if x is None else ref(x) for x in given[:5]]), rest, found)
    return found


def alignment(*addresses: int) -> tuple[int, ...] | None:
    """Triton compiles apart for each address that is no multiple of 16; None where all are."""
    rests = tuple([address & 15 for address in addresses])
    return rests if any(rests) else None


def rotate(
    q: Tensor, k: Tensor, new_q: Tensor, new_k: Tensor, given: RopeInputs, inverse: bool = False
) -> None:
    """q and k [(B,) T, H, D], turned, into new_q and new_k, which may be q and k; checks on first sight."""
    device = q.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(q.device):
            return rotate(q, k, new_q, new_k, given, inverse)
    cos, sin, ids, bounds, axes, _, _ = given
    in_place = new_q is q
    at_q, at_k, at_cos, at_sin = q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr()
    at_ids = ids.data_ptr() if ids is not None else bounds.data_ptr() if bounds is not None else at_cos
    at_axes = at_cos if axes is None else axes.data_ptr()
    if in_place:
        at_new_q, at_new_k, new_strides = at_q, at_k, None
    else:
        at_new_q, at_new_k, new_strides = new_q.data_ptr(), new_k.data_ptr(), (new_q.stride(), new_k.stride())
    pointers = at_q, at_k, at_new_q, at_new_k, at_cos, at_sin, at_ids, at_axes
    unaligned = (at_q | at_k | at_new_q | at_new_k | at_cos | at_sin | at_ids | at_axes) & 15
    key = (
        q.shape, q.stride(), k.shape, k.stride(), q.dtype, k.dtype, device, k.get_device(),
        kind_of(given, pointers[4:]), inverse, new_strides, alignment(*pointers) if unaligned else None,
    )  # fmt: skip
    launch = _LAUNCHES.get(key)
    sequences = 0 if bounds is None else bounds.shape[0] - 1
    if launch is None or (bounds is not None and sequences < 1):
        if in_place:
            check_apart(q, k)
        if q.ndim == 3 == k.ndim:
            rows = q[None], k[None], new_q[None], new_k[None]
        else:
            rows = q, k, new_q, new_k
        given = given.settled()
        check_inputs(rows[0], rows[1], given)
        _launch_first(key, *rows, given, inverse, in_place, sequences)
        return
    again, tokens, length, table_rows, reach, known = launch
    apart = at_k - at_q
    # Only neighbours in memory can overlap, and those of a fused projection always lie alike.
    if in_place and -reach < apart < reach and apart not in known:
        check_apart(q, k)
        if len(known) >= MAX_KEPT:
            known.clear()
        known.add(apart)
    stream = torch._C._cuda_getCurrentRawStream(device)
    again(stream, *pointers, tokens, length, table_rows, sequences, sequences.bit_length() + 1)


def check_types(q: Tensor, given: RopeInputs) -> None:
    """What the kernels ask beyond what the reference does: TypeError, ValueError."""
    if q.dtype not in DTYPES:
        raise TypeError(f"q and k are {q.dtype}; the kernel takes {', '.join(str(d) for d in DTYPES)}")
    cos, sin = given.cos.stride(), given.sin.stride()
    if cos != sin:
        raise ValueError(f"cos and sin have strides {cos} and {sin}; they must be the same")


def source_of(given: RopeInputs) -> tuple[int, tuple[int, ...]]:
    """Where rows of cos and sin are found, and the strides cos_b to position_t of the kernels."""
    cos, ids, axes = given.cos, given.position_ids, given.frequency_axes
    if cos.ndim == 3:
        return GATHERED.value, (cos.stride(0) if cos.shape[0] > 1 else 0, *cos.stride()[1:], 0, 0, 0)
    table = (0, *cos.stride())
    if ids is not None:
        flat = ids.ndim - (axes is not None) == 1
        per_row = 0 if flat or ids.shape[-2] == 1 else ids.stride(-2)
        return POSITION_IDS.value, (
            *table, ids.stride(0) if axes is not None else 0, per_row, ids.stride(-1),
        )  # fmt: skip
    return (INDEX if given.cu_seqlens is None else CU_SEQLENS).value, (*table, 0, 0, 0)


def early(q: Tensor) -> dict[str, bool]:
    """What Triton's launch is told where q's device can start a kernel before the last one has ended."""
    able = q.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(q.device) >= (9, 0)
    return {"launch_pdl": True} if able else {}


def is_long(tokens: int, *touched: Tensor | None) -> bool:
    """Whether an offset into one of the tensors, or a token's number, needs more than 32 bits."""
    return tokens + 64 >= 2**31 or max(span(x) for x in touched if x is not None) >= 2**31


def _launch_first(
    key: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    new_q: Tensor,
    new_k: Tensor,
    given: RopeInputs,
    inverse: bool,
    in_place: bool,
    sequences: int,
) -> None:
    """Launches through Triton, which compiles where it must, and keeps what came of it."""
    cos, sin, ids, bounds, axes, _, interleaved = given
    check_types(q, given)
    batch, length, q_heads, head_dim = q.shape
    tokens, k_heads = batch * length, k.shape[2]
    if tokens == 0 or head_dim == 0:
        return
    source, row_strides = source_of(given)
    tile = tile_for(q_heads, k_heads, head_dim, tokens)
    blocks = -(-q_heads // tile.heads) + -(-k_heads // tile.heads)
    grid = (-(-tokens // tile.tokens) * blocks, 1, 1)
    half, soon = given.turned // 2, early(q) if tokens <= SHORT else {}
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "HEAD_DIM": head_dim,
        "SOURCE": source,
        "AXES": axes is not None,
        "INTERLEAVED": interleaved,
        "INVERSE": inverse,
        "IN_PLACE": in_place,
        "LONG_INDEXING": is_long(tokens, q, k, new_q, new_k, cos, ids),
        "ONE_ROW": batch == 1,
        "EARLY": bool(soon),
        "BLOCK_T": tile.tokens,
        "BLOCK_H": tile.heads,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - given.turned)),
    }
    strides = (*q.stride(), *k.stride(), *new_q.stride(), *new_k.stride(), *row_strides)
    positions = ids if ids is not None else bounds if bounds is not None else cos
    # Without fused multiply-add the kernel rounds as PyTorch does, and memory is the limit anyway.
    changing = (
        q, k, new_q, new_k, cos, sin, positions, axes if axes is not None else cos,
        tokens, length, cos.shape[0], sequences, sequences.bit_length() + 1,
    )  # fmt: skip
    kernel = rope_kernel[grid](
        *changing, *strides, **constants, num_warps=tile.warps, enable_fp_fusion=False, **soon
    )
    if kernel is None:  # the interpreter compiles nothing
        return
    if len(_LAUNCHES) >= MAX_KEPT:
        _LAUNCHES.clear()
    reach = max(span(q), span(k)) * q.element_size()
    again = keep(kernel, grid, (*changing, *strides, *constants.values()), len(changing))
    _LAUNCHES[key] = Launch(again, tokens, length, cos.shape[0], reach, set())
