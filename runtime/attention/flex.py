"""FlexAttention with a block mask made from the boundaries.

`create_block_mask` looks at every pair of tokens (0.7 to 11 ms, and far more uncompiled). Boundaries tell
at once which blocks a block of queries sees: those from its first token's sequence to its last token, in
one run, with the fully visible ones in its middle. So the mask takes a few small launches without a wait
for the device, once a batch. On a CUDA device the kernel is compiled by torch.compile, seconds at the
first call of each kind; the CPU has a forward pass alone.

Source: Dong et al., FlexAttention (arXiv 2412.05496).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from padless.runtime.attention.backend import INT32, Backend, Options, Request, cuda_refusal, import_refusal
from padless.runtime.attention.boundaries import Boundaries

BLOCK = 128


def _unavailable(request: Request) -> str | None:
    if request.device.type == "cpu":
        if request.backward:
            return "it has no backward pass on the CPU"
        if request.tokens**2 * request.q_heads >= INT32:
            return f"on the CPU it keeps all scores, and {request.tokens:,} tokens have too many"
        return None
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    reason = cuda_refusal(request, capability=(8, 0), dtypes=dtypes, head_dim=256)
    if reason is None and request.head_dim < 16:
        reason = f"it takes heads of at least 16 and q's have {request.head_dim}"
    size = request.tokens * request.q_heads * request.head_dim
    if reason is None and size >= INT32:
        reason = f"it counts elements in 32 bits, and q has {size:,}; make the row shorter"
    return reason or import_refusal("triton", "triton")


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    key = ("flex", options.causal, options.window)
    mask = boundaries.made(key, lambda: block_mask(boundaries, options.causal, options.window))
    if not q.is_cuda:  # it looks at requires_grad, whether or not anything is recorded
        q, k, v = (x.detach() for x in (q, k, v))
    eager = torch.compiler.is_compiling() or not q.is_cuda
    attend = cast(Callable[..., Any], flex_attention) if eager else _compiled()
    asked = {} if options.sinks is None else {"return_aux": AuxRequest(lse=True)}
    out = attend(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        score_mod=None if options.softcap is None else _softcap(options.softcap),
        block_mask=mask,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        **asked,
    )
    if options.sinks is not None:
        out, aux = out
        out = (out * torch.sigmoid(aux.lse - options.sinks[:, None])[..., None]).to(q.dtype)
    result: Tensor = out[0].transpose(0, 1)
    return result


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _softcap(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return score_mod


def block_mask(boundaries: Boundaries, causal: bool, window: int | None) -> BlockMask:
    """The mask of a packed row, from its boundaries, on their device.

    A token sees keys from `low` to `high`, both included. Keys beyond the row, in its last block, are in
    nobody's range.
    """
    bounds, tokens = boundaries.cu_seqlens.long(), boundaries.tokens
    blocks = -(-tokens // BLOCK)
    at = torch.arange(blocks * BLOCK, device=bounds.device)
    sequence = torch.bucketize(at.clamp(max=tokens - 1), bounds[1:], right=True)
    low, end = bounds[sequence], bounds[sequence + 1]
    high = torch.minimum(at, end - 1) if causal else end - 1
    if window is not None:
        low = torch.maximum(low, at - window + 1)

    # By blocks of queries: what any of its tokens sees, and what all of them see.
    lows, highs = low.view(blocks, BLOCK), high.view(blocks, BLOCK)
    first, last = lows.amin(1) // BLOCK, highs.amax(1) // BLOCK
    full_from = -(-lows.amax(1) // BLOCK)
    full_to = (highs.amin(1) + 1) // BLOCK
    full = (full_to - full_from).clamp(min=0)
    full_to = full_from + full
    before = torch.where(full > 0, full_from - first, last + 1 - first)
    partial = last + 1 - first - full

    nth = torch.arange(blocks, device=bounds.device)
    columns = first[:, None] + nth
    columns = torch.where(nth < before[:, None], columns, columns + full[:, None]).clamp(max=blocks - 1)
    full_columns = (full_from[:, None] + nth).clamp(max=blocks - 1)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (low[query] <= key) & (key <= high[query])

    counts, columns, full_counts, full_columns = (
        x.to(torch.int32)[None, None].contiguous() for x in (partial, columns, full, full_columns)
    )
    return BlockMask.from_kv_blocks(
        counts, columns, full_counts, full_columns, BLOCK, mask_mod, (tokens, tokens)
    )


BACKEND = Backend(unavailable=_unavailable, forward=_forward)
