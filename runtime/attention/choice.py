"""Which backend does a call: the table of all, and of those that `auto` takes, in the order of measurements.

Times were measured on one H200; devices that were not measured get the order that libraries' ages give.
"""

from __future__ import annotations

import math
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
from padless.runtime.attention.backend import Backend, Options, Request, capability_of, is_captured
from padless.runtime.attention.boundaries import Boundaries
from padless.runtime.attention.parts import cut
from padless.runtime.errors import BackendError

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

    def fits(self, request: Request, *, at_any_length: bool = False) -> bool:
        """Whether the call is one for which it was found the fastest, or is so at some lengths."""
        on_cpu = request.device.type == "cpu"
        if request.tokens < self.tokens or (on_cpu and not self.on_cpu):
            return False
        if self.mean_length is not None and not at_any_length:
            if (request.mean_length or math.inf) > self.mean_length:
                return False
        return self.capability is None or (not on_cpu and capability_of(request.device) == self.capability)


HOPPER = (9, 0)
SHORT = Choice("short", tokens=4_096, mean_length=700, capability=HOPPER)
AUTO = (
    SHORT,
    Choice("flash_attn_4", tokens=8_192),
    Choice("flash_attn_3", tokens=8_192),
    Choice("short", tokens=4_096, mean_length=8_192, capability=HOPPER),
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
            if choice.fits(request) and _refusal(choice.backend, request) is None:
                return choice.backend
    if backend not in BACKENDS:
        raise BackendError(
            f"there is no attention backend {backend!r}; there are auto, {', '.join(BACKENDS)}"
        )
    reason = _refusal(backend, request)
    if reason is not None:
        raise BackendError(
            f"attention backend {backend!r} cannot do this: {reason}; 'auto' takes one that can"
        )
    return backend


def _refusal(name: str, request: Request) -> str | None:
    """Why a backend cannot do a call."""
    if BACKENDS[name].captured == "never" and is_captured(request.device):
        return "it makes something of these boundaries, and a CUDA graph may be replayed over others"
    return BACKENDS[name].unavailable(request)


def may_be_short(request: Request) -> bool:
    """Whether `short` is taken for calls like this one where their sequences are known to be short enough."""
    return SHORT.fits(request, at_any_length=True) and _refusal("short", request) is None


def choose_parts(request: Request, boundaries: Boundaries) -> list[tuple[Boundaries, str]]:
    """What `auto` takes for a row: one backend, or `short` for its short sequences and another for the rest.

    Two where a library is faster for the row as a whole, but a third of its tokens or more are in short
    sequences: there they gain about 40 ns a token, where copies cost 10 ns for each of the row. One in a CUDA
    graph, which may be replayed over boundaries that are to be cut elsewhere.
    """
    whole = choose(request)
    alone = [(boundaries, whole)]
    limit = SHORT.mean_length
    if whole == "short" or limit is None or request.mean_length is None or is_captured(request.device):
        return alone
    if not SHORT.fits(request, at_any_length=True) or (two := cut(boundaries, limit)) is None:
        return alone
    parts = [(part, choose(_of_part(request, part))) for part in two]
    tokens = [part.tokens for part, name in parts if name == "short"]
    return parts if len(tokens) == 1 and 3 * tokens[0] >= request.tokens else alone


def _of_part(request: Request, part: Boundaries) -> Request:
    return request._replace(
        tokens=part.tokens,
        sequences=part.sequences,
        max_seqlen=part.max_seqlen,
        mean_length=part.mean_length(),
    )
