"""How a model's packed path turns q and k: by the rotary kernel, with the norms of each head in it.

transformers norms q and k in one place of an attention module's forward and turns them in another. Where
a family does the first just before the second (Qwen3, Gemma 3), the packed path runs that forward over a
module whose two norms hand on what they are given, with the norms' weights beside sin, and the rotation
does both in one launch. A norm that has become something else (an adapter's, with hooks, with a forward
of somebody else's) is run where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from padless.kernels.qk_norm_rope import qk_norm_rope
from padless.kernels.rope import rope_qk, rope_qk_
from padless.runtime.model_families import Rotary

_NORMS = ("q_norm", "k_norm")
_POSITIONS = "position_embeddings"
"""The argument in which attention modules get (cos, sin)."""


class SinAndNorms(NamedTuple):
    """Stands where sin does, for q and k that are still to be normed."""

    sin: Tensor
    q_weight: Tensor
    k_weight: Tensor
    eps: float


def rotation(rotary: Rotary) -> Callable[..., tuple[Tensor, Tensor]]:
    """A family's apply_rotary_pos_emb on the kernels: q [B, Hq, T, D], k [B, Hk, T, D]."""
    rotate = rope_qk_ if rotary.in_place else rope_qk

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | SinAndNorms, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        norms: SinAndNorms | None = None
        if isinstance(sin, SinAndNorms):
            norms, sin = sin, sin.sin
        turned = cos.shape[-1] * (2 if rotary.half_width else 1)
        if rotary.repeated:
            cos, sin = cos[..., ::2], sin[..., ::2]
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if norms is None:
            q, k = rotate(q, k, cos, sin, interleaved=rotary.interleaved, rotary_dim=turned)
        else:
            q, k = qk_norm_rope(
                q, k, *_weights(norms, q.dtype), cos, sin, eps=norms.eps, plus_one=rotary.norm_offset == 1.0,
                interleaved=rotary.interleaved, rotary_dim=turned,
            )  # fmt: skip
        return q.transpose(1, 2), k.transpose(1, 2)

    return apply_rotary_pos_emb


class _WithoutNorms:
    """An attention module, but that its two norms do nothing."""

    def __init__(self, attention: nn.Module) -> None:
        if not torch.compiler.is_compiling():  # nn.Module finds its parts in Python, one by one
            vars(self).update(vars(attention), **attention._modules | dict.fromkeys(_NORMS, _unchanged))
        self._attention = attention

    def __getattr__(self, name: str) -> Any:
        return _unchanged if name in _NORMS else getattr(self._attention, name)


def with_norms_in_rotation(attention: nn.Module, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What to run an attention module's forward over, and its keyword arguments, so that its norms are fused.

    Both as they were given where its norms are not, now, those that the kernel computes.
    """
    norms: list[Any] = [getattr(attention, name, None) for name in _NORMS]
    q_norm, k_norm = norms
    written_in = type(attention).forward.__module__
    if _POSITIONS not in arguments or not all(_is_plain(norm, written_in) for norm in norms):
        return attention, arguments
    eps = _eps(q_norm)
    if eps != _eps(k_norm):
        return attention, arguments
    cos, sin = arguments[_POSITIONS]
    sin = SinAndNorms(sin, q_norm.weight, k_norm.weight, eps)
    return _WithoutNorms(attention), arguments | {_POSITIONS: (cos, sin)}


def _is_plain(norm: Any, written_in: str) -> bool:
    """Whether a norm computes what its family's class does, and nobody listens.

    Other classes, torch's own among them, differ in what is added to the weight or where they round. Liger's
    forward, set by us, counts; what wraps it does not.
    """
    if not isinstance(norm, nn.Module) or not type(norm).__name__.endswith("RMSNorm"):
        return False
    if type(norm).forward.__module__ != written_in:
        return False
    forward = vars(norm).get("forward")
    ours = isinstance(forward, MethodType) and str(forward.__module__).startswith("padless.")
    return (forward is None or ours) and not (
        norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    )


def _weights(norms: SinAndNorms, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both norms' weights as the kernel takes them: of q's type, or in float32 where they are of others."""
    q_weight, k_weight = norms.q_weight, norms.k_weight
    if q_weight.dtype == k_weight.dtype and q_weight.dtype in (dtype, torch.float32):
        return q_weight, k_weight
    return q_weight.float(), k_weight.float()


def _eps(norm: Any) -> float:
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return eps


def _unchanged(x: Tensor) -> Tensor:
    return x
