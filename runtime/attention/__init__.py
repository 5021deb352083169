"""Varlen attention: a row of packed sequences, each attending to itself alone, by the library that fits.

    out = varlen_attention(q, k, v, batch["cu_seq_lens_q"], batch["max_length_q"])

A backend is one file and one line of BACKENDS in `choice`; `auto` takes the first of AUTO that can do the
call. A backend that is asked for by name and cannot is an error with the reason, never a silent substitute.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from padless.runtime.attention.backend import Forward, Options, Request, capture_of
from padless.runtime.attention.boundaries import Boundaries, boundaries_of
from padless.runtime.attention.by_lengths import forward_by_lengths
from padless.runtime.attention.choice import (
    AUTO,
    BACKENDS,
    Choice,
    choose,
    choose_parts,
    may_be_short,
    request_of,
)
from padless.runtime.attention.inputs import check_inputs, check_kinds
from padless.runtime.attention.opaque import forward_opaque
from padless.runtime.attention.parts import attend_in_parts
from padless.runtime.errors import AttentionError

__all__ = [
    "AUTO",
    "BACKENDS",
    "Boundaries",
    "Choice",
    "Options",
    "Request",
    "attend",
    "boundaries_of",
    "choose",
    "choose_parts",
    "request_of",
    "varlen_attention",
]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attention of a packed row, [T, Hq, D]; differentiable in q, k, v and sinks.

    - q [T, Hq, D], k, v [T, Hk, D] at any strides, Hq a multiple of Hk: query head h reads k and v head
      h // (Hq // Hk).
    - cu_seqlens [N + 1] int32 on their device, from 0 to T; max_seqlen, a Python int, at least the longest
      sequence. Their values are checked where cu_seqlens lie in host memory; on a device, where looking
      would wait for it, only types and shapes are.
    - scale of the scores, D ** -0.5 unless given; window W: a token sees itself and the W - 1 before it;
      softcap c: scores s become c tanh(s / c); sinks [Hq]: logits that take a share of the softmax.
    - deterministic: gradients are the same to the bit from run to run.
    - backend: a name of BACKENDS, or "auto".

    Raises AttentionError for a call that contradicts itself, BackendError for a backend that cannot do it;
    before anything is launched.
    """
    if q.ndim != 3:
        raise AttentionError(f"q is {list(q.shape)}; it must be [T, Hq, D]")
    if (
        any(option is not None for option in (window, softcap, scale, sinks))
        and not torch.compiler.is_compiling()
    ):
        check_kinds(window, softcap, scale, sinks)
    boundaries = boundaries_of(cu_seqlens, max_seqlen, q.shape[0])
    scale = q.shape[2] ** -0.5 if scale is None else scale
    options = Options(causal, scale, window, softcap, sinks, deterministic)
    return attend(q, k, v, boundaries, options, backend)


def attend(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options, backend: str = "auto"
) -> Tensor:
    """`varlen_attention` with boundaries that were checked before: for layers that share a batch.

    Checks and choice look at shapes, types and features; a batch's layers are alike, and the first pays.
    """
    if torch.compiler.is_compiling():
        return _checked(q, k, v, boundaries, options, backend).forward(q, k, v, boundaries, options)
    sinks, trained = options.sinks, q.requires_grad or k.requires_grad or v.requires_grad
    features: tuple[Any, ...] = options
    if sinks is not None:
        trained = trained or sinks.requires_grad
        features = *options._replace(sinks=None), sinks.shape, sinks.device
    key: tuple[Any, ...] = (
        backend, features, trained and torch.is_grad_enabled(), q.shape, k.shape, v.shape,
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip
    call: _Call | None = boundaries.calls.get(key)
    if call is None or not call.alike:  # looks whether a graph is being captured only where that counts
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            key = (*key, capture_of(q.device))
            call = boundaries.calls.get(key)
        if call is None:
            call = boundaries.calls[key] = _checked(q, k, v, boundaries, options, backend)
    return call.forward(q, k, v, boundaries, options)


class _Call(NamedTuple):
    """What does a call of attention, and all calls alike."""

    forward: Forward
    alike: bool = True
    """Whether a CUDA graph holds the same."""


def _checked(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options, backend: str
) -> _Call:
    """What does such calls; raises AttentionError and BackendError."""
    check_inputs(q, k, v, boundaries.cu_seqlens, options)
    if q.shape[0] == 0:
        return _Call(_empty)
    request = request_of(q, k, v, boundaries, options)
    parts = choose_parts(request, boundaries) if backend == "auto" else []
    if len(parts) > 1:
        forwards = [(part, BACKENDS[name].prepared(q, k, part, options)) for part, name in parts]
        alike = all(BACKENDS[name].captured == "alike" for _, name in parts)
        return _Call(partial(attend_in_parts, forwards), alike)
    name = choose(request, backend)
    chosen = BACKENDS[name]
    if not torch.compiler.is_compiling():
        return _Call(chosen.prepared(q, k, boundaries, options), chosen.captured == "alike")
    if name == "short" or (backend == "auto" and name == "flash" and may_be_short(request)):
        return _Call(partial(forward_by_lengths, backend))
    return _Call(chosen.forward if chosen.traceable else partial(forward_opaque, name))


def _empty(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)
