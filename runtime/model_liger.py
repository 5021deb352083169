"""Liger's kernels in one model, where liger-kernel is installed (RMS norms, gated MLPs), and a fused loss.

Liger's own patching replaces classes in transformers' modules, for every model of the process; here its
functions are set on this model's modules, and taken off again. Norms and MLPs are Liger's in every call,
with boundaries or without: the same function with other rounding. Head and loss are one in packed training
calls with labels, whose logits are then never made (`output.logits` is None). That one is our own, in Liger's
order: Liger's asks the device twice a step how many tokens count and what the loss is multiplied by, where
here nothing is waited for (unless labels were not copied by `VarlenBatch.to`, or changed since). It reads the
head's weight, so it is taken where the head is a plain linear layer, and nowhere else: an adapter on the head
would be left out. What a call finds there decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from padless.kernels.linear_cross_entropy import linear_cross_entropy
from padless.runtime.errors import ModelError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.model_families import Decoder, family_of
from padless.runtime.model_wiring import Rewired, keep
from padless.runtime.targets import known_targets

_LOG = logging.getLogger(__name__)
PARTS = ("rms_norm", "mlp", "loss")
_QWEN = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_LLAMA = ("llama", "mistral", "mixtral", "ministral3", *_QWEN, "phi3", "smollm3")
NORMS: dict[str, tuple[float, str]] = {
    **dict.fromkeys((*_LLAMA, "granite"), (0.0, "llama")),
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), (1.0, "gemma")),
}
"""Family -> what is added to the weight, and Liger's name for where it rounds."""
LOSSES = ("llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3")
"""Families whose logits are their head's output, nothing scaled or capped."""
_GATES = {"SiLU": "LigerSiLUMulFunction", "SiLUActivation": "LigerSiLUMulFunction"}
_GATES |= {"GELUTanh": "LigerGELUMulFunction", "PytorchGELUTanh": "LigerGELUMulFunction"}


def liger_parts(liger: str | bool | Iterable[str], decoder: Decoder) -> tuple[str, ...]:
    """Which of PARTS are to be switched on: "auto", True, False or their names.

    Raises ModelError for other names, and where Liger is asked for and not installed; the loss needs none.
    """
    installed = find_spec("liger_kernel") is not None
    if liger == "auto":
        on_device = all(parameter.is_cuda for parameter in decoder.module.parameters())
        return PARTS if installed and on_device else ()
    if isinstance(liger, bool):
        liger = PARTS if liger else ()
    listed = isinstance(liger, Iterable) and not isinstance(liger, str)
    parts = tuple(liger) if listed else ()
    if not listed or any(part not in PARTS for part in parts):
        raise ModelError(f"liger is {liger!r}; it is 'auto', True, False or a list of {', '.join(PARTS)}")
    if set(parts) - {"loss"} and not installed:
        raise ModelError(
            f"liger is {liger!r} and liger-kernel is not installed: pip install 'padless[liger]'"
        )
    return parts


def switch_on(model: nn.Module, decoder: Decoder, parts: Iterable[str]) -> None:
    """Set Liger's functions, and the fused loss, on a model."""
    family = family_of(decoder.attention[0])
    if "rms_norm" in parts and family in NORMS:
        for part in decoder.module.modules():
            if type(part).__name__.endswith("RMSNorm"):
                _set_forward(part, _norm(*NORMS[family]))
    if "mlp" in parts:
        for part in decoder.module.modules():
            if (gate := _gate(part)) is not None:
                _set_forward(part, _mlp(gate))
    owner = _owner_of_head(model)
    if "loss" not in parts or family not in LOSSES or owner is None:
        return
    if _is_linear(owner.lm_head) and "forward" not in vars(owner.lm_head):
        FusedLoss(owner).switch_on(owner)
    else:
        kind = type(owner.lm_head)
        _LOG.warning(
            "%s.lm_head is no plain linear layer (%s.%s): its loss is not fused, logits are made",
            type(owner).__name__,
            kind.__module__,
            kind.__name__,
        )


def _owner_of_head(model: nn.Module) -> Any:
    """The module whose own child the head is; a wrapper like PEFT's only answers in its name."""
    own = (part for part in model.modules() if "lm_head" in part._modules)
    return next((part for part in own if hasattr(part, "loss_function")), None)


def _is_linear(head: Any) -> bool:
    """Whether what a head computes is its weight and bias: not with an adapter, nor quantized."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    keep(module, Rewired(module=module, slot="forward", had=vars(module).get("forward")))
    module.forward = MethodType(forward, module)


def _norm(offset: float, casting: str) -> Callable[..., Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        # Not in place: that would overwrite a gradient which a residual may still need.
        out: Tensor = LigerRMSNormFunction.apply(hidden_states, self.weight, eps, offset, casting, False)
        return out

    return forward


def _gate(module: nn.Module) -> str | None:
    """Liger's function for a gated MLP's product; None for other modules and activations."""
    projections = ("gate_proj", "up_proj", "down_proj")
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in projections):
        return None
    return _GATES.get(type(getattr(module, "act_fn", None)).__name__)


def _mlp(name: str) -> Callable[..., Tensor]:
    from liger_kernel.ops import geglu, swiglu

    gated: Any = getattr(swiglu, name, None) or getattr(geglu, name)

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated.apply(self.gate_proj(x), self.up_proj(x)))
        return out

    return forward


class FusedLoss:
    """A model's head and loss in one, computed where the head is called: its weights are whole there."""

    def __init__(self, model: Any) -> None:
        self._head, self._project, self._own_loss = model.lm_head, model.lm_head.forward, model.loss_function
        self._call: dict[str, Any] | None = None
        """Labels and the like, while a call is on whose logits nobody needs."""
        self._loss: Tensor | None = None

    def switch_on(self, model: Any) -> None:
        """Take the place of a model's head and loss. The model is not kept: copies of the head stay small."""
        keep(model, Rewired(module=model, slot="_loss_function", had=vars(model).get("_loss_function")))
        keep(self._head, Rewired(module=self._head, slot="forward", had=None))
        model.loss_function, self._head.forward = self.loss, self.project
        keep(model, model.register_forward_pre_hook(self.begin, with_kwargs=True))
        keep(model, model.register_forward_hook(self.end, with_kwargs=True, always_call=True))

    def begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before the model's forward: whether this is a packed training call on all tokens, by this head."""
        given = all(kwargs.get(name) is not None for name in ("labels", "cu_seq_lens_q"))
        part = kwargs.get("logits_to_keep")
        whole = part is None or (isinstance(part, int) and part == 0)
        # An adapter that came after `prepare_model` has put another module in the head's place.
        wanted = model.training and given and whole and model.lm_head is self._head and _names(model, kwargs)
        names = ("labels", "num_items_in_batch", "shift_labels")
        self._call = {name: kwargs.get(name) for name in names} if wanted else None

    def project(self, hidden: Tensor) -> Tensor:
        """Stands in for the head's forward."""
        if self._call is None:
            logits: Tensor = self._project(hidden)
            return logits
        self._loss = _loss_of_trained(hidden, self._head, **self._call)
        return hidden

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the model's loss function."""
        return self._own_loss(*args, **kwargs) if self._loss is None else self._loss

    def end(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """After the model's forward, also one that failed."""
        used, self._call, self._loss = self._loss is not None, None, None
        if used and hasattr(output, "logits"):
            output.logits = None
        return output


def _names(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call's output has names: from a tuple nobody could tell that the logits are missing."""
    asked = kwargs.get("return_dict")
    return bool(getattr(model.config, "return_dict", True) if asked is None else asked)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loss_of_trained(
    hidden: Tensor, head: Any, *, labels: Tensor, num_items_in_batch: Any, shift_labels: Tensor | None
) -> Tensor:
    """The mean, or the sum over num_items_in_batch, of the next tokens' cross-entropy.

    Tokens without a label are left out beforehand: the head would be applied to them for nothing, and of
    instruction data they are a half. Infinite, as are its gradients, where labels with targets were left out:
    those that came after they were counted, in a way that torch does not see.
    """
    given = labels if shift_labels is None else shift_labels
    targets = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:] if given is labels else given
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    places, complete = _trained(targets, given)
    if places is not None:
        rows, targets = rows.index_select(0, places), targets.index_select(0, places)
    loss = linear_cross_entropy(rows, head.weight, targets, head.bias, ignore_index=IGNORE_INDEX)
    if complete is not None:
        loss = loss / complete
    if num_items_in_batch is None:
        num_items_in_batch = (targets != IGNORE_INDEX).sum().clamp(min=1)
    divided: Tensor = loss / num_items_in_batch
    return divided


def _trained(targets: Tensor, given: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The places of tokens that have a target, perhaps some others behind them; None for all places.

    Beside them 1, or 0 where there were more than were known, on the device; None where none can be missing.
    `given` are the labels that targets [T] are. Shifting them makes no more of them, so that their number
    says how many places are enough. A captured step is replayed over other labels, of which alone the most
    that there can be is known. Where nothing is, the device is waited for.
    """
    known = known_targets(given)
    if _is_captured(targets):
        enough = len(targets) if known is None or known.most is None else known.most
    elif known is None:
        return (targets != IGNORE_INDEX).nonzero().squeeze(1), None
    else:
        enough = known.trained
    if enough >= len(targets):
        return None, None
    # A stable sort keeps the order, and gives each place once: gradients go back without sums.
    is_masked, places = torch.sort((targets == IGNORE_INDEX).byte(), stable=True)
    return places[:enough], is_masked[enough]


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
