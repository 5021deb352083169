"""What a decoder is called with: calls with boundaries are checked and made ready, others left alone.

Everything is looked at once a batch, by shape alone where looking at values would wait for a device; the
layers trust it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from padless.runtime.attention import boundaries_of
from padless.runtime.errors import ModelError
from padless.runtime.model_families import convolves

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class PackedCalls:
    """A decoder's forward pre-hook: sees to calls with boundaries, leaves all others as they are."""

    def __init__(self, decoder: nn.Module) -> None:
        self._names = [
            name
            for name, parameter in inspect.signature(decoder.forward).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        self._convolves = any(map(convolves, decoder.modules()))
        self.first: Callable[[nn.Module], None] | None = None
        """Called with the decoder, once, before the first call with boundaries."""

    def __call__(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if all(kwargs.get(name) is None for name in BOUNDARIES):
            return None
        if self.first is not None:
            self._run_first(decoder)
        kwargs = dict(zip(self._names, args, strict=False)) | kwargs
        kwargs = packed_arguments(kwargs)
        if self._convolves and kwargs.get("seq_idx") is None:  # a collator may know nothing of it
            ids = kwargs["position_ids"]
            kwargs["seq_idx"] = _numbers(kwargs["cu_seq_lens_q"], *ids.shape[-2:])
        return (), kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_first(self, decoder: nn.Module) -> None:
        """In a compiled model this breaks the graph, once; the next call is compiled without it."""
        first, self.first = self.first, None
        if first is None:
            return
        try:
            first(decoder)
        except BaseException:
            self.first = first
            raise


def packed_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a decoder is called with for a packed batch: no cache, and a mask that says it is made already.

    transformers takes a mask of four dimensions for a finished one and makes none: neither one of
    T * T elements nor a look at positions that waits for the device. Raises ModelError, AttentionError.
    """
    for name in ("cu_seq_lens_q", "max_length_q"):
        if kwargs.get(name) is None:
            raise ModelError(f"a packed batch needs cu_seq_lens_q and max_length_q, and {name} is missing")
    if kwargs.get("attention_mask") is not None:
        raise ModelError(
            "a call has boundaries (cu_seq_lens_q) and an attention_mask, which says twice who sees whom; "
            "leave the mask out: padding at a row's end is a sequence of its own, trained nowhere"
        )
    if cache := next((name for name in CACHES if kwargs.get(name) is not None), None):
        raise ModelError(
            f"a call has boundaries (cu_seq_lens_q) and a cache ({cache}), which knows no boundaries; "
            "leave the cache out, or for generation the boundaries"
        )
    given = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    bounds, (batch, tokens) = kwargs["cu_seq_lens_q"], given.shape[:2]
    keys = kwargs.get("cu_seq_lens_k")
    if keys is not None and keys is not bounds and keys.shape != bounds.shape:
        raise ModelError(
            f"cu_seq_lens_k are {list(keys.shape)} and cu_seq_lens_q {list(bounds.shape)}: in packed "
            "training keys and queries are the same tokens; give the same boundaries"
        )
    boundaries_of(bounds, kwargs["max_length_q"], batch * tokens)
    if keys is not None and keys is not bounds and _readable(keys) and _readable(bounds):
        if not torch.equal(keys, bounds):
            raise ModelError(
                f"cu_seq_lens_k are {keys.tolist()} and cu_seq_lens_q {bounds.tolist()}: in packed "
                "training keys and queries are the same tokens; give the same boundaries"
            )
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = _positions(bounds, batch, tokens)
    mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=given.device)
    return kwargs | {"attention_mask": mask, "use_cache": False}


def _readable(bounds: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device or breaking a graph."""
    return bounds.device.type == "cpu" and not torch.compiler.is_compiling()


def _numbers(bounds: Tensor, batch: int, tokens: int) -> Tensor:
    """[B, T] int32: the number of each token's sequence, without waiting for a device."""
    numbers = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
    return torch.repeat_interleave(numbers, bounds.diff(), output_size=batch * tokens).view(batch, tokens)


def _positions(bounds: Tensor, batch: int, tokens: int) -> Tensor:
    """[B, T]: each token's place in its sequence, without waiting for a device."""
    starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=batch * tokens)
    return (torch.arange(batch * tokens, device=bounds.device) - starts).view(batch, tokens)
