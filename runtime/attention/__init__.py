"""Varlen attention: a row of packed sequences, each attending to itself alone, by the library that fits.

    out = varlen_attention(q, k, v, batch["cu_seq_lens_q"], batch["max_length_q"])

A backend is one file and one line of BACKENDS; `auto` takes the first of AUTO that can do the call. A
backend that is asked for by name and cannot is an error with the reason, never a silent substitute.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from padless.runtime.attention import (
    efficient,
    flash,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    flex,
    sdpa,
    sdpa_mask,
    short,
    xformers,
)
from padless.runtime.attention.backend import Backend, Forward, Options, Request, capability_of
from padless.runtime.attention.boundaries import Boundaries, boundaries_of
from padless.runtime.attention.inputs import check_inputs
from padless.runtime.attention.opaque import forward_opaque
from padless.runtime.errors import AttentionError, BackendError

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
    "request_of",
    "varlen_attention",
]

BACKENDS: dict[str, Backend] = {
    "short": short.BACKEND,
    "flash": flash.BACKEND,
    "flash_attn_2": flash_attn_2.BACKEND,
    "flash_attn_3": flash_attn_3.BACKEND,
    "flash_attn_4": flash_attn_4.BACKEND,
    "flex": flex.BACKEND,
    "efficient": efficient.BACKEND,
    "xformers": xformers.BACKEND,
    "sdpa": sdpa.BACKEND,
    "sdpa_mask": sdpa_mask.BACKEND,
}


class Choice(NamedTuple):
    """A backend that `auto` takes where it can do the call."""

    backend: str
    tokens: int = 0
    """Tokens of the row, at least: below, the host's time for a call is longer than the device's."""
    mean_length: int | None = None
    """Tokens of the sequence that a token lies in on average, at most, and known without waiting for it."""
    capability: tuple[int, int] | None = None
    """Taken on devices of this compute capability alone, where it was measured."""
    on_cpu: bool = True
    """Whether it is taken there too, where it runs there."""

    def fits(self, request: Request) -> bool:
        """Whether the call is one for which it was found the fastest."""
        on_cpu = request.device.type == "cpu"
        if request.tokens < self.tokens or (on_cpu and not self.on_cpu):
            return False
        if self.mean_length is not None and (request.mean_length or math.inf) > self.mean_length:
            return False
        return self.capability is None or (not on_cpu and capability_of(request.device) == self.capability)


HOPPER = (9, 0)
AUTO = (
    Choice("short", tokens=8_192, mean_length=700, capability=HOPPER),
    Choice("flash_attn_4", tokens=8_192),
    Choice("flash_attn_3", tokens=8_192),
    Choice("short", tokens=8_192, mean_length=8_192, capability=HOPPER),
    Choice("flash"),
    Choice("flash_attn_2"),
    Choice("efficient"),
    Choice("flex", on_cpu=False),
    Choice("sdpa"),
)
"""Fastest first, as scripts/bench_attention.py found them on an H200; `sdpa` can do every call.

`short` is passed by FlashAttention-4 at 700 to 800 tokens a sequence, and meets `flash` at 8,192.
FlashAttention-3 could not be had there; its place is by what others report.
"""


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
        return _checked(q, k, v, boundaries, options, backend)(q, k, v, boundaries, options)
    causal, scale, window, softcap, sinks, deterministic = options
    key = (
        backend, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.requires_grad or k.requires_grad or v.requires_grad, torch.is_grad_enabled(),
        causal, window, softcap, deterministic,
        None if sinks is None else (sinks.shape, sinks.device, sinks.requires_grad),
        q.is_cuda and torch.cuda.is_current_stream_capturing(),
    )  # fmt: skip
    forward = boundaries.made(key, lambda: _checked(q, k, v, boundaries, options, backend))
    return forward(q, k, v, boundaries, options)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options, backend: str
) -> Forward:
    """What does such calls; raises AttentionError and BackendError."""
    check_inputs(q, k, v, boundaries.cu_seqlens, options)
    if q.shape[0] == 0:
        return _empty
    name = choose(request_of(q, k, v, boundaries, options), backend)
    chosen = BACKENDS[name]
    if torch.compiler.is_compiling() and not chosen.traceable:
        return partial(forward_opaque, name)
    return chosen.forward


def _empty(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


def request_of(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Request:
    """A call without its tensors."""
    sinks = options.sinks
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    wanted = wanted or (sinks is not None and sinks.requires_grad)
    return Request(
        device=q.device,
        dtype=q.dtype,
        head_dim=q.shape[2],
        q_heads=q.shape[1],
        k_heads=k.shape[1],
        tokens=boundaries.tokens,
        sequences=boundaries.sequences,
        max_seqlen=boundaries.max_seqlen,
        mean_length=boundaries.mean_length(),
        causal=options.causal,
        window=options.window is not None,
        softcap=options.softcap is not None,
        sinks=sinks is not None,
        deterministic=options.deterministic,
        backward=wanted and torch.is_grad_enabled(),
    )


def choose(request: Request, backend: str = "auto") -> str:
    """The name of the backend that does a call; raises BackendError where the one asked for cannot."""
    if backend == "auto":
        for choice in AUTO:
            if choice.fits(request) and BACKENDS[choice.backend].unavailable(request) is None:
                return choice.backend
    if backend not in BACKENDS:
        raise BackendError(
            f"there is no attention backend {backend!r}; there are auto, {', '.join(BACKENDS)}"
        )
    reason = BACKENDS[backend].unavailable(request)
    if reason is not None:
        raise BackendError(
            f"attention backend {backend!r} cannot do this: {reason}; 'auto' takes one that can"
        )
    return backend
