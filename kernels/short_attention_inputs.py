"""What attention of short packed sequences is given, checked by shape alone, before anything is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .short_attention_work import WorkList

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class Options(NamedTuple):
    """Numbers that are the same for every token."""

    scale: float
    window: int | None
    """A token sees itself and the window - 1 before it."""
    softcap: float | None


class Saved(NamedTuple):
    """What the way back needs beside v. Where kernels turned q and k these are as turned."""

    q: Tensor
    k: Tensor
    out: Tensor
    lse: Tensor
    """float32 [T, Hq]: log2 of the sum of 2 ** (score in base 2); the reference leaves it unwritten."""


def options_of(q: Tensor, scale: float | None, window: int | None, softcap: float | None) -> Options:
    """Raises ValueError for a scale, window or softcap that is not above zero."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    for name, value in (("scale", scale), ("window", window), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    return Options(scale, window, softcap)


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, work: WorkList, cos: Tensor | None, sin: Tensor | None
) -> None:
    """Raises ValueError or TypeError, naming shapes, for what cannot be attended so."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if (
        q.ndim != 3
        or k.ndim != 3
        or k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[2] != k.shape[2]
    ):
        raise ValueError(f"q must be [T, Hq, D], k and v [T, Hk, D], of the same T and D: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of k's {k.shape[1]}: {shapes}")
    if q.shape[2] % 2 or not 0 < q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"heads have {q.shape[2]} dimensions; they must be even and at most {MAX_HEAD_DIM}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be the same")
    if work.tokens != q.shape[0]:
        raise ValueError(f"the work list is for {work.tokens} tokens: {shapes}")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin go together; one of them is missing")
    if cos is not None and sin is not None:
        if cos.shape != sin.shape or cos.ndim != 2 or 2 * cos.shape[1] != q.shape[2]:
            raise ValueError(
                f"cos {list(cos.shape)} and sin {list(sin.shape)} must both be tables [S, D/2]: {shapes};"
                " for a part of the head or interleaved pairs turn q and k with rope_qk before"
            )
        if cos.shape[0] < work.max_seqlen:
            raise ValueError(
                f"the longest sequence has {work.max_seqlen} tokens and the table {cos.shape[0]} rows;"
                " make it longer"
            )
    for name, x in (("k", k), ("v", v), ("work", work.buffer), ("cos", cos), ("sin", sin)):
        if x is not None and x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}; move it there once")
