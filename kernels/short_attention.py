"""Causal attention of packed short sequences, rotary embedding included: `short_attention`.

Rows of instruction data are 50 to 300 tokens long. Libraries cut work into tiles of 128 queries of one
head, most of which lie idle there; here a tile is a few tokens' queries of all heads that share keys, and
the tiles are listed once for a batch (`work_list`). Queries turn on their way into the product and
gradients on their way out, so that rotating costs a pass over k alone. The backward pass writes every
gradient once: the same bits each run, no float32 sums in memory. The price: for rows of a thousand tokens
and more FlashAttention-3 and later are faster.

Where there is no Triton kernel to run the reference computes the same.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .autograd import direct, once
from .rope import runs_kernel
from .short_attention_inputs import DTYPES, Options, Saved, check_inputs, options_of
from .short_attention_ref import attend_ref, attend_ref_back
from .short_attention_work import Tiles, WorkList


def short_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: WorkList,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention [T, Hq, D] of each sequence over itself, causal, contiguous; differentiable, once.

    - q [T, Hq, D], k and v [T, Hk, D] with Hq a multiple of Hk, D even and up to 256; at any strides. The
      kernels take float16 and bfloat16; other types are left to the reference.
    - work: `work_list(boundaries, tiles_for(Hq, Hk, D)).to(q.device)`, once a batch for all layers.
    - cos, sin: tables [S, D/2] (`rope_tables`); with them q and k turn first, in pairs (i, i + D/2), each
      token by its place in its sequence, in float32, rounded once.
    - scale: D ** -0.5 unless given. window W: a token sees itself and the W - 1 before it. softcap C: scores
      become C * tanh(score / C).

    Raises ValueError and TypeError, naming shapes, before anything is launched.
    """
    options = options_of(q, scale, window, softcap)
    check_inputs(q, k, v, work, cos, sin)
    return attend(q, k, v, work, cos, sin, options)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: WorkList,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
) -> Tensor:
    """`short_attention` of what was checked already."""
    if not q.stride()[-1] == k.stride()[-1] == v.stride()[-1] == 1:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if cos is not None and sin is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
    if torch.compiler.is_compiling():
        flat = (work.buffer, work.tokens, *work.tiles, work.query_tiles, work.key_tiles, work.max_seqlen)
        traced: Tensor = _traced(q, k, v, cos, sin, *flat, *options)[0]
        return traced
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out: Tensor = _short_attention(q, k, v, work, cos, sin, options)
        return out
    return forward(q, k, v, work, cos, sin, options, keep=False).out


def tiles_for(q_heads: int, k_heads: int, head_dim: int) -> Tiles:
    """The tiles that the kernels are fastest with: 64 rows of queries, 64 keys; 32 keys above 128 dimensions.

    Raises ValueError for heads that are no multiple of k's.
    """
    if k_heads < 1 or q_heads < 1 or q_heads % k_heads:
        raise ValueError(f"q has {q_heads} heads, which is no multiple of k's {k_heads}")
    group = q_heads // k_heads
    return Tiles(max(1, 64 >> (group - 1).bit_length()), 64 if head_dim <= 128 else 32)


def _takes_kernel(q: Tensor) -> bool:
    """Whether Triton takes q. Its interpreter multiplies bfloat16 as if it were integers, so not there."""
    return runs_kernel(q) and q.dtype in DTYPES and (q.is_cuda or q.dtype != torch.bfloat16)


@cache
def _kernels() -> ModuleType:
    """What launches the kernels; Triton is imported when one is first needed."""
    from . import short_attention_launch

    return short_attention_launch


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: WorkList,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
    *,
    keep: bool,
) -> Saved:
    """Without autograd's knowledge: by the kernels where they run, else by the reference."""
    if _takes_kernel(q):
        saved: Saved = _kernels().forward(q, k, v, work, cos, sin, options, keep=keep)
        return saved
    out = attend_ref(q, k, v, work.starts, cos, sin, options)
    return Saved(q, k, out, q.new_empty(q.shape[:2], dtype=torch.float32))


def backward(
    saved: Saved,
    v: Tensor,
    grad: Tensor,
    work: WorkList,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    if _takes_kernel(v):
        grads: tuple[Tensor, Tensor, Tensor] = _kernels().backward(saved, v, grad, work, cos, sin, options)
        return grads
    return attend_ref_back(saved.q, saved.k, v, grad, work.starts, cos, sin, options)


class _ShortAttention(torch.autograd.Function):
    """Keeps turned queries and keys in place of those given, the result, and a number a head and token."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: WorkList,
        cos: Tensor | None,
        sin: Tensor | None,
        options: Options,
    ) -> Tensor:
        saved = forward(q, k, v, work, cos, sin, options, keep=True)
        ctx.save_for_backward(*saved, v, cos, sin)
        ctx.work, ctx.options = work, options
        return saved.out

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, v, cos, sin = ctx.saved_tensors
        grads = backward(Saved(*saved), v, grad, ctx.work, cos, sin, ctx.options)
        return (*grads, None, None, None, None)


_short_attention = direct(_ShortAttention)


def _unflattened(flat: tuple[Any, ...]) -> tuple[WorkList, Options]:
    buffer, tokens, query_tokens, key_tokens, query_tiles, key_tiles, max_seqlen, *options = flat
    work = WorkList(
        buffer=buffer,
        tokens=tokens,
        tiles=Tiles(query_tokens, key_tokens),
        query_tiles=query_tiles,
        key_tiles=key_tiles,
        max_seqlen=max_seqlen,
    )
    return work, Options(*options)


@torch.library.custom_op("padless::short_attention", mutates_args=())
def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    buffer: Tensor,
    tokens: int,
    query_tokens: int,
    key_tokens: int,
    query_tiles: int,
    key_tiles: int,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward pass as one operator, for torch.compile: out, turned q and k if there are any, lse."""
    flat = (buffer, tokens, query_tokens, key_tokens, query_tiles, key_tiles, max_seqlen)
    work, options = _unflattened((*flat, scale, window, softcap))
    saved = forward(q, k, v, work, cos, sin, options, keep=True)
    if saved.q is q:  # an operator's results are never its inputs
        return saved.out, q.new_empty(0), k.new_empty(0), saved.lse
    return saved.out, saved.q, saved.k, saved.lse


@_traced.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    turned = cos is not None and _takes_kernel(q)
    kept = [x.new_empty(x.shape) if turned else x.new_empty(0) for x in (q, k)]
    return q.new_empty(q.shape), *kept, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("padless::short_attention_backward", mutates_args=())
def _traced_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    buffer: Tensor,
    tokens: int,
    query_tokens: int,
    key_tokens: int,
    query_tiles: int,
    key_tiles: int,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back as one operator."""
    flat = (buffer, tokens, query_tokens, key_tokens, query_tiles, key_tiles, max_seqlen)
    work, options = _unflattened((*flat, scale, window, softcap))
    return backward(Saved(q, k, out, lse), v, grad, work, cos, sin, options)


@_traced_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _traced_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, cos, sin, buffer, *rest = inputs
    out, q_kept, k_kept, lse = output
    saved = (q_kept, k_kept) if q_kept.ndim == 3 else (q, k)
    ctx.save_for_backward(*saved, v, out, lse, cos, sin, buffer)
    ctx.rest = rest
    ctx.mark_non_differentiable(q_kept, k_kept, lse)


def _traced_backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, cos, sin, buffer = ctx.saved_tensors
    grads = _traced_back(q, k, v, out, lse, grad, cos, sin, buffer, *ctx.rest)
    return (*grads, *(None,) * 12)


_traced.register_autograd(_traced_backward, setup_context=_traced_setup)
