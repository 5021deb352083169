"""FlashAttention-2 as PyTorch bundles it: no package beside torch, and the least host time of all.

Grouped heads are read as they are, in forward and backward. aten's operator has a gradient formula, so a
usual call is that operator and nothing else (20 us of host time on an H200's host; 30 through a Python
autograd function, 95 through torch.nn.attention.varlen with k and v repeated). Sinks and deterministic
gradients go through a function of our own: with the sink's logit added to the log-sum-exp, the backward
kernel computes the right gradients as it is, for two element-wise passes.

Source: Dao, FlashAttention-2 (arXiv 2307.08691); sinks as in GPT-OSS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from padless.kernels.autograd import direct
from padless.runtime.attention.backend import (
    INT32,
    Backend,
    Forward,
    Options,
    Request,
    cuda_refusal,
    lacks,
    last_contiguous,
)
from padless.runtime.attention.boundaries import Boundaries


def _unavailable(request: Request) -> str | None:
    half = (torch.float16, torch.bfloat16)
    return (
        cuda_refusal(request, capability=(8, 0), dtypes=half, head_dim=256)
        or lacks(request, "softcap")
        or backward_overflow(request)
    )


def backward_overflow(request: Request) -> str | None:
    """Why FlashAttention-2 before 2.7.5 cannot go back: it counted its padded gradient sum in 32 bits.

    Seen with torch 2.11: 530,000 tokens, 32 heads of 128: wrong gradients of q, and no error.
    """
    rows = request.tokens + 128 * request.sequences
    size = rows * request.q_heads * (-(-request.head_dim // 32) * 32)
    if request.backward and size >= INT32:
        return (
            f"its backward pass counts (tokens + 128 x sequences) x heads x head size in 32 bits, and "
            f"{request.tokens:,} tokens in {request.sequences:,} sequences give {size:,}; put fewer "
            "sequences in a pack (--max-sequences-per-pack)"
        )
    return None


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    bounds, longest, kernel = boundaries.cu_seqlens, boundaries.max_seqlen, _kernel(options)
    if options.sinks is None and not options.deterministic:
        return _run(q, k, v, bounds, longest, *kernel)[0]
    out: Tensor = _Flash.apply(q, k, v, options.sinks, bounds, longest, kernel, options.deterministic)  # type: ignore[no-untyped-call]
    return out


def _prepare(q: Tensor, k: Tensor, boundaries: Boundaries, options: Options) -> Forward:
    """`_forward` for eager calls, by way of less Python."""
    operator = torch.ops.aten._flash_attention_forward.default
    bounds, longest, kernel = boundaries.cu_seqlens, boundaries.max_seqlen, _kernel(options)
    causal, scale, left, right = kernel

    def plain(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
        out: Tensor = operator(
            q, k, v, bounds, bounds, longest, longest, 0.0, causal, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
        return out

    def own(q: Tensor, k: Tensor, v: Tensor, _: Boundaries, options: Options) -> Tensor:
        q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
        out: Tensor = _flash(q, k, v, options.sinks, bounds, longest, kernel, options.deterministic)
        return out

    return plain if options.sinks is None and not options.deterministic else own


def _kernel(options: Options) -> tuple[bool, float, int | None, int | None]:
    left, right = (None, None) if options.window is None else (options.window - 1, 0)
    return options.causal, options.scale, left, right


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    causal: bool,
    scale: float,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp [Hq, T], and three tensors for dropout, which there is none of."""
    given: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward.default(
        q, k, v, bounds, bounds, longest, longest, 0.0, causal, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return given


def kept_forward(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options
) -> tuple[Tensor, Tensor]:
    """Without autograd: the result [T, Hq, D], and the logarithm of each query's sum [Hq, T]; no sinks."""
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    out, lse, *_ = _run(q, k, v, boundaries.cu_seqlens, boundaries.max_seqlen, *_kernel(options))
    return out, lse


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
    grad, q, k, v = (last_contiguous(x) for x in (grad, q, k, v))
    bounds, longest = boundaries.cu_seqlens, boundaries.max_seqlen
    causal, scale, left, right = _kernel(options)
    unused = torch.empty(
        2, dtype=torch.uint64, device=q.device
    )  # the state of dropout, which there is none of
    backward: Any = torch.ops.aten._flash_attention_backward.default
    backward = _deterministic_backward if options.deterministic else backward
    grads: tuple[Tensor, Tensor, Tensor] = backward(
        grad, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, causal, unused, unused,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return grads


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bounds: Tensor,
        longest: int,
        kernel: tuple[bool, float, int | None, int | None],
        deterministic: bool,
    ) -> Tensor:
        out, lse, *random, _ = _run(q, k, v, bounds, longest, *kernel)
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.float()[:, None])  # [Hq, T]
            out = (out * (lse - with_sink).exp().T[..., None]).to(q.dtype)
            lse = with_sink
        ctx.save_for_backward(q, k, v, sinks, bounds, out, lse, *random)
        ctx.rest = longest, kernel, deterministic
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, bounds, out, lse, *random = ctx.saved_tensors
        longest, (causal, scale, left, right), deterministic = ctx.rest
        grad = last_contiguous(grads[0])
        backward: Any = torch.ops.aten._flash_attention_backward.default
        if deterministic:
            backward = _traced_back if torch.compiler.is_compiling() else _deterministic_backward
        grad_q, grad_k, grad_v = backward(
            grad, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, causal, *random,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        grad_sinks = None
        if sinks is not None:
            # The sink's value is 0: its score's gradient is its share times 0 - sum(grad * out).
            share = (sinks.float()[:, None] - lse).exp()
            grad_sinks = -(share * (grad.float() * out).sum(-1).T).sum(1).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, *(None,) * 4


_flash = direct(_Flash)


def _deterministic_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds_q: Tensor,
    bounds_k: Tensor, longest_q: int, longest_k: int, dropout: float, causal: bool, random: Tensor,
    unused: Tensor, *, scale: float, window_size_left: int | None, window_size_right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """aten reads the process-wide switch, so it is on for this launch."""
    was, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward.default(
            grad, q, k, v, out, lse, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, random,
            unused, scale=scale, window_size_left=window_size_left, window_size_right=window_size_right,
        )  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
    return grads


_traced_back = torch.library.custom_op(
    "padless::flash_backward_deterministic", _deterministic_backward, mutates_args=()
)
"""The same as an operator, which torch.compile traces."""


@_traced_back.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


BACKEND = Backend(unavailable=_unavailable, forward=_forward, prepare=_prepare)
