"""One model's packed path beside the path it had: chosen by each call, by whether it has boundaries.

An attention module of transformers finds its attention function and its rotation among the globals of its
file. On the packed path the very same code runs over a copy of those globals in which the two are ours;
without boundaries the module's own forward runs, untouched, with the config, masks and caches it had. So
nothing is changed on a class, a module of transformers or a config, and nothing is registered: other
models of the process see nothing, and a saved config does not name padless. The price: what replaces
those globals after `prepare_model` is not seen on the packed path.

What was changed is kept on the very module that it was changed on, so it is found and undone from any level:
from the model, its decoder, or a wrapper that came later.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from padless.runtime.attention import Options, attend, boundaries_of
from padless.runtime.errors import ModelError
from padless.runtime.model_families import INTERFACE, ROTARY, ROTATION, code_of, family_of, mentions
from padless.runtime.model_rotation import rotation, with_norms_in_rotation

_CHANGES = "_padless_changes"


class Change(Protocol):
    """Something that was done to a module."""

    def remove(self) -> None:
        """Undo it."""


def keep(module: nn.Module, change: Change) -> None:
    """Remember on a module what was done to it."""
    vars(module).setdefault(_CHANGES, []).append(change)


def undo(model: nn.Module) -> None:
    """Undo what was done to a model's modules, the latest of each first."""
    for module in list(model.modules()):
        for change in reversed(vars(module).pop(_CHANGES, [])):
            change.remove()


class PackedAttention:
    """Stands where transformers keeps its attention functions, and gives ours whatever is asked for."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def get_interface(self, name: str, default: Any = None) -> Callable[..., tuple[Tensor, None]]:
        return self.attend

    def __getitem__(self, name: str) -> Callable[..., tuple[Tensor, None]]:
        return self.attend

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """query [B, Hq, T, D], key and value [B, Hk, T, D] -> [B, T, Hq, D], over B * T tokens in a row."""
        if attention_mask is not None and attention_mask.numel():
            raise ModelError(
                f"{type(module).__name__} got boundaries and an attention mask; packed batches have none"
            )
        if dropout:
            raise ModelError(
                f"varlen attention has no dropout and {type(module).__name__} asks for {dropout}"
            )
        if position_bias is not None:
            raise ModelError(f"varlen attention has no position bias, which {type(module).__name__} asks for")
        batch, _, tokens, dim = query.shape
        if key.shape[2] != tokens:
            raise ModelError(f"{tokens} queries meet {key.shape[2]} keys: packed batches have no cache")
        # Norms and rotations of some models widen q and k, as they do under autocast; v tells what is meant.
        dtype, kind = value.dtype, value.device.type
        if dtype is not torch.float64 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        q, k, v = _row(query, dtype), _row(key, dtype), _row(value, dtype)
        boundaries = boundaries_of(cu_seq_lens_q, max_length_q, batch * tokens)
        scale = dim**-0.5 if scaling is None else scaling
        exact = torch.are_deterministic_algorithms_enabled()
        options = Options(True, scale, sliding_window, softcap, s_aux, exact)
        out = attend(q, k, v, boundaries, options, self._backend)
        return out.unsqueeze(0) if batch == 1 else out.view(batch, tokens, *out.shape[1:]), None


def _row(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, T, D] -> [B * T, H, D]."""
    x = x.squeeze(0).transpose(0, 1) if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)
    return x if x.dtype == dtype else x.to(dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewired:
    """A module whose forward was set on the instance, and what was set there before."""

    module: nn.Module
    slot: str
    had: Any

    def remove(self) -> None:
        """Undo it."""
        if self.had is None:
            vars(self.module).pop(self.slot, None)
        else:
            setattr(self.module, self.slot, self.had)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewired:
        module, had = copy.deepcopy(self.module, memo), copy.deepcopy(self.had, memo)
        return Rewired(module=module, slot=self.slot, had=had)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A bound method is pickled by its name: what is loaded would be prepared by half, in silence."""
        raise ModelError(
            f"a prepared model cannot be pickled ({type(self.module).__name__}.{self.slot} was set on it); "
            "save its weights (save_pretrained, state_dict), or restore_model before and prepare_model after"
        )


def rewire(attention: nn.Module, attend: PackedAttention, *, rope: bool) -> None:
    """Give an attention module its packed path beside its own."""
    # accelerate wraps a module's forward and keeps what it wrapped under this name.
    slot = "_old_forward" if "_old_forward" in vars(attention) else "forward"
    had = vars(attention).get(slot)
    own = getattr(had, "__func__", None) if had is not None else type(attention).forward
    if own is None:
        raise ModelError(
            f"{type(attention).__name__}.forward was replaced on this model by {had!r}; prepare the model "
            "before what replaced it"
        )
    setattr(attention, slot, MethodType(_either(own, _packed(attention, attend, rope)), attention))
    keep(attention, Rewired(module=attention, slot=slot, had=had))


def turns_by_kernel(attention: nn.Module) -> bool:
    """Whether an attention module's rotation is one that the kernel computes."""
    return family_of(attention) in ROTARY and mentions(code_of(attention), ROTATION)


def _packed(attention: nn.Module, attend: PackedAttention, rope: bool) -> Callable[..., Any]:
    ours: dict[str, Any] = {INTERFACE: attend, "eager_attention_forward": attend.attend}
    rotary = ROTARY[family_of(attention)] if rope and turns_by_kernel(attention) else None
    if rotary is not None:
        ours[ROTATION] = rotation(rotary)
    written = code_of(attention)
    # Without __name__: torch.compile would look these globals up in the module of that name.
    scope = {name: value for name, value in written.__globals__.items() if name != "__name__"} | ours
    packed = FunctionType(
        written.__code__, scope, written.__name__, written.__defaults__, written.__closure__
    )
    packed.__kwdefaults__ = written.__kwdefaults__
    if rotary is None or rotary.norm_offset is None:
        return packed

    def normed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        over, kwargs = with_norms_in_rotation(self, kwargs)
        return packed(over, *args, **kwargs)

    return normed


def _either(own: Callable[..., Any], packed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seq_lens_q") is not None:
            return packed(self, *args, **kwargs)
        if any(
            isinstance(given, Tensor) and not given.numel() and given.ndim == 4 for given in kwargs.values()
        ):
            raise ModelError(
                f"a batch's boundaries did not reach {type(self).__name__}: this model's layers do not "
                "hand them on; train it with padding"
            )
        return own(self, *args, **kwargs)

    return forward
