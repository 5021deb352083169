"""A tiny random model of each family, and packed batches for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from padless.runtime.batch import Pack
from padless.runtime.collate import collate
from padless.runtime.varlen_batch import VarlenBatch

VOCABULARY = 96
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
WINDOW: dict[str, Any] = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=4)),
    "ministral3": ("Ministral3", {}),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, **WINDOW)),
    "qwen2_moe": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=24)),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", dict(WINDOW, query_pre_attn_scalar=8, attn_implementation="eager")),
    "gemma3": ("Gemma3Text", dict(WINDOW, query_pre_attn_scalar=8)),
    "phi": ("Phi", dict(partial_rotary_factor=0.5, head_dim=None)),
    "phi3": ("Phi3", dict(partial_rotary_factor=0.5, head_dim=None)),
    "gpt_neox": ("GPTNeoX", dict(rotary_pct=0.5, num_key_value_heads=None, head_dim=None)),
    "glm": ("Glm", dict(partial_rotary_factor=0.5)),
    "glm4": ("Glm4", dict(partial_rotary_factor=0.5)),
    "granite": ("Granite", dict(attention_multiplier=0.3, residual_multiplier=0.5)),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0])),
    "starcoder2": ("Starcoder2", dict(sliding_window=4)),
    "olmo": ("Olmo", dict(clip_qkv=0.5)),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOW),
    "olmoe": ("Olmoe", dict(num_experts=4, num_experts_per_tok=2)),
    "cohere": ("Cohere", dict(use_qk_norm=True)),
    "cohere2": ("Cohere2", WINDOW),
    "gpt_oss": (
        "GptOss",
        dict(WINDOW, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager"),
    ),
}
"""Class and further settings; each family of padless.runtime.model_families.ROTARY is here or in pictures."""

UNLISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {}),
    "exaone4": ("Exaone4", WINDOW),
    "gptj": ("GPTJ", dict(n_embd=32, n_head=4, n_layer=2, rotary_dim=4)),
    "helium": ("Helium", {}),
    "opt": ("OPT", dict(ffn_dim=32, word_embed_proj_dim=32, dropout=0.0)),
    "llama4": ("Llama4Text", dict(num_local_experts=2)),
}
"""Families that the table does not have."""


def tiny(family: str, **changes: Any) -> Any:
    """A model of the family with random weights, the same each time, in float32, evaluating."""
    name, more = (FAMILIES | UNLISTED)[family]
    settings = {**SIZES, **more, **changes}
    settings = {key: value for key, value in settings.items() if value is not None or key == "sliding_window"}
    causal = name.removesuffix("Text") + "ForCausalLM"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, causal)(getattr(transformers, name + "Config")(**settings))
        for parameter in model.parameters():  # norms that do something, and logits that differ
            torch.nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 else 0.0, 0.2)
    return model.eval()


def packed(lengths: Sequence[int], seed: int = 0) -> VarlenBatch:
    """A batch of sequences of these lengths, of random ids; all trained but each one's first token."""
    sizes = np.array(lengths)
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, sizes.sum()).astype(np.int32)
    labels = ids.copy()
    labels[sizes.cumsum() - sizes] = -100
    pack = Pack(
        input_ids=ids,
        labels=labels,
        seq_lengths=sizes,
        sequence_ids=np.arange(len(sizes)),
        num_tokens=len(ids),
        num_targets=int((labels != -100).sum()),
        max_seqlen=int(sizes.max()),
        attention_cost=int((sizes * sizes).sum()),
        extras={},
    )
    return collate([pack])


def alone(batch: VarlenBatch) -> list[dict[str, Tensor]]:
    """Each sequence of a batch as the inputs of a call of its own."""
    bounds = batch["cu_seq_lens_q"].tolist()
    return [
        {"input_ids": batch["input_ids"][:, a:b], "labels": batch["labels"][:, a:b]}
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


def step(model: Any, run: Callable[[], Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss that `run` gives, and the gradients of all weights."""
    model.zero_grad()
    loss = run()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
