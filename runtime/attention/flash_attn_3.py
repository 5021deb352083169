"""FlashAttention-3 (`flash_attn_interface`, built from flash-attention's hopper/): for H100 and H200.

Source: Shah et al., FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

import torch
from torch import Tensor

from padless.runtime.attention.backend import (
    Backend,
    Options,
    Request,
    capability_of,
    cuda_refusal,
    import_refusal,
    lacks,
    last_contiguous,
)
from padless.runtime.attention.boundaries import Boundaries


def _unavailable(request: Request) -> str | None:
    half = (torch.float16, torch.bfloat16)
    reason = cuda_refusal(request, capability=(9, 0), dtypes=half, head_dim=256)
    if reason is None and capability_of(request.device)[0] != 9:
        reason = "its kernels are for Hopper (compute capability 9.0) alone"
    if reason is None and request.deterministic and request.head_dim > 192:
        reason = f"it has no deterministic gradients for heads of {request.head_dim}"
    return (
        reason
        or lacks(request, "sinks")
        or import_refusal("flash_attn_interface", "FlashAttention-3 (flash_attn_interface)")
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    from flash_attn_interface import flash_attn_varlen_func

    bounds, longest = boundaries.cu_seqlens, boundaries.max_seqlen
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    out: Tensor | tuple[Tensor, ...] = flash_attn_varlen_func(
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
    return out if isinstance(out, Tensor) else out[0]  # before August 2025: (out, log-sum-exp)


BACKEND = Backend(unavailable=_unavailable, forward=_forward)
