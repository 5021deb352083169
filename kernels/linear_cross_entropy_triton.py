"""Cross-entropy of a chunk of logits, each row by one program that reads it twice and writes it once.

The second reading finds most of a row in the device's cache. Memory is the limit, two or three bytes' worth
of arithmetic a byte: half the largest block that a program can hold, so that two programs share a
multiprocessor and one loads while the other adds up. Importing this module imports Triton.
"""

# Triton's decorators and kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Again, keep
from .rope_launch import MAX_KEPT, alignment

MAX_BLOCK = 16_384


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    columns,
    ignored,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows. logits [n, columns], contiguous, become their gradients; losses [n] float32.

    Online softmax (Milakov and Gimelshein 2018), in base 2.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    live = target != ignored
    column = tl.arange(0, BLOCK)
    # A target that is no column makes the loss NaN: nothing beyond the row is read.
    own = tl.load(logits + target, mask=(target >= 0) & (target < columns), other=float("nan"))
    end = tl.where(live, columns, 0)  # of a row that is ignored nothing is read
    top = tl.full((), -1e30, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, end, BLOCK):
        there = first + column < end
        x = tl.load(logits + first + column, mask=there, other=float("-inf")).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, tl.reduce(x, 0, tl.standard._elementwise_max))
        total = total * tl.exp2(top - new_top) + tl.reduce(tl.exp2(x - new_top), 0, tl.standard._sum_combine)
        top = new_top
    whole = tl.where(live, top, 0.0) + tl.log2(tl.where(live, total, 1.0))
    tl.store(losses + row, tl.where(live, (whole - own.to(tl.float32) * LOG2E) / LOG2E, 0.0))
    if GRADIENTS:
        for first in range(0, columns, BLOCK):
            x = tl.load(logits + first + column, mask=first + column < end, other=0.0).to(tl.float32)
            share = tl.exp2(x * LOG2E - whole) - tl.where(first + column == target, 1.0, 0.0)
            share = tl.where(live, share, 0.0).to(logits.dtype.element_ty)
            tl.store(logits + first + column, share, mask=first + column < columns)


_LAUNCHES: dict[tuple[Any, ...], Again] = {}


def losses_in_place(
    logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, gradients: bool
) -> None:
    """The kernel over logits [n, V], contiguous, on the current device; later launches are `launch`'s."""
    tensors = logits, targets, losses
    rows, columns = logits.shape
    pointers = tuple(x.data_ptr() for x in tensors)
    key = (
        columns, ignore_index, gradients, logits.dtype, targets.dtype, logits.device, alignment(*pointers)
    )  # fmt: skip
    again = _LAUNCHES.get(key)
    if again is not None:
        again(torch._C._cuda_getCurrentRawStream(logits.get_device()), *pointers, programs=rows)
        return
    block = min(MAX_BLOCK, triton.next_power_of_2(columns))
    rest = columns, ignore_index, gradients, block
    warps = max(1, min(16, block // 1024))
    compiled: Any = cross_entropy_kernel[(rows, 1, 1)](*tensors, *rest, num_warps=warps)
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(_LAUNCHES) >= MAX_KEPT:
        _LAUNCHES.clear()
    _LAUNCHES[key] = keep(compiled, (rows, 1, 1), (*tensors, *rest), len(tensors))
