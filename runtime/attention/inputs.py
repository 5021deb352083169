"""What a call of attention is given, checked by shape and type alone, before anything is launched."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from padless.runtime.attention.backend import Options
from padless.runtime.errors import AttentionError


def check_kinds(window: Any, softcap: Any, scale: Any, sinks: Any) -> None:
    """Raises AttentionError, naming the value, for an option that is of another kind than it must be."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, Integral)):
        raise AttentionError(f"window is {window!r}; it must be a whole number of tokens, or None for none")
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
            raise AttentionError(f"{name} is {value!r}; it must be a number, and finite, or None")
    if sinks is not None and not isinstance(sinks, Tensor):
        raise AttentionError(
            f"sinks are a {type(sinks).__name__}; they must be a tensor [Hq] on the device of q, or None"
        )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, options: Options) -> None:
    """Raises AttentionError, naming shapes and values, for a call that no backend could do."""
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise AttentionError(
            f"q must be [T, Hq, D], k and v [T, Hk, D], with the same tokens: {_shapes(q, k, v)}"
        )
    if q.shape[2] != k.shape[2]:
        raise AttentionError(
            f"q and k have heads of {q.shape[2]} and {k.shape[2]}; they must match: {_shapes(q, k, v)}"
        )
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise AttentionError(
            f"{q.shape[1]} heads of q are no multiple of {k.shape[1]} heads of k and v: {_shapes(q, k, v)}"
        )
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise AttentionError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must be one floating type")
    if not q.device == k.device == v.device == cu_seqlens.device:
        raise AttentionError(
            f"q is on {q.device}, k on {k.device}, v on {v.device}, cu_seqlens on {cu_seqlens.device};"
            " move the batch there once"
        )
    if options.window is not None and not (options.causal and options.window >= 1):
        raise AttentionError(
            f"window is {options.window} and causal {options.causal}; a window counts a token and those"
            " before it: at least 1, and with causal=True"
        )
    if options.softcap is not None and not options.softcap > 0:
        raise AttentionError(f"softcap is {options.softcap}; it must be positive, or None for none")
    sinks = options.sinks
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device):
        raise AttentionError(
            f"sinks are {list(sinks.shape)} on {sinks.device}; they must be [{q.shape[1]}], one a head of q,"
            f" on {q.device}"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
