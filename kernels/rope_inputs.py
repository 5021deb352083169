"""What a rotary call is given, checked by shape alone, before anything is launched.

Everything here reads shapes, strides and addresses, never a value: a check of values would wait for
the device in every layer. The price is that a position beyond the table cannot be an error where
position_ids lie on a device; the kernel then writes NaN instead of reading past the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class RopeInputs(NamedTuple):
    """All that turns q and k; what is None is not used. A tuple, so that making one costs nothing."""

    cos: Tensor
    """[S, R/2], a table of positions, or gathered for each token: [B, T, R], [B, T, R/2]."""
    sin: Tensor
    position_ids: Tensor | None
    """Integers [T], [B, T]; with frequency_axes [A, T], [A, B, T]."""
    cu_seqlens: Tensor | None
    """int32 [N + 1] over the B * T tokens; positions restart at each."""
    frequency_axes: Tensor | None
    """int32 [R/2]: the row of position_ids that turns each frequency."""
    rotary_dim: int | None
    """R: how many leading dimensions of a head are turned; None for what the tables tell."""
    interleaved: bool
    """Pairs are (0, 1), (2, 3), ... instead of (0, R/2), (1, R/2 + 1), ..."""

    def settled(self) -> RopeInputs:
        """The same with rotary_dim known: twice a table's width; the width of gathered cos unless told."""
        if self.rotary_dim is not None:
            return self
        return self._replace(rotary_dim=self.cos.shape[-1] * (2 if self.cos.ndim == 2 else 1))

    @property
    def turned(self) -> int:
        """R, of settled inputs."""
        assert self.rotary_dim is not None
        return self.rotary_dim


def check_length(cos: Tensor, max_seqlen: int) -> None:
    """Raises ValueError for a table too short for the longest sequence."""
    if cos.ndim == 2 and max_seqlen > cos.shape[0]:
        raise ValueError(f"max_seqlen is {max_seqlen} and the table has {cos.shape[0]} rows; make it longer")


def check_inputs(q: Tensor, k: Tensor, given: RopeInputs) -> None:
    """Raises ValueError or TypeError, naming shapes, for q, k [B, T, H, D] that cannot be turned so."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, cos {list(given.cos.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2]:
        raise ValueError(f"q and k must both be [T, H, D] or [B, T, H, D] with the same tokens: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k have heads of {q.shape[-1]} and {k.shape[-1]}; they must match: {shapes}")
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype} and k is {k.dtype}; they must be the same")
    if given.cos.shape != given.sin.shape or given.cos.dtype != given.sin.dtype:
        raise ValueError(f"cos and sin differ: sin is {list(given.sin.shape)} {given.sin.dtype}; {shapes}")
    _check_tables(q, given, shapes)
    _check_positions(q, given, shapes)
    for name in ("k", "cos", "sin", "position_ids", "cu_seqlens", "frequency_axes"):
        tensor = k if name == "k" else getattr(given, name)
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {tensor.device}; move it there once")


def _check_tables(q: Tensor, given: RopeInputs, shapes: str) -> None:
    width, turned, head = given.cos.shape[-1], given.turned, q.shape[-1]
    if turned < 2 or turned % 2:
        raise ValueError(f"rotary dimension {turned} is odd or zero; dimensions turn in pairs: {shapes}")
    if turned > head:
        raise ValueError(
            f"rotary dimension {turned} is larger than the head's {head}: {shapes}"
            " (a table has R/2 columns, cos gathered for each token R)"
        )
    if given.cos.ndim == 2:
        if width * 2 != turned:
            raise ValueError(f"a table for rotary dimension {turned} has {turned // 2} columns: {shapes}")
    elif given.cos.ndim == 3:
        if width not in (turned, turned // 2):
            raise ValueError(f"gathered cos must have {turned} or {turned // 2} columns: {shapes}")
        if given.cos.shape[0] not in (1, q.shape[0]) or given.cos.shape[1] != q.shape[1]:
            raise ValueError(f"gathered cos must have a row for each of q's tokens: {shapes}")
        if given.position_ids is not None or given.cu_seqlens is not None:
            raise ValueError(
                f"gathered cos and sin hold the positions; leave position_ids and cu_seqlens: {shapes}"
            )
    else:
        raise ValueError(f"cos must be a table [S, R/2] or gathered [B, T, R]: {shapes}")


def _check_positions(q: Tensor, given: RopeInputs, shapes: str) -> None:
    ids, bounds, axes = given.position_ids, given.cu_seqlens, given.frequency_axes
    if ids is not None and bounds is not None:
        raise ValueError("position_ids and cu_seqlens both tell the positions; give one of them")
    if ids is None and axes is not None:
        raise ValueError("frequency_axes choose among the rows of position_ids; give those too")
    rows = given.cos.shape[0]
    if given.cos.ndim == 2 and ids is None and bounds is None and q.shape[1] > rows:
        raise ValueError(
            f"{q.shape[1]} tokens in a row and a table of {rows} positions: {shapes}; make it longer"
        )
    if ids is not None:
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"position_ids are {ids.dtype}; they must be int32 or int64")
        whole = (1, q.shape[0])
        tokens = ids.shape if axes is None else ids.shape[1:]
        fits = tokens[-1:] == (q.shape[1],) and (
            len(tokens) == 1 or (len(tokens) == 2 and tokens[0] in whole)
        )
        if not fits:
            want = "[T] or [B, T]" if axes is None else "[A, T] or [A, B, T] (frequency_axes are given)"
            raise ValueError(f"position_ids are {list(ids.shape)}; they must be {want}: {shapes}")
    if axes is not None and (axes.dtype != torch.int32 or axes.shape != (given.turned // 2,)):
        raise ValueError(
            f"frequency_axes are {axes.dtype} {list(axes.shape)}, not int32 [{given.turned // 2}]"
        )
    if bounds is not None and (bounds.dtype != torch.int32 or bounds.ndim != 1 or bounds.shape[0] < 2):
        raise ValueError(
            f"cu_seqlens are {bounds.dtype} {list(bounds.shape)}; they must be int32 [N + 1], N >= 1"
        )


def span(x: Tensor) -> int:
    """Elements from the first to the last that x touches, both included; 0 where it has none."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def check_apart(q: Tensor, k: Tensor) -> None:
    """Raises ValueError where q or k, to be written in place, hold an element twice or share one."""
    if q.numel() == 0 or k.numel() == 0:
        return
    for name, x in (("q", q), ("k", k)):
        if _meet(0, _offsets(x, x), proper=True):
            raise ValueError(
                f"{name} {list(x.shape)} with strides {list(x.stride())} overlaps itself in"
                " memory and cannot be turned in place; use rope_qk"
            )
    size = q.element_size()
    apart = k.data_ptr() - q.data_ptr()
    if apart >= span(q) * size or -apart >= span(k) * size:
        return
    if apart % size or _meet(apart // size, _offsets(q, k), proper=False):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} overlap in memory and cannot be turned in place;"
            " use rope_qk"
        )


def _offsets(x: Tensor, y: Tensor) -> list[tuple[int, int, int]]:
    """The differences between an index into x and one into y: (stride, lowest, highest), by stride."""
    if x is y:  # two dimensions of equal stride must not become one here: they are an overlap
        steps = [(stride, count - 1) for count, stride in zip(x.shape, x.stride(), strict=True) if count > 1]
        return sorted(((stride, -most, most) for stride, most in steps), reverse=True)
    reach: dict[int, tuple[int, int]] = {}
    for tensor, lowest, highest in ((x, 0, 1), (y, 1, 0)):
        for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if count > 1:
                low, high = reach.get(stride, (0, 0))
                reach[stride] = (low - lowest * (count - 1), high + highest * (count - 1))
    return sorted(((stride, low, high) for stride, (low, high) in reach.items()), reverse=True)


def _meet(distance: int, offsets: list[tuple[int, int, int]], *, proper: bool) -> bool:
    """Whether offsets, each so many times, add up to the distance; `proper`: not by being zero each.

    Exact where strides nest, as those of views of one buffer do; otherwise it may see an overlap too many.
    """
    if not offsets:
        return distance == 0 and not proper
    (stride, low, high), *rest = offsets
    if stride == 0:
        return distance == 0
    least = sum(step * lowest for step, lowest, _ in rest)
    most = sum(step * highest for step, _, highest in rest)
    first = max(low, -((most - distance) // stride))
    last = min(high, (distance - least) // stride)
    if last - first > 64:  # strides that hardly nest: taken for an overlap rather than searched
        return True
    return any(
        _meet(distance - times * stride, rest, proper=proper and times == 0)
        for times in range(first, last + 1)
    )
