"""Rotary embeddings in plain PyTorch, written to be read: what the kernel computes, step by step.

It serves CPUs and devices without Triton, and is what the kernel is held against: both compute in
float32 (float64 for float64 inputs), in the same order, and round once, so that they agree to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rope_inputs import RopeInputs


def rotate_ref(q: Tensor, k: Tensor, given: RopeInputs, *, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """q and k [B, T, H, D], turned; `inverse` turns them back, which is also the gradient.

    Raises ValueError for a position that the table does not have.
    """
    cos, sin = _rows(given, q.shape[0], q.shape[1], torch.promote_types(q.dtype, torch.float32))
    if inverse:
        sin = -sin
    return _turn(q, cos, sin, given), _turn(k, cos, sin, given)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, given: RopeInputs) -> Tensor:
    """Each pair (a, b) becomes (a cos - b sin, b cos + a sin); what lies beyond rotary_dim stays."""
    turned, rest = x[..., : given.turned].to(cos.dtype), x[..., given.turned :]
    if given.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack((a, b), dim=-1).flatten(-2) if given.interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((pairs.to(x.dtype), rest), dim=-1)


def _rows(given: RopeInputs, batch: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of each token, [B or 1, T, 1, R/2]: the same for all heads."""
    half = given.turned // 2
    if given.cos.ndim == 3:
        cos, sin = given.cos[..., :half], given.sin[..., :half]
    else:
        places = _positions(given, batch, length)
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < given.cos.shape[0]:
            raise ValueError(
                f"positions {int(places.min())} to {int(places.max())} and a table of {given.cos.shape[0]};"
                " make the table longer"
            )
        if given.frequency_axes is None:
            cos, sin = given.cos[places], given.sin[places]
        else:  # places [A, B, T]: each frequency takes its own axis
            axis = places[given.frequency_axes.long()].movedim(0, -1)
            column = torch.arange(half, device=axis.device)
            cos, sin = given.cos[axis, column], given.sin[axis, column]
    return cos.to(dtype)[..., None, :], sin.to(dtype)[..., None, :]


def _positions(given: RopeInputs, batch: int, length: int) -> Tensor:
    """Each token's place in its sequence: [B or 1, T], with frequency_axes [A, B or 1, T]."""
    if given.position_ids is not None:
        ids = given.position_ids.long()
        flat = 1 if given.frequency_axes is None else 2
        return ids.unsqueeze(-2) if ids.ndim == flat else ids
    tokens = torch.arange(batch * length, device=given.cos.device)
    if given.cu_seqlens is None:
        return tokens[:length][None]
    # Tokens after the last boundary are a sequence of their own.
    bounds = given.cu_seqlens.long()
    if bounds[0] != 0 or bounds[-1] > len(tokens) or bool((bounds.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens go from {bounds[0]} to {bounds[-1]} over {len(tokens)} tokens; they must begin at "
            "0, never fall and stay within the tokens"
        )
    start = bounds[torch.searchsorted(bounds, tokens, right=True) - 1]
    return (tokens - start).view(batch, length)
