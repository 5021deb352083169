"""Whether a model keeps packed sequences apart, found out by running it: no path is trusted.

Two questions, with a short packed batch. Does a token change where only its neighbours' sequences do?
Between such runs every shape is the same, so nothing but a leak (or, among experts, rounding) can change
anything: SAME_SHAPES lets no more pass, and the part of the layer that leaks is named. And does each sequence
come out as it does alone? That finds a lost window or wrong positions; alone a sequence has other shapes, so
kernels round otherwise: TOLERANCE lies far above that and far below what such a mistake does. In 16 bits
rounding adds up over the layers, so there a layer may deviate by GROWTH times as much as the one before: what
a mistake does comes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from padless.runtime.collate import collate, pack_from_row
from padless.runtime.errors import IsolationError, ModelError
from padless.runtime.model_families import Decoder, find_decoder

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
"""Largest deviation of a token's vector, as a share of its size; HALF_TOLERANCE for 16 bits."""
HALF_TOLERANCE = 5e-2
GROWTH = 2.0
SAME_SHAPES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The same between runs of the same shapes; 16 bits round as far as ever where experts get other tokens."""
LENGTHS = (9, 5, 12)
LONGEST_WINDOW = 256
"""Windows up to this are exceeded by one of the sequences; a longer one would make the check slow."""


def check_isolation(model: nn.Module, batch: Mapping[str, Any] | None = None) -> None:
    """Run a packed batch, with other neighbours, and each sequence alone; return where all layers agree.

    `batch` is what the model is called with in training, where that is not padless's own: its boundaries are
    its cu_seq_lens_q, or the places where position_ids do not go on. By default a batch of padless is made.
    Works on prepared models and on those that are not. Weights, gradients, modes and random states are
    left as they were; the model runs three times for the batch and once for each sequence, without its head.

    Raises IsolationError naming the layer at fault, ModelError for a batch or model that cannot be run so.
    """
    decoder = find_decoder(model)
    inputs = dict(_sample(decoder) if batch is None else batch)
    for name in ("labels", "num_items_in_batch", "num_targets", "sequence_ids"):
        inputs.pop(name, None)
    ids: Tensor = inputs["input_ids"]
    bounds = _bounds(decoder, inputs)
    spans = list(zip(bounds, bounds[1:], strict=False))
    with _evaluating(decoder.module):
        packed = _run(decoder, inputs)
        for others in (0, 1):
            changed = ids.flatten().clone()
            for start, end in spans[others::2]:
                changed[start:end] = ids.flatten().flip(0)[start:end]
            found = _run(decoder, inputs | {"input_ids": changed.view(ids.shape)})
            for number in range(1 - others, len(spans), 2):
                how = f"sequence {number + 1} differs, when others change,"
                _compare(decoder, packed, found, spans[number], how, SAME_SHAPES)
        for number, (start, end) in enumerate(spans):
            found = _run(decoder, {"input_ids": ids.reshape(1, -1)[:, start:end], "use_cache": False})
            layers = {name: values for name, values in found.items() if name.count(".") < 2}
            here = {name: packed[name][start:end] for name in layers}
            how = f"sequence {number + 1} differs from what it is alone"
            _compare(decoder, here, layers, (0, end - start), how, TOLERANCE)


def _compare(
    decoder: Decoder,
    these: Mapping[str, Tensor],
    those: Mapping[str, Tensor],
    span: tuple[int, int],
    how: str,
    tolerance: Mapping[torch.dtype, float],
) -> None:
    """See that the tokens of a span are the same in all layers, in the order of computation."""
    least = tolerance.get(_dtype(decoder), HALF_TOLERANCE)
    grows = tolerance is TOLERANCE and least == HALF_TOLERANCE
    before = 0.0
    for layer, one in these.items():
        a, b = one[slice(*span)], those[layer][slice(*span)]
        size = torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp(min=1e-30)
        apart = float(((a - b).norm(dim=-1) / size).max())
        allowed = max(least, GROWTH * before) if grows else least
        before = apart
        if not apart <= allowed:
            raise IsolationError(
                f"{_name(decoder)} does not keep packed sequences apart: in {layer} a token of {how} by "
                f"{apart:.2g} of its size (at most {allowed:.2g} is rounding). {_advice(decoder, layer)}"
            )


def _advice(decoder: Decoder, layer: str) -> str:
    if any(layer.startswith((name + ".", name + " ")) for name, _ in decoder.without_attention):
        return (
            "The layer has no attention, so it needs kernels that know boundaries (seq_idx, cu_seqlens): "
            "install those that transformers names for this model, or train it with padding"
        )
    return (
        "Prepare the model (padless.runtime.models.prepare_model), give it batches with cu_seq_lens_q and "
        "max_length_q, and no attention_mask and no cache"
    )


def _run(decoder: Decoder, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What each layer, its parts, and the decoder give: [B * T, D], in the order in which they are done."""
    tokens = inputs["input_ids"].numel()
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, Tensor) or not output else output[0]
            if isinstance(hidden, Tensor) and hidden.ndim > 1 and hidden.shape[:-1].numel() == tokens:
                found[name] = hidden.detach().flatten(0, -2).float().clone()

        return hook

    named = [(f"the output of {_name(decoder)}", decoder.module)]
    for name, layer in decoder.layers:
        parts = [(f"{name}.{part} ({type(child).__name__})", child) for part, child in layer.named_children()]
        named += [*parts, (f"{name} ({type(layer).__name__})", layer)]
    handles = [module.register_forward_hook(keep(name)) for name, module in named]
    try:
        decoder.module(**inputs)
    except ModelError:
        raise
    except Exception as error:  # whatever transformers and its kernels raise
        reason = str(error).rstrip(".")
        if "cu_seq_lens_q" in inputs:
            reason += (
                ". A model that computes with its mask itself cannot do without one: train it with padding, "
                "or one sequence at a time (--strategy none, without boundaries)"
            )
        raise IsolationError(f"{_name(decoder)} cannot run this batch: {reason}") from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _sample(decoder: Decoder) -> dict[str, Any]:
    """A small packed batch of ids that the model has, the same each time."""
    config: Any = decoder.module.config
    window = getattr(config, "sliding_window", None) or 0
    lengths = [*LENGTHS, window + 4] if 0 < window <= LONGEST_WINDOW else list(LENGTHS)
    special = {
        getattr(config, name, None)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id")
    }
    usual = np.array([number for number in range(min(config.vocab_size, 4096)) if number not in special])
    ids = np.random.default_rng(0).choice(usual, sum(lengths))
    pack = pack_from_row(
        {"input_ids": ids, "seq_lengths": np.array(lengths), "sequence_ids": np.arange(len(lengths))}, {}
    )
    return collate([pack]).to(_device(decoder)).model_inputs()


def _bounds(decoder: Decoder, inputs: Mapping[str, Any]) -> list[int]:
    """Where sequences begin in the row of B * T tokens, and its end."""
    ids: Tensor = inputs["input_ids"]
    bounds = inputs.get("cu_seq_lens_q")
    if bounds is not None:
        return sorted({int(bound) for bound in bounds})
    positions = inputs.get("position_ids")
    if positions is None:
        raise ModelError("a packed batch needs cu_seq_lens_q or position_ids: boundaries are never guessed")
    implementation = str(getattr(decoder.module.config, "_attn_implementation", None))
    if "flash" in implementation and ids.shape[0] > 1:
        raise IsolationError(
            f"{implementation} takes no boundaries from position_ids in a batch of {ids.shape[0]} rows: it "
            "attends across the sequences of a row; put all sequences into one row, or give cu_seq_lens_q"
        )
    positions = positions.expand(ids.shape)
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    return [*begins.flatten().nonzero().flatten().tolist(), ids.numel()]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """No gradients and no dropout, nothing compiled, and afterwards every module in the mode it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        # Layers that are compiled would be so for each of a few shapes that never come again.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for part in training:
            part.training = True


def _device(decoder: Decoder) -> torch.device:
    return next(decoder.module.parameters()).device


def _dtype(decoder: Decoder) -> torch.dtype:
    """What is computed in: autocast's type where it is on, otherwise that of the weights."""
    weights = next(parameter for parameter in decoder.module.parameters() if parameter.is_floating_point())
    if torch.is_autocast_enabled(weights.device.type):
        return torch.get_autocast_dtype(weights.device.type)
    return weights.dtype


def _name(decoder: Decoder) -> str:
    return type(decoder.module).__name__
