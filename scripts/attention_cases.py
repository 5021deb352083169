"""Rows of packed sequences for the benchmark of attention: their lengths, inputs, and the calls on them.

An arm is a backend's name, `rope + NAME` for rotation by our rotary kernel into new tensors and then that
backend, or `fused`, our kernels with the rotation inside. All run under autograd, as layers call them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from padless.kernels.rope import rope_qk
from padless.kernels.rope_tables import rope_tables
from padless.kernels.short_attention import short_attention, tiles_for
from padless.kernels.short_attention_work import work_list
from padless.runtime.attention import Options, boundaries_of, choose_parts, request_of, varlen_attention
from padless.runtime.attention.boundaries import copied_from

DTYPE = torch.bfloat16
PLAIN = ("short", "flash", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex", "efficient", "xformers")
WITH_ROPE = tuple(f"rope + {name}" for name in PLAIN[1:6])


class Heads(NamedTuple):
    q: int = 32
    k: int = 8
    dim: int = 128


USUAL = Heads()


def lengths_about(tokens: int, median: float, spread: float) -> list[int]:
    """Lognormal lengths that fill a row exactly; always the same."""
    draw = random.Random(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(16, round(draw.lognormvariate(math.log(median), spread)))))
    return lengths


class Row(NamedTuple):
    """Lengths of sequences, heads, and what is measured on them."""

    lengths: list[int]
    heads: Heads = USUAL
    arms: tuple[str, ...] = PLAIN
    alone: bool = False
    """Also from an idle device, where the host's time shows."""


ALPACA = lengths_about(16_384, 135, 0.6)
ARMS = (*PLAIN, "fused", *WITH_ROPE)
BRIEF = ("short", "flash", "flash_attn_4")
SHAPES = (
    Heads(16, 8),
    Heads(32, 32),
    Heads(14, 2, 64),
    Heads(32, 8, 64),
    Heads(24, 8, 96),
    Heads(16, 8, 256),
)
ROWS = {
    "alpaca-like, T=16,384": Row(ALPACA, arms=ARMS, alone=True),
    "alpaca-like, T=65,536": Row(lengths_about(65_536, 135, 0.6), arms=ARMS),
    "alpaca-like, T=8,192": Row(lengths_about(8_192, 135, 0.6), arms=BRIEF, alone=True),
    "alpaca-like, T=4,096": Row(lengths_about(4_096, 135, 0.6), arms=BRIEF, alone=True),
    "about 400, T=32,768": Row(lengths_about(32_768, 400, 0.1)),
    "about 700, T=32,768": Row(lengths_about(32_768, 700, 0.1)),
    "about 1,000, T=32,768": Row(lengths_about(32_768, 1_000, 0.1), arms=ARMS),
    "about 2,000, T=32,768": Row(lengths_about(32_768, 2_000, 0.1)),
    "8 x 4,096, T=32,768": Row([4_096] * 8),
    "4 x 8,192, T=32,768": Row([8_192] * 4),
    "8 x 2,048 and 320 x 50, T=32,384": Row([2_048] * 8 + [50] * 320),
    **{
        f"alpaca-like, T=16,384, {heads.q}/{heads.k} of {heads.dim}": Row(
            ALPACA, heads, ("short", "flash", "fused", "rope + flash"), alone=True
        )
        for heads in SHAPES
    },
}  # fmt: skip


class Case:
    """Inputs of one row on a device, and each arm's calls."""

    def __init__(self, lengths: list[int], heads: Heads = USUAL, device: str = "cuda") -> None:
        self.lengths, self.heads, self.tokens, self.longest = lengths, heads, sum(lengths), max(lengths)
        torch.manual_seed(0)
        on_host = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        self.bounds = on_host.to(device)
        if self.bounds is not on_host:
            copied_from(self.bounds, on_host)  # as a batch that `.to(device)` moved
        q, k = (torch.randn(self.tokens, h, heads.dim, device=device, dtype=DTYPE) for h in heads[:2])
        v, self.grad = torch.randn_like(k), torch.randn_like(q)
        self.leaves = [x.requires_grad_() for x in (q, k, v)]
        self.tables = rope_tables(self.longest, heads.dim, device=device)
        self.work = work_list(on_host, tiles_for(*heads)).to(device)

    def forward(self, arm: str) -> Tensor:
        """Attention as a layer calls it; raises BackendError for a backend that is not at hand."""
        q, k, v = self.leaves
        cos, sin = self.tables
        if arm == "fused":
            return short_attention(q, k, v, self.work, cos=cos, sin=sin)
        if arm.startswith("rope + "):
            q, k = rope_qk(q, k, cos, sin, cu_seqlens=self.bounds)
        backend = arm.removeprefix("rope + ")
        return varlen_attention(q, k, v, self.bounds, self.longest, backend=backend)

    def both(self, arm: str) -> list[Tensor]:
        """The result and the gradients of q, k and v."""
        out = self.forward(arm)
        return [out, *torch.autograd.grad(out, self.leaves, self.grad)]

    def auto(self) -> str:
        """The backend that auto takes, or the two."""
        boundaries = boundaries_of(self.bounds, self.longest, self.tokens)
        options = Options(True, self.heads.dim**-0.5, None, None, None, False)
        request = request_of(*self.leaves, boundaries, options)
        return " + ".join(name for _, name in choose_parts(request, boundaries))

    @contextmanager
    def in_float64(self) -> Iterator[None]:
        """Inputs and tables as exact as can be, meanwhile."""
        kept = self.leaves, self.grad, self.tables
        self.leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        self.grad = self.grad.double()
        device = self.grad.device
        self.tables = rope_tables(self.longest, self.heads.dim, dtype=torch.float64, device=device)
        yield
        self.leaves, self.grad, self.tables = kept

    def errors(self, arms: list[str]) -> dict[str, list[float]]:
        """Of the result and of each gradient, relative to their norms in float64."""
        exact: dict[bool, list[Tensor]] = {}
        with self.in_float64():
            for turned in {"rope" in arm or arm == "fused" for arm in arms}:
                exact[turned] = self.both("rope + sdpa" if turned else "sdpa")
        found = {}
        for arm in arms:
            pairs = zip(self.both(arm), exact["rope" in arm or arm == "fused"], strict=True)
            found[arm] = [
                float((x.detach().double() - y.detach()).norm() / y.detach().norm()) for x, y in pairs
            ]
        return found

    def floors(self, copied: float, multiplied: float) -> dict[str, float]:
        """Microseconds that no kernel can be under: bytes over `copied` a second, products over `multiplied`.

        Bytes: q, k, v in, out and log-sum-exp out; backward these and the gradient in, three out. Products:
        what causal sequences need, 2.5 times that backward.
        """
        heads, groups, dim = self.heads
        read, out, log_sums = (
            self.tokens * x for x in ((heads + 2 * groups) * dim * 2, heads * dim * 2, heads * 4)
        )
        pairs = sum(length * (length + 1) // 2 for length in self.lengths)
        products = 4 * pairs * heads * dim
        forward = max((read + out + log_sums) / copied, products / multiplied)
        backward = max((2 * read + 2 * out + log_sums) / copied, 2.5 * products / multiplied)
        return {"forward": forward * 1e6, "both ways": (forward + backward) * 1e6}
