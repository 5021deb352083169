"""The package flash-attn 2: FlashAttention-2 with softcap, where it is installed.

Beside softcap it does what `flash` does without a package. Its backward pass counts in 32 bits before
2.7.5, as aten's does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padless.runtime.attention.backend import (
    Backend,
    Options,
    Request,
    cuda_refusal,
    import_refusal,
    lacks,
    last_contiguous,
)
from padless.runtime.attention.boundaries import Boundaries
from padless.runtime.attention.flash import backward_overflow


def _unavailable(request: Request) -> str | None:
    half = (torch.float16, torch.bfloat16)
    reason = cuda_refusal(request, capability=(8, 0), dtypes=half, head_dim=256)
    return (
        reason
        or lacks(request, "sinks")
        or backward_overflow(request)
        or import_refusal("flash_attn.flash_attn_interface", "flash-attn 2")
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    bounds, longest = boundaries.cu_seqlens, boundaries.max_seqlen
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        softmax_scale=options.scale,
        causal=options.causal,
        window_size=(-1, -1) if options.window is None else (options.window - 1, 0),
        softcap=options.softcap or 0.0,
        deterministic=options.deterministic,
    )
    return out


BACKEND = Backend(unavailable=_unavailable, forward=_forward)
