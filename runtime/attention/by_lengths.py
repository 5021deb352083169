"""Attention of a compiled program whose backend is chosen when it runs: `short` or `flash`, by the lengths.

While a program is traced nobody knows how long the sequences of its batches will be, and which of the two is
faster depends on that alone. So both are one operator each way, which looks at the batch's boundaries as
eager calls do: checked and listed once a batch, by the first layer. Both keep the same: the result, and the
logarithm of each query's sum, so that either goes back from what the other left, were the lengths known
on the way there and not on the way back.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from padless.runtime.attention import flash
from padless.runtime.attention.backend import Options, capture_of
from padless.runtime.attention.boundaries import Boundaries, boundaries_of
from padless.runtime.attention.short import kept_backward, kept_forward

LOG2E = math.log2(math.e)
NAMES = ("auto", "short")
"""What a program may ask for here: whichever is faster for its batch, or `short` for all of them."""


def forward_by_lengths(
    name: str, q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options
) -> Tensor:
    """The operator, for a call that `flash` can do as well, or `short` alone."""
    causal, scale, window, softcap, sinks, deterministic = options
    assert name in NAMES and causal and sinks is None
    out: Tensor = _forward(
        q, k, v, boundaries.cu_seqlens, boundaries.max_seqlen, name, scale, window, softcap, deterministic
    )[0]
    return out


_GIVEN: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
"""Boundaries of the way there, by address and number: memory that is held as long as they are."""


def _there(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Boundaries:
    _GIVEN[cu_seqlens.data_ptr(), len(cu_seqlens)] = cu_seqlens
    return boundaries_of(cu_seqlens, max_seqlen, tokens)


def _back(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Boundaries:
    """Those of the way there, where autograd hands on another tensor over the same memory."""
    given = _GIVEN.get((cu_seqlens.data_ptr(), len(cu_seqlens)))
    if given is not None and given._version == cu_seqlens._version:
        cu_seqlens = given
    return boundaries_of(cu_seqlens, max_seqlen, tokens)


def _is_short(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options, name: str) -> bool:
    if name == "short":
        return True
    from padless.runtime.attention.choice import choose, request_of

    # Kept with the boundaries: every layer asks for the same.
    key = ("by lengths", q.shape, k.shape, q.dtype, q.device, capture_of(q.device))
    return boundaries.made(key, lambda: choose(request_of(q, k, v, boundaries, options))) == "short"


@torch.library.custom_op("padless::attention_by_lengths", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, name: str, scale: float,
    window: int | None, softcap: float | None, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Result [T, Hq, D], and the base-2 logarithm of the sums [T, Hq]."""
    boundaries = _there(cu_seqlens, max_seqlen, q.shape[0])
    options = Options(True, scale, window, softcap, None, deterministic)
    if _is_short(q, k, v, boundaries, options, name):
        out, lse = kept_forward(q, k, v, boundaries, options)
        return out.contiguous(), lse
    out, lse = flash.kept_forward(q, k, v, boundaries, options)
    return out.contiguous(), (lse.T * LOG2E).contiguous()


@_forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("padless::attention_by_lengths_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, name: str, scale: float, window: int | None, softcap: float | None, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    boundaries = _back(cu_seqlens, max_seqlen, q.shape[0])
    options = Options(True, scale, window, softcap, None, deterministic)
    if _is_short(q, k, v, boundaries, options, name):
        grads = kept_backward(grad, q, k, v, out, lse, boundaries, options)
    else:
        natural = (lse.T / LOG2E).contiguous()
        grads = flash.kept_backward(grad, q, k, v, out, natural, boundaries, options)
    grad_q, grad_k, grad_v = (x.contiguous() for x in grads)
    return grad_q, grad_k, grad_v


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, unused: Tensor) -> tuple[Any, ...]:
    grads = _backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*grads, None, *(None,) * len(ctx.rest))


_forward.register_autograd(_gradients, setup_context=_setup)
