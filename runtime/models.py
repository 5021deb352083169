"""Models of transformers that cannot mix sequences: `prepare_model`, and its way back.

    model = prepare_model(AutoModelForCausalLM.from_pretrained(...), data="packed")
    loss = model(**batch.to("cuda").model_inputs()).loss

A call with boundaries (cu_seq_lens_q, max_length_q) goes through varlen attention and the rotary kernel;
one without them is computed by exactly the code that the model had. Each model is changed by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from padless.runtime.attention import BACKENDS
from padless.runtime.errors import ModelError
from padless.runtime.isolation import check_isolation
from padless.runtime.model_calls import PackedCalls
from padless.runtime.model_data import ModelFacts, check_data
from padless.runtime.model_families import Decoder, find_decoder
from padless.runtime.model_liger import liger_parts, switch_on
from padless.runtime.model_wiring import PackedAttention, keep, rewire, turns_by_kernel, undo

__all__ = ["check_isolation", "prepare_model", "restore_model"]

M = TypeVar("M", bound=nn.Module)
_LOG = logging.getLogger(__name__)


def prepare_model(
    model: M,
    *,
    attention: str = "auto",
    rope: bool = True,
    liger: str | bool | Iterable[str] = "auto",
    check: str | bool = "auto",
    data: str | Path | None = None,
) -> M:
    """The same model, whose calls with boundaries keep packed sequences apart.

    - attention: a backend of `padless.runtime.attention`, or "auto".
    - rope: whether q and k are turned by the fused kernel, in families that it knows.
    - liger: Liger's kernels: "auto" all where liger-kernel is installed and the weights are on a GPU; True,
      False, or some of "rms_norm", "mlp", "loss" (see `padless.runtime.model_liger`).
    - check: whether `check_isolation` is run: "auto" now where the weights are on an accelerator, otherwise
      before the first packed batch; True now; False never.
    - data: a packed folder that the model is to be trained on, checked against it (see `check_data`).

    Raises ModelError for a model or data that do not fit, IsolationError where sequences would meet; the
    model is then as it was.
    """
    if attention != "auto" and attention not in BACKENDS:
        raise ModelError(f"attention is {attention!r}; it is auto, {', '.join(BACKENDS)}")
    if not isinstance(check, bool) and check != "auto":
        raise ModelError(f"check is {check!r}; it is 'auto', True or False")
    restore_model(model)
    decoder = find_decoder(model)
    if decoder.without_attention and check is False:
        name, layer = decoder.without_attention[0]
        raise ModelError(
            f"{name} ({type(layer).__name__}) has no attention, or more than that; whether it keeps "
            "sequences apart depends on the kernels that are installed, so check=False is refused"
        )
    if data is not None:
        check_data(ModelFacts.of_model(model), data, attention)
    parts = liger_parts(liger, decoder)
    try:
        calls = _wire(decoder, attention, rope)
        switch_on(model, decoder, parts)
        _check(model, decoder, calls, check)
    except BaseException:
        restore_model(model)
        raise
    return model


def restore_model(model: M) -> M:
    """The model as it was before `prepare_model`; as it is where it never was prepared.

    Whatever was prepared: this model, a part of it, or the model that it wraps (PEFT, torch.compile).
    """
    undo(model)
    return model


def _wire(decoder: Decoder, attention: str, rope: bool) -> PackedCalls:
    attend = PackedAttention(attention)
    for module in decoder.attention:
        rewire(module, attend, rope=rope)
    calls = PackedCalls(decoder.module)
    keep(decoder.module, decoder.module.register_forward_pre_hook(calls, prepend=True, with_kwargs=True))
    turned = sum(turns_by_kernel(module) for module in decoder.attention) if rope else 0
    _LOG.info(
        "%s: %d attention layers by varlen attention (%s), %d with the rotary kernel",
        type(decoder.module).__name__,
        len(decoder.attention),
        attention,
        turned,
    )
    return calls


def _check(model: nn.Module, decoder: Decoder, calls: PackedCalls, check: Any) -> None:
    name = type(model).__name__
    if check is False:
        _LOG.warning("%s is not checked for leaks between packed sequences (check=False)", name)
    elif check is True or _on_accelerator(decoder):
        check_isolation(model)
    else:
        calls.first = check_isolation


def _on_accelerator(decoder: Decoder) -> bool:
    """Whether all weights are whole, and where they will be trained."""
    return all(
        parameter.device.type not in ("cpu", "meta") and not hasattr(parameter, "device_mesh")
        for parameter in decoder.module.parameters()
    )
