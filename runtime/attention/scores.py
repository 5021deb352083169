"""Attention by plain matrix products, for what scaled_dot_product_attention has no words for.

Softcap changes the scores, sinks the sum they are divided by. All scores of a call are in memory at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from padless.runtime.attention.backend import Options


def attend_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """q [1, Hq, L, D], k, v [1, Hk, L, D]; mask [L, L] bool, True where seen, None for all -> like q.

    Goes to scaled_dot_product_attention unless softcap or sinks are asked for.
    """
    if options.softcap is None and options.sinks is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(wide) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is None:
        return scores.softmax(-1).to(q.dtype) @ v
    sinks = options.sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return shares.to(q.dtype) @ v


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: what each token of one sequence sees causally, itself included."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)
