"""Tables of cosines and sines for rotary embeddings, made in double precision and rounded once.

A table costs 256 bytes a position (head dimension 128, float32) and is shared by all layers; what is
gained over computing angles in the kernel is that position 1,000,000 is as exact as position 1. Angles
in float32 are off by up to 0.03 rad there, and in bfloat16 neighbouring positions above 256 coincide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_tables(
    length: int,
    rotary_dim: int,
    *,
    base: float = 10_000.0,
    inv_freq: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, rotary_dim / 2]: row p holds position p, column i frequency i.

    Frequency i is `base ** (-2 i / rotary_dim)` (Su et al. 2021, RoFormer, section 3.2.2), or `inv_freq[i]`
    in radians a position where a model scales its frequencies. `scale` multiplies cos and sin (what
    transformers calls attention_scaling). Autocast changes nothing here.

    Raises ValueError for an odd rotary_dim, or for an inv_freq that does not have rotary_dim / 2 entries.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim is {rotary_dim}; it must be even and at least 2: dimensions turn in pairs"
        )
    if inv_freq is None:
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
        inv_freq = torch.pow(torch.tensor(base, dtype=torch.float64, device=device), -exponent)
    elif inv_freq.shape != (rotary_dim // 2,):
        raise ValueError(
            f"inv_freq is {list(inv_freq.shape)}; rotary_dim {rotary_dim} needs [{rotary_dim // 2}]"
        )
    frequencies = inv_freq.to(device=device, dtype=torch.float64)
    positions = torch.arange(length, dtype=torch.float64, device=frequencies.device)
    angles = positions[:, None] * frequencies
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def mrope_axes(
    sections: Sequence[int], *, interleaved: bool = False, device: torch.device | str | None = None
) -> Tensor:
    """Which row of multi-axis position_ids turns each frequency: int32 [sum(sections)].

    `sections` are transformers' mrope_section: how many frequencies belong to time, height, width.
    In blocks ([16, 24, 24] is 16 times 0, 24 times 1, 24 times 2) as in Qwen2-VL, or, `interleaved`, as in
    Qwen3-VL: frequencies 1, 4, 7, ... are height's and 2, 5, 8, ... width's, as many as their sections
    say, and all others time's.
    """
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        axes = [0] * len(axes)
        for axis, count in list(enumerate(sections))[1:]:
            axes[axis : count * len(sections) : len(sections)] = [axis] * len(
                range(axis, min(count * len(sections), len(axes)), len(sections))
            )
    return torch.tensor(axes, dtype=torch.int32, device=device)
