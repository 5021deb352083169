"""The ways to train that bench_training.py compares: how each makes its batches and its model.

`padded` is what transformers' Trainer does by default: a collator that pads, SDPA. `transformers` is
padding-free training as TRL does it (its collator gives what our batches hold: ids, positions, boundaries),
with the first attention of PEER_ATTENTION that this machine can run, and with Liger as `use_liger_kernel`
applies it. `padless` is `prepare_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_batches import Batch
from transformers.modeling_layers import GradientCheckpointingLayer

from padless.runtime.models import prepare_model

PEER_ATTENTION = ("flash_attention_4", "flash_attention_3", "flash_attention_2", "flex_attention", "sdpa")
"""What transformers can be asked for, fastest first."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How one way to train begins."""

    form: str
    """Of its batches: padded, grouped (padded, with others of like length), packed, or static (packed, of few
    shapes, under CUDA graphs)."""
    prepare: Callable[[Any, Batch, Path], str]
    """Changes a model for it, given a short batch to try it on and the folder; says what was taken."""

    @property
    def is_padded(self) -> bool:
        """Whether its batches are padded."""
        return self.form in ("padded", "grouped")


def _as_it_is(model: Any, short: Batch, folder: Path) -> str:
    return ""


def _peer(*, liger: bool) -> Callable[[Any, Batch, Path], str]:
    def prepare(model: Any, short: Batch, folder: Path) -> str:
        if liger:
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(model, None)  # what use_liger_kernel=True calls
        for name in PEER_ATTENTION:
            try:
                model.set_attn_implementation(name)
                model(**short.inputs).loss.backward()
            except Exception as problem:  # any: not installed, not for this device, of another version
                print(f"  {name}: {str(problem).strip().splitlines()[0][:150]}", flush=True)
            else:
                model.zero_grad(set_to_none=True)
                return name
            model.zero_grad(set_to_none=True)
        raise SystemExit("transformers has no attention here that keeps packed sequences apart")

    return prepare


def _own(
    *, liger: bool | tuple[str, ...] = False, attention: str = "auto", compiled: bool = False
) -> Callable[[Any, Batch, Path], str]:
    def prepare(model: Any, short: Batch, folder: Path) -> str:
        prepare_model(model, attention=attention, liger=liger, data=folder)
        if compiled:  # layer by layer, which are alike: one is compiled, in seconds
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.compile()
        return ""

    return prepare


ARMS = {
    "padded": Arm(form="padded", prepare=_as_it_is),
    "padded grouped": Arm(form="grouped", prepare=_as_it_is),
    "transformers": Arm(form="packed", prepare=_peer(liger=False)),
    "transformers liger": Arm(form="packed", prepare=_peer(liger=True)),
    "padless": Arm(form="packed", prepare=_own()),
    "padless liger": Arm(form="packed", prepare=_own(liger=True)),
    "padless short": Arm(form="packed", prepare=_own(attention="short")),
    "padless liger short": Arm(form="packed", prepare=_own(liger=True, attention="short")),
    "padless liger flash": Arm(form="packed", prepare=_own(liger=True, attention="flash")),
    "padless compiled": Arm(form="packed", prepare=_own(liger=("loss",), compiled=True)),
    "padless graph": Arm(form="static", prepare=_own(liger=True)),
    "padless graph flash": Arm(form="static", prepare=_own(liger=True, attention="flash")),
}
