"""What training on tokens costs a model, in FLOPs, from its config.json alone.

A token goes through every weight of a layer once (linear), and meets every token before it in its own
sequence (attention). Forward and backward together are three times the forward pass: 6 FLOPs a token and
weight, and for a pair of tokens 6 FLOPs for each number of a query and of a value, over all heads
(Kaplan et al. 2020, appendix B; Megatron-LM's count, Narayanan et al. 2021, with the causal half only).
Recomputation, norms, softmax and embeddings' look-up are left out, as usual: they are model FLOPs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padless.packer.errors import InputError
from padless.packer.lengths import Floats

_PASSES = 3
"""Forward, and twice as much backward."""
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_WITHOUT_GATE = frozenset(("gpt2", "gpt_neox", "gpt_bigcode", "opt", "phi", "bloom", "falcon", "starcoder2"))
"""Model types whose feed-forward part has two matrices, not three."""


def causal_pairs(lengths: Floats, window: int | None = None) -> Floats:
    """Pairs of a token with itself and those before it, within its window: 3 -> 6."""
    seen = lengths if window is None else np.minimum(lengths, window)
    return seen * (seen + 1) / 2 + (lengths - seen) * seen


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """FLOPs of training a model, forward and backward."""

    name: str
    parameters: int
    """Weights that a token goes through, without the embedding's."""
    linear: int
    """FLOPs a token."""
    full: int
    """FLOPs a pair of tokens, over the layers with full attention."""
    sliding: int
    """The same, over the layers with a window."""
    window: int | None
    """Tokens that a token of those layers sees, itself included; None: there are no such layers."""
    heads: int
    head_size: int

    def attention(self, lengths: Floats) -> Floats:
        """FLOPs of attention for sequences of so many tokens, [N] -> [N]."""
        found = self.full * causal_pairs(lengths)
        if self.sliding:
            found = found + self.sliding * causal_pairs(lengths, self.window)
        return found

    def total(self, lengths: Floats) -> Floats:
        """FLOPs for sequences of so many tokens, [N] -> [N]."""
        return self.linear * lengths + self.attention(lengths)


def read_cost(path: str | Path) -> ModelCost:
    """The cost of the model whose config.json this is, or whose folder has one.

    Raises InputError where there is none, or it is of a kind whose FLOPs are not known here.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        content = json.loads(file.read_bytes())
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"{file}: {reason}; --model takes a model's config.json or its folder") from None
    except ValueError as problem:
        raise InputError(f"{file} is no JSON ({problem}); --model takes a model's config.json") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} is no JSON object; --model takes a model's config.json")
    return cost_of(
        content, name=str(content.get("_name_or_path") or file.parent.resolve().name), where=str(file)
    )


def cost_of(config: dict[str, Any], *, name: str = "model", where: str = "config.json") -> ModelCost:
    """The cost of a model by the fields of its transformers configuration; InputError as `read_cost`."""
    if isinstance(config.get("text_config"), dict):  # of a model that also sees or hears
        config = {**config, **config["text_config"]}
    fields = _Fields(config, where)
    hidden, layers, heads = (fields.named(field) for field in ("hidden_size", "layers", "heads"))
    kinds = _layer_types(fields, layers)
    head = fields.integer("head_dim", hidden // heads)
    if fields.integer("kv_lora_rank", 0):
        attention, query, value = _latent_attention(fields, hidden, heads)
    else:
        keys = fields.integer("num_key_value_heads", 1 if config.get("multi_query") else heads)
        attention = hidden * head * (2 * heads + 2 * keys)
        query = value = head
    feed_forward = sum(_feed_forward(fields, hidden, layer) for layer in range(layers))
    weights = layers * attention + feed_forward + hidden * fields.named("vocab_size")
    pair = 2 * _PASSES * heads * (query + value)
    sliding = kinds.count(_SLIDING)
    return ModelCost(
        name=name,
        parameters=weights,
        linear=2 * _PASSES * weights,
        full=pair * (layers - sliding),
        sliding=pair * sliding,
        window=fields.integer("sliding_window", 0) if sliding else None,
        heads=heads,
        head_size=query,
    )


def _layer_types(fields: _Fields, layers: int) -> list[str]:
    """full_attention or sliding_attention for each layer."""
    window = fields.integer("sliding_window", 0)
    given = fields.config.get("layer_types")
    if given is None:
        slides = bool(window) and fields.config.get("use_sliding_window", True)
        first = fields.integer("max_window_layers", 0) if "use_sliding_window" in fields.config else 0
        return [_SLIDING if slides and layer >= first else _FULL for layer in range(layers)]
    unknown = [kind for kind in given if kind not in (_FULL, _SLIDING)]
    if unknown:
        raise InputError(
            f"{fields.where}: layers of type {unknown[0]} are none whose FLOPs are counted here ({_FULL}, "
            f"{_SLIDING}); leave --model out for padding alone"
        )
    if len(given) != layers or (_SLIDING in given and not window):
        raise InputError(
            f"{fields.where}: layer_types does not go with the number of layers or sliding_window"
        )
    return list(given)


def _latent_attention(fields: _Fields, hidden: int, heads: int) -> tuple[int, int, int]:
    """Weights of DeepSeek's latent attention, and what a head's query and value hold."""
    rank, turned = fields.integer("kv_lora_rank", 0), fields.integer("qk_rope_head_dim")
    still, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    query_rank = fields.integer("q_lora_rank", 0)
    query = turned + still
    of_queries = query_rank * (hidden + heads * query) if query_rank else hidden * heads * query
    of_keys = hidden * (rank + turned) + rank * heads * (still + value)
    return of_queries + of_keys + heads * value * hidden, query, value


def _feed_forward(fields: _Fields, hidden: int, layer: int) -> int:
    """Weights of a layer's feed-forward part that a token goes through."""
    config = fields.config
    matrices = 2 if config.get("model_type") in _WITHOUT_GATE else 3
    experts = fields.first(("num_experts", "num_local_experts", "n_routed_experts"), 0)
    step = fields.integer("decoder_sparse_step", 1)
    dense = layer in config.get("mlp_only_layers", ()) or layer < fields.integer("first_k_dense_replace", 0)
    if not experts or dense or (layer + 1) % step:
        width = fields.first(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 4 * hidden)
        return matrices * hidden * width
    width = fields.first(("moe_intermediate_size", "intermediate_size"))
    chosen = fields.first(("num_experts_per_tok", "num_experts_per_token"))
    shared = fields.integer("n_shared_experts", 0) * width
    shared += fields.integer("shared_expert_intermediate_size", 0)
    return matrices * hidden * (chosen * width + shared) + hidden * experts


class _Fields:
    """The integers of a configuration, by the names that models give them."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def named(self, field: str) -> int:
        return self.first(_NAMES[field])

    def integer(self, name: str, otherwise: int | None = None) -> int:
        return self.first((name,), otherwise)

    def first(self, names: tuple[str, ...], otherwise: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{self.where}: {name} is {value!r}, not a whole number")
            return value
        if otherwise is None:
            raise InputError(
                f"{self.where} has no {' or '.join(names)}: its FLOPs cannot be counted; give the "
                "config.json of a decoder, or leave --model out for padding alone"
            )
        return otherwise
