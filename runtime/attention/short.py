"""Our own kernels for rows of short sequences, where nothing that was measured is faster.

A tile is a few tokens' queries of all heads that share keys, so that rows of 50 to 300 tokens keep a
device busy, and the way back writes each gradient once, without sums in float32. The tiles come from
the boundaries, in host memory, once a batch (`Boundaries.lengths` waits for the device where nothing
else is known). A CUDA graph lists them on the device, as it may be replayed over other boundaries. What the
kernels cannot do (sinks, seeing what comes after) goes to a library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from padless.runtime.attention.backend import (
    Backend,
    Forward,
    Options,
    Request,
    capture_of,
    cuda_refusal,
    import_refusal,
    is_captured,
    lacks,
    last_contiguous,
)
from padless.runtime.attention.boundaries import Boundaries

if TYPE_CHECKING:
    from padless.kernels.short_attention_inputs import Options as Numbers
    from padless.kernels.short_attention_work import WorkList


def _unavailable(request: Request) -> str | None:
    if not request.causal:
        return "it is causal alone"
    if is_captured(request.device):
        from padless.kernels.capture import tells_captures

        if not tells_captures():
            return "the CUDA driver does not tell for which graph tiles were listed"
    half = (torch.float16, torch.bfloat16)
    return (
        lacks(request, "sinks")
        or cuda_refusal(request, capability=(8, 0), dtypes=half, head_dim=256)
        or import_refusal("triton", "triton")
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    return _prepare(q, k, boundaries, options)(q, k, v, boundaries, options)


def _prepare(q: Tensor, k: Tensor, boundaries: Boundaries, options: Options) -> Forward:
    from padless.kernels.short_attention import attend

    work, numbers = _work(q, k, boundaries), _numbers(options)

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return attend(q, k, v, work, None, None, numbers)

    return forward


def kept_forward(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options
) -> tuple[Tensor, Tensor]:
    """Without autograd: the result [T, Hq, D], and the base-2 logarithm of each query's sum [T, Hq]."""
    from padless.kernels.short_attention import forward

    q, k, v = (last_contiguous(x) for x in (q, k, v))
    saved = forward(q, k, v, _work(q, k, boundaries), None, None, _numbers(options), keep=True)
    return saved.out, saved.lse


def kept_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    boundaries: Boundaries,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from what `kept_forward` left."""
    from padless.kernels.short_attention import backward
    from padless.kernels.short_attention_inputs import Saved

    q, k, v = (last_contiguous(x) for x in (q, k, v))
    work, numbers = _work(q, k, boundaries), _numbers(options)
    return backward(Saved(q, k, out, lse), v, grad, work, None, None, numbers)


def _numbers(options: Options) -> Numbers:
    from padless.kernels.short_attention_inputs import Options as Numbers

    return Numbers(options.scale, options.window, options.softcap)


def _work(q: Tensor, k: Tensor, boundaries: Boundaries) -> WorkList:
    """The tiles, listed by the first layer of a batch."""
    key = ("short", q.shape[1:], k.shape[1], q.device, capture_of(q.device))
    return boundaries.made(key, lambda: _listed(q, k, boundaries))


def _listed(q: Tensor, k: Tensor, boundaries: Boundaries) -> WorkList:
    """The tiles, on the device of q."""
    from padless.kernels.short_attention import tiles_for
    from padless.kernels.short_attention_work import work_list, work_list_on_device

    tiles = tiles_for(q.shape[1], k.shape[1], q.shape[2])
    if is_captured(q.device):
        return work_list_on_device(boundaries.cu_seqlens, boundaries.tokens, boundaries.max_seqlen, tiles)
    work = work_list(torch.tensor([0, *boundaries.lengths()]).cumsum(0), tiles)
    return (work.pin_memory() if q.is_cuda else work).to(q.device)


BACKEND = Backend(
    unavailable=_unavailable, forward=_forward, prepare=_prepare, traceable=False, captured="anew"
)
