"""scaled_dot_product_attention in one call, with a mask that keeps the sequences apart.

One launch whatever the sequences, on any device; every token is held against every other, so time and
memory grow with the square of the row. The mask is made once a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padless.runtime.attention.backend import INT32, Backend, Options, Request
from padless.runtime.attention.boundaries import Boundaries
from padless.runtime.attention.scores import attend_dense


def _unavailable(request: Request) -> str | None:
    if request.tokens**2 >= INT32:
        return f"a mask of {request.tokens:,} x {request.tokens:,} tokens is beyond 2**31 elements"
    return None


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    key = ("mask", options.causal, options.window)
    mask = boundaries.made(key, lambda: block_mask(boundaries, options))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend_dense(q, k, v, mask, options)[0].transpose(0, 1)


def block_mask(boundaries: Boundaries, options: Options) -> Tensor:
    """[T, T] bool: True where the row's token sees the column's."""
    bounds = boundaries.cu_seqlens
    at = torch.arange(boundaries.tokens, dtype=torch.int32, device=bounds.device)
    sequence = torch.bucketize(at, bounds, right=True)
    mask = sequence[:, None] == sequence[None, :]
    if options.causal:
        mask = mask & (at[:, None] >= at[None, :])
    if options.window is not None:
        mask = mask & (at[:, None] - at[None, :] < options.window)
    return mask


BACKEND = Backend(unavailable=_unavailable, forward=_forward, captured="never")
