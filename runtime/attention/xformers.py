"""xFormers' memory_efficient_attention with a block-diagonal mask: whichever of its kernels fits.

It wants the boundaries as a list of lengths on the host, so boundaries that lie on a device without a copy
are waited for, once a batch. Grouped k and v are repeated: its backward passes take none.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from padless.runtime.attention.backend import Backend, Options, Request, cuda_refusal, import_refusal, lacks
from padless.runtime.attention.boundaries import Boundaries


def _unavailable(request: Request) -> str | None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    capability = (8, 0) if request.dtype == torch.bfloat16 else (6, 0)
    reason = cuda_refusal(request, capability=capability, dtypes=dtypes, head_dim=256)
    return (
        reason
        or lacks(request, "softcap", "sinks", "deterministic")
        or import_refusal("xformers.ops", "xformers")
        or _kernels_refusal()
    )


@cache
def _kernels_refusal() -> str | None:
    """A wheel for another torch imports, and then has no kernels."""
    try:
        from xformers._cpp_lib import _built_with_cuda
    except ImportError:
        return None
    return None if _built_with_cuda else "xformers' kernels do not load; it is built for another torch"


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    from xformers.ops import memory_efficient_attention

    key = ("xformers", options.causal, options.window)
    bias = boundaries.made(key, lambda: _bias(boundaries, options))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out: Tensor = memory_efficient_attention(q[None], k[None], v[None], attn_bias=bias, scale=options.scale)
    return out[0]


def _bias(boundaries: Boundaries, options: Options) -> Any:
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, BlockDiagonalMask

    kind = BlockDiagonalCausalMask if options.causal and options.window is None else BlockDiagonalMask
    bias = kind.from_seqlens(boundaries.lengths(), device=boundaries.cu_seqlens.device)
    return bias if options.window is None else bias.make_local_attention(options.window)


BACKEND = Backend(unavailable=_unavailable, forward=_forward, traceable=False, captured="never")
