"""scaled_dot_product_attention for one sequence after the other: the reference, on any device and type.

There is no mask beyond one sequence, so memory grows with the longest, not with the row. The price is a
launch for every sequence, and lengths read in host memory: on a device they are waited for, once a batch.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from padless.runtime.attention.backend import Backend, Options, Request
from padless.runtime.attention.boundaries import Boundaries
from padless.runtime.attention.scores import attend_dense, visible

# cuDNN, left out, makes a plan for every new length: 170 ms on an H100.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _unavailable(request: Request) -> str | None:
    return None


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    lengths = boundaries.lengths()
    with sdpa_kernel(_KERNELS) if q.is_cuda else nullcontext():
        # [T, H, D] -> for each sequence [1, H, L, D]
        qs, ks, vs = (torch.split(x.transpose(0, 1)[None], lengths, dim=2) for x in (q, k, v))
        outs = [_one(*sequence, options) for sequence in zip(qs, ks, vs, strict=True)]
    return torch.cat([out[0].transpose(0, 1) for out in outs])


def _one(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """One sequence: [1, H, L, D]."""
    length = q.shape[2]
    window = options.window if options.window is not None and options.window < length else None
    if window is None and options.softcap is None and options.sinks is None:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=options.causal, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    mask = visible(length, window, q.device) if options.causal else None
    return attend_dense(q, k, v, mask, options)


BACKEND = Backend(unavailable=_unavailable, forward=_forward, traceable=False, captured="never")
