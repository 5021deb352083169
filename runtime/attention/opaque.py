"""A backend that torch.compile cannot look into, as one operator of a compiled program.

A compiled program has no graph break there. Backward computes forward once more: what a backend saves is
not seen from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from padless.runtime.attention.backend import Options
from padless.runtime.attention.boundaries import Boundaries


def forward_opaque(
    name: str, q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options
) -> Tensor:
    """The backend of that name, through the operator."""
    causal, scale, window, softcap, sinks, deterministic = options
    out: Tensor = _forward(
        q, k, v, boundaries.cu_seqlens, sinks, boundaries.max_seqlen, name,
        causal, scale, window, softcap, deterministic,
    )  # fmt: skip
    return out


def _run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor, rest: Any) -> Tensor:
    """The backend itself; `rest` is what the operators take behind sinks."""
    from padless.runtime.attention import BACKENDS

    max_seqlen, name, causal, scale, window, softcap, deterministic = rest
    options = Options(causal, scale, window, softcap, sinks, deterministic)
    return BACKENDS[name].forward(q, k, v, Boundaries(cu_seqlens, max_seqlen, q.shape[0]), options)


@contextmanager
def _autograd_inside() -> Iterator[None]:
    """An operator runs below autograd; this lets it record and go back once more."""
    key = torch._C.DispatchKey
    guard = torch._C._SetExcludeDispatchKeyGuard
    with guard(key.AutogradFunctionality, False), guard(key.ADInplaceOrView, False):
        yield


@torch.library.custom_op("padless::varlen_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, max_seqlen: int, name: str,
    causal: bool, scale: float, window: int | None, softcap: float | None, deterministic: bool,
) -> Tensor:  # fmt: skip
    rest = max_seqlen, name, causal, scale, window, softcap, deterministic
    return _run(q, k, v, sinks, cu_seqlens, rest).contiguous()


@_forward.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("padless::varlen_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, max_seqlen: int,
    name: str, causal: bool, scale: float, window: int | None, softcap: float | None, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    rest = max_seqlen, name, causal, scale, window, softcap, deterministic
    with _autograd_inside(), torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        sinks = None if sinks is None else sinks.detach().requires_grad_()
        out = _run(q, k, v, sinks, cu_seqlens, rest)
        leaves = [x for x in (q, k, v, sinks) if x is not None]
        return [x.contiguous() for x in torch.autograd.grad(out, leaves, grad)]


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, sinks) if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = _backward(grad, *ctx.saved_tensors, *ctx.rest)
    sinks = grads[3] if len(grads) > 3 else None
    return (*grads[:3], None, sinks, *(None,) * len(ctx.rest))


_forward.register_autograd(_gradients, setup_context=_setup)
