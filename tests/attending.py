"""Attention, slow and obvious, in float64: one sequence, one head, one token after the other.

And devices that are not there, for tests of which backend is taken.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from padless.runtime.attention import backend, choice, flash_attn_3, flash_attn_4, short


def attend_slowly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D], k, v [T, Hk, D] -> [T, Hq, D] float64, differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    rows: list[Tensor] = []
    start = 0
    for length in lengths:
        for at in range(start, start + length):
            first = start if window is None else max(start, at - window + 1)
            last = at + 1 if causal else start + length
            heads = []
            for head in range(q.shape[1]):
                scores = k[first:last, head // group] @ q[at, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                heads.append(weights / total @ v[first:last, head // group])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def bounds_of(lengths: list[int], device: str = "cpu") -> Tensor:
    """cu_seqlens [N + 1] int32."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *libraries: str) -> None:
    """CUDA devices are of this compute capability, and these libraries and triton can be imported there."""

    def refusal(module: str, package: str) -> str | None:
        return None if package in (*libraries, "triton") else f"{package} is not installed"

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (choice, backend, flash_attn_3, flash_attn_4, short):
        monkeypatch.setattr(module, "capability_of", lambda device: capability, raising=False)
        monkeypatch.setattr(module, "import_refusal", refusal, raising=False)
