"""FlashAttention-4 (`flash-attn-4`, flash_attn.cute): written in Python, compiled at first use.

For compute capability 9 to 11. It costs several times the host time of `flash` a call, and each kind of
call is compiled once, in seconds. torch.compile holds it as one operator.
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
    element_overflow,
    import_refusal,
    last_contiguous,
)
from padless.runtime.attention.boundaries import Boundaries


def _unavailable(request: Request) -> str | None:
    half = (torch.float16, torch.bfloat16)
    reason = cuda_refusal(request, capability=(9, 0), dtypes=half, head_dim=256)
    if reason is not None:
        return reason
    major = capability_of(request.device)[0]
    if major > 11:
        return f"it runs on compute capability 9 to 11 and the device has {major}"
    if major > 9 and request.head_dim > 128 and request.head_dim != 256:
        return f"on this device it takes heads of at most 128, or of 256, and q's have {request.head_dim}"
    # Its backward pass overflows 32 bits without an error (Dao-AILab/flash-attention#2611).
    if request.backward and (reason := element_overflow(request)) is not None:
        return reason
    return import_refusal("flash_attn.cute", "flash-attn-4")


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    bounds, longest = boundaries.cu_seqlens, boundaries.max_seqlen
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    out: Tensor | tuple[Tensor, ...] = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=options.scale,
        causal=options.causal,
        window_size=(None, None) if options.window is None else (options.window - 1, 0),
        learnable_sink=options.sinks,
        softcap=options.softcap or 0.0,
        deterministic=options.deterministic,
    )
    return out if isinstance(out, Tensor) else out[0]


BACKEND = Backend(unavailable=_unavailable, forward=_forward, traceable=False)
