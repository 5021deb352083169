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

from padless.runtime.attention.backend import (
    INT32,
    Backend,
    Options,
    Request,
    cuda_refusal,
    element_overflow,
    import_refusal,
)
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
    return reason or element_overflow(request) or import_refusal("triton", "triton")


def _forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, options: Options) -> Tensor:
    key = ("flex", options.causal, options.window)
    mask = boundaries.made(key, lambda: block_mask(boundaries, options.causal, options.window))
    if not q.is_cuda:  # it looks at requires_grad, whether or not anything is recorded
        q, k, v = (x.detach() for x in (q, k, v))
    eager = torch.compiler.is_compiling() or not q.is_cuda
    attend = cast(Callable[..., Any], flex_attention) if eager else compiled_for(_kind(q, k, v, options))
    asked: dict[str, Any] = {} if options.sinks is None else {"return_aux": AuxRequest(lse=True)}
    if q.is_cuda:  # its kernel for few queries, which torch takes below 128, has none for lengths that vary
        asked["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
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


def _kind(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Any, ...]:
    """What a kernel is compiled for; lengths and strides are another in each pack."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    causal, scale, window, softcap, sinks, _ = options
    return (
        q.dtype, q.device, q.shape[1:], k.shape[1], wanted,
        causal, scale, window is None, softcap, sinks is None,
    )  # fmt: skip


@cache
def compiled_for(kind: tuple[Any, ...]) -> Callable[..., Any]:
    """FlexAttention, compiled apart for each kind of call.

    torch.compile keeps its programs with a function's code, eight of them: a process with more kinds (a model
    with windows in some layers, and its evaluation; another model) then gets FlexAttention's plain products,
    all scores in memory, with a warning at most. So each kind has a copy of the code, and going without a
    kernel is an error (`fullgraph`).
    """

    def attend(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    attend.__code__ = attend.__code__.replace()
    return torch.compile(attend, fullgraph=True)


def _softcap(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return score_mod


def block_mask(boundaries: Boundaries, causal: bool, window: int | None) -> BlockMask:
    """The mask of a packed row, from its boundaries, on their device: tokens see what lies in a range.

    A query sees the keys from `low` to `high`, a key is seen by the queries from `first` to `last`, all
    included. What lies behind the row, in its last block, sees and is seen by nothing.
    """
    bounds, tokens = boundaries.cu_seqlens, boundaries.tokens
    at = torch.arange(-(-tokens // BLOCK) * BLOCK, dtype=torch.int32, device=bounds.device)
    sequence = torch.bucketize(at.clamp(max=tokens - 1), bounds, right=True) - 1
    start, end = bounds[sequence], bounds[sequence + 1] - 1
    low = start if window is None else torch.maximum(start, at - window + 1)
    high = torch.minimum(at, end) if causal else end
    first = at if causal else start
    last = end if window is None else torch.minimum(end, at + window - 1)
    high, last = (torch.where(at < tokens, x, -1) for x in (high, last))

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (low[query] <= key) & (key <= high[query])

    keys, queries = _blocks(low, high), _blocks(first, last)
    return BlockMask(
        seq_lengths=(tokens, tokens),
        kv_num_blocks=keys[0],
        kv_indices=keys[1],
        full_kv_num_blocks=keys[2],
        full_kv_indices=keys[3],
        q_num_blocks=queries[0],
        q_indices=queries[1],
        full_q_num_blocks=queries[2],
        full_q_indices=queries[3],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
    )


def _blocks(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """Ranges of tokens -> ranges of blocks: for each block those that some of its tokens see but not all,
    counts [1, 1, blocks] and indices [1, 1, blocks, blocks], and the same of those that all see in full.

        some    [ from .................. to ]
        all           [ inner .... outer )
    """
    lows, highs = low.view(-1, BLOCK), high.view(-1, BLOCK)
    begin, end = lows.amin(1) // BLOCK, highs.amax(1) // BLOCK + 1
    inner = -(-lows.amax(1) // BLOCK)
    full = ((highs.amin(1) + 1) // BLOCK - inner).clamp(min=0)
    partial = end - begin - full
    before = torch.where(full > 0, inner - begin, partial)

    most = lows.shape[0] - 1
    nth = torch.arange(most + 1, dtype=torch.int32, device=low.device)
    behind = torch.where(nth < before[:, None], 0, full[:, None])
    indices = (begin[:, None] + nth + behind).clamp(max=most)
    full_indices = (inner[:, None] + nth).clamp(max=most)
    made = (x.to(torch.int32)[None, None] for x in (partial, indices, full, full_indices))
    return tuple(made)


BACKEND = Backend(unavailable=_unavailable, forward=_forward, captured="never")
