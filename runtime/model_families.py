"""What there is to know about model families: where their attention is, and how they turn q and k.

Attention is found by what its code does (it asks transformers' attention interface for a function), so
that a model under another name or one that subclasses a known one needs no entry. Rotation has to be
known: ROTARY lists the modules whose apply_rotary_pos_emb the kernel computes; others keep their own.
A family's name is that of the module its attention is written in: `llama` is modeling_llama.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from padless.runtime.errors import ModelError

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
ROTATION = "apply_rotary_pos_emb"
CONVOLUTION = "causal_conv1d_fn"
"""What transformers' Mamba, gated-delta and short-conv layers call, before whatever recurrence they have."""
OFFSET_POSITIONS = "create_position_ids_from_input_ids"


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How a family turns q and k by gathered cos and sin [B, T, width]."""

    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), ...; otherwise (0, R/2), (1, R/2 + 1), ..."""
    repeated: bool = False
    """cos is c0, c0, c1, c1, ...; otherwise c0, c1, ..., c0, c1, ..., of which the first half counts."""
    half_width: bool = False
    """cos has R/2 columns instead of R."""
    in_place: bool = True
    """False where q, k and v come out of one chunk(): autograd lets nobody overwrite a part of that."""
    norm_offset: float | None = None
    """What q_norm and k_norm add to their weights, where they norm each head just before it turns."""


_HALVES = Rotary()
_NORMED = Rotary(norm_offset=0.0)
ROTARY: dict[str, Rotary] = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe"), _HALVES),
    **dict.fromkeys(("gemma", "gemma2", "phi", "phi3", "granite", "qwen2_vl", "qwen2_5_vl"), _HALVES),
    **dict.fromkeys(("smollm3", "olmo", "olmo2", "olmo3", "olmoe", "starcoder2"), _HALVES),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"), _NORMED),
    "gemma3": Rotary(norm_offset=1.0),
    "gpt_neox": Rotary(in_place=False),
    "gpt_oss": Rotary(half_width=True),
    **dict.fromkeys(("glm", "glm4"), Rotary(interleaved=True)),
    **dict.fromkeys(("cohere", "cohere2"), Rotary(interleaved=True, repeated=True)),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    """A stack of layers that is called with a row of tokens, and its attention."""

    module: nn.Module
    """Makes masks and positions for its layers: LlamaModel, not LlamaForCausalLM."""
    attention: tuple[nn.Module, ...]
    layers: tuple[tuple[str, nn.Module], ...]
    """Names below `module`, in the order of computation."""

    @property
    def without_attention(self) -> tuple[tuple[str, nn.Module], ...]:
        """Layers whose tokens meet by other ways than attention alone: recurrence, convolution."""
        found = set(self.attention)
        return tuple(
            (name, layer)
            for name, layer in self.layers
            if not any(part in found for part in layer.modules()) or any(map(convolves, layer.modules()))
        )


def find_decoder(model: nn.Module) -> Decoder:
    """The one decoder of a model, checked for what packed attention cannot do.

    Raises ModelError where there is none or several, and for attention that is not causal, not computed
    through transformers' interface, in chunks, with dropout, or windowed by its mask alone, and for
    positions that are counted from the padding id.
    """
    found: dict[nn.Module, list[nn.Module]] = {}
    for part in _parts(model):
        module = part[-1]
        if not computes_attention(module) or not getattr(module, "is_causal", True):
            continue
        owner = next((above for above in reversed(part[:-1]) if _is_pretrained(above)), None)
        if owner is not None:
            found.setdefault(owner, []).append(module)
    name = type(model).__name__
    if not found:
        raise ModelError(
            f"{name} has no causal attention that goes through transformers' attention interface, so it "
            "would ignore boundaries; packed training needs a causal model whose attention does"
        )
    if len(found) > 1:
        names = ", ".join(sorted(type(owner).__name__ for owner in found))
        raise ModelError(f"{name} has several decoders ({names}); prepare the one that is trained")
    (module, attention) = next(iter(found.items()))
    _refuse_offset(module)
    decoder = Decoder(module=module, attention=tuple(attention), layers=_layers(module, attention))
    for each in attention:
        _refuse(each)
    return decoder


def family_of(attention: nn.Module) -> str:
    """The family whose code an attention module runs: `llama`."""
    module = code_of(attention).__globals__.get("__name__", "")
    return str(module).rpartition(".modeling_")[2] or type(attention).__name__


def code_of(module: nn.Module) -> Any:
    """The function that a module's class has written as forward, without decorators."""
    return inspect.unwrap(type(module).forward)


def computes_attention(module: nn.Module) -> bool:
    """Whether a module's forward asks transformers' attention interface for a function."""
    code = getattr(code_of(module), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def convolves(module: nn.Module) -> bool:
    """Whether a module's forward runs a causal convolution over the tokens."""
    code = getattr(code_of(module), "__code__", None)
    return code is not None and CONVOLUTION in code.co_names


def mentions(function: Callable[..., Any], word: str) -> bool:
    """Whether a function's code has a word among its names and keyword arguments."""
    code: CodeType = inspect.unwrap(function).__code__
    constants = (
        item for const in code.co_consts for item in (const if isinstance(const, tuple) else (const,))
    )
    return word in (*code.co_names, *code.co_varnames) or word in [c for c in constants if isinstance(c, str)]


def _refuse_offset(decoder: nn.Module) -> None:
    """RoBERTa's kind: whoever gives such a model positions has to know its padding id."""
    for module in decoder.modules():
        if hasattr(module, OFFSET_POSITIONS) or mentions(code_of(module), OFFSET_POSITIONS):
            padding = getattr(getattr(decoder, "config", None), "pad_token_id", None)
            name = type(decoder).__name__
            raise ModelError(
                f"{name} counts positions from its padding id (pad_token_id {padding}) + 1, "
                "and those of packed sequences begin at 0; train it with padding"
            )


def _refuse(attention: nn.Module) -> None:
    name = type(attention).__name__
    config: Any = getattr(attention, "config", None)
    types = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in types:
        raise ModelError(f"{name} attends in chunks, which no varlen backend does; train it with padding")
    dropout = getattr(attention, "attention_dropout", 0.0)
    if isinstance(dropout, float) and dropout > 0:
        raise ModelError(
            f"{name} drops {dropout} of its attention, which varlen kernels do not; load the model with "
            "attention_dropout=0.0"
        )
    windows = "sliding_attention" in types if types else getattr(config, "sliding_window", None) is not None
    if windows and not mentions(code_of(attention), "sliding_window"):
        raise ModelError(f"{name} has a sliding window in its mask alone, and packed batches have no mask")


def _parts(model: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    """Each module once, below all that it lies in."""
    seen: set[nn.Module] = set()

    def walk(above: tuple[nn.Module, ...], module: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
        if module in seen:
            return
        seen.add(module)
        yield (*above, module)
        for child in module.children():
            yield from walk((*above, module), child)

    return walk((), model)


def _layers(decoder: nn.Module, attention: list[nn.Module]) -> tuple[tuple[str, nn.Module], ...]:
    wanted = set(attention)
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and any(part in wanted for part in child.modules()):
            return tuple((f"{name}.{number}", layer) for number, layer in enumerate(child))
    raise ModelError(
        f"{type(decoder).__name__} does not keep its layers in a list, so they cannot be checked"
    )


def _is_pretrained(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)
