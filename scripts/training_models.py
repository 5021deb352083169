"""Qwen3 and Llama in their published sizes with random weights, and how many operations a step takes.

What the weights have learned changes neither throughput nor memory, so a configuration is enough; 8 B weights
are drawn on the device in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

MODELS = {
    # hidden, MLP, layers, heads, KV heads, head size, vocabulary
    "tiny": (64, 128, 2, 4, 2, 16, 4_096),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151_936),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 128, 151_936),
    "llama3.1-8b": (4096, 14336, 32, 32, 8, 128, 128_256),
}
"""Sizes of the published configurations; 32B fits one H200 with --lora alone."""
UNTIED = ("qwen3-8b", "qwen3-32b", "llama3.1-8b")
"""Whose head is not their embeddings."""
CHECKPOINTED = ("qwen3-4b", *UNTIED)
"""Whose activations are computed again in the backward pass, unless asked otherwise."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEAK = 989e12
"""Dense bf16 operations a second of an H100 or H200."""


def make_model(name: str, device: str, *, checkpointing: bool, lora: int = 0) -> Any:
    """That size, bf16 on a GPU and fp32 elsewhere; the same weights for every arm.

    `lora`: the rank of adapters on all projections, by peft, the rest being frozen; 0 trains everything.
    """
    torch.manual_seed(0)
    hidden, mlp, layers, heads, kv_heads, head_dim, vocabulary = MODELS[name]
    own: Any = (
        (LlamaConfig, LlamaForCausalLM) if name.startswith("llama") else (Qwen3Config, Qwen3ForCausalLM)
    )
    config = own[0](
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary,
        tie_word_embeddings=name not in UNTIED, max_position_embeddings=40_960, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = own[1](config)
    finally:
        torch.set_default_dtype(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules=list(ADAPTED))
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model.train()


def operations(model: Any, lengths: Iterable[int]) -> float:
    """What a step on sequences of these lengths must compute, forward and backward.

    Six for each weight that is multiplied and token, four for one that is frozen, and causal attention's;
    what is computed again for checkpointing does not count (MFU as in PaLM, appendix B,
    https://arxiv.org/abs/2204.02311).
    """
    config = model.config
    products = sum((6 if part.requires_grad else 4) * part.numel() for part in model.parameters())
    if not config.tie_word_embeddings:  # the input's embeddings are looked up, not multiplied
        looked_up = model.get_input_embeddings().weight
        products -= (6 if looked_up.requires_grad else 4) * looked_up.numel()
    width = config.num_attention_heads * config.head_dim
    lengths = list(lengths)
    attention = config.num_hidden_layers * width * sum(length * length for length in lengths)
    return float(products) * sum(lengths) + 6.0 * attention
