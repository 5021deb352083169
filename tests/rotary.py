"""Rotary embeddings by complex numbers in double precision, and inputs to hold kernels against them."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_complex(x: Tensor, angles: Tensor, *, interleaved: bool = False, inverse: bool = False) -> Tensor:
    """x [B, T, H, D] turned in float64 by angles [B, T, R/2]: pairs as complex numbers."""
    half = angles.shape[-1]
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    if interleaved:
        pairs = torch.view_as_complex(turned.reshape(*turned.shape[:-1], half, 2).contiguous())
    else:
        pairs = torch.complex(turned[..., :half].contiguous(), turned[..., half:].contiguous())
    signed = -angles.double() if inverse else angles.double()
    pairs = pairs * torch.polar(torch.ones_like(signed), signed)[:, :, None, :]
    real, imaginary = pairs.real, pairs.imag
    both = torch.stack((real, imaginary), -1).flatten(-2) if interleaved else torch.cat((real, imaginary), -1)
    return torch.cat((both, rest), dim=-1)


def angles_of(positions: Tensor, rotary_dim: int, base: float = 10_000.0) -> Tensor:
    """[B, T, R/2] in float64 for positions [B, T]."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device) / rotary_dim
    return positions.double()[..., None] * base**-exponent


def qkv_views(
    kind: str, batch: int, tokens: int, heads: tuple[int, int], dim: int, **like: object
) -> list[Tensor]:
    """q and k [B, T, H, D] of random numbers, lying in memory as models make them."""
    hq, hk = heads
    if kind == "contiguous":
        return [torch.randn(batch, tokens, h, dim, **like) for h in heads]  # type: ignore[call-overload]
    if kind == "heads first":
        return [torch.randn(batch, h, tokens, dim, **like).transpose(1, 2) for h in heads]  # type: ignore[call-overload]
    if kind == "fused":
        fused: Tensor = torch.randn(batch, tokens, hq + 2 * hk, dim, **like)  # type: ignore[call-overload]
        return [fused[:, :, :hq], fused[:, :, hq : hq + hk]]
    if kind == "dim first":
        return [torch.randn(dim, h, tokens, batch, **like).permute(3, 2, 1, 0) for h in heads]  # type: ignore[call-overload]
    raise KeyError(kind)


LAYOUTS = ("contiguous", "heads first", "fused", "dim first")
