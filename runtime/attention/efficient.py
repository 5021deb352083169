"""PyTorch's memory-efficient attention, with boundaries: for cards and types that FlashAttention lacks.

A CUTLASS kernel that runs from compute capability 5.0 on, so on T4 and RTX 20 cards (float16), and takes
float32 and any head size. Grouped k and v are repeated for it, and its backward adds up in no fixed order.

Source: Lefaudeux et al., xFormers (2022), whose operator this is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from padless.runtime.attention.backend import (
    Backend,
    Options,
    Request,
    cuda_refusal,
    element_overflow,
    lacks,
    last_contiguous,
)
from padless.runtime.attention.boundaries import Boundaries


def _unavailable(request: Request) -> str | None:
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    if request.dtype == torch.bfloat16 and request.device.type == "cuda":
        capability = (8, 0)
    else:
        capability = (5, 0)
    reason = cuda_refusal(request, capability=capability, dtypes=dtypes, head_dim=512)
    return reason or element_overflow(request) or lacks(request, "softcap", "sinks", "deterministic")


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    out: Tensor = _Efficient.apply(  # type: ignore[no-untyped-call]
        q,
        k,
        v,
        boundaries.cu_seqlens,
        boundaries.max_seqlen,
        int(options.causal),
        options.scale,
        options.window,
    )
    return out


class _Efficient(torch.autograd.Function):
    """aten's own gradient formula leaves the window out, so backward is called here."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        longest: int,
        mask_type: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[:3])
        out, lse, *random, longest_q, longest_k = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, bounds, bounds, longest, longest, 0.0, mask_type, wanted,
            scale=scale, window_size=window,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, bounds, out, lse, *random)
        ctx.rest = longest_q, longest_k, mask_type, scale, window
        result: Tensor = out[0]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, out, lse, *random = ctx.saved_tensors
        longest_q, longest_k, mask_type, scale, window = ctx.rest
        grad = last_contiguous(grads[0])
        given = _backward(
            grad, q, k, v, out, bounds, longest_q, longest_k, lse, *random, mask_type, scale, window
        )
        return *given, *(None,) * 5


@torch.library.custom_op("padless::efficient_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, bounds: Tensor, longest_q: int,
    longest_k: int, lse: Tensor, seed: Tensor, offset: Tensor, mask_type: int, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """An operator of our own, because aten's has a shape function for other arguments than it takes."""
    grad_q, grad_k, grad_v, _ = torch.ops.aten._efficient_attention_backward(
        grad[None], q[None], k[None], v[None], None, out, bounds, bounds, longest_q, longest_k, lse, 0.0,
        seed, offset, mask_type, False, scale=scale, window_size=window,
    )  # fmt: skip
    return grad_q[0], grad_k[0], grad_v[0]


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


BACKEND = Backend(unavailable=_unavailable, forward=_forward)
