"""What the examples share: the data and tokenizer that ship with padless, and a model for a CPU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from padless.packer import pack
from padless.packer.demo import DEMO_DATA
from padless.runtime.dataset import PackedDataset

TOKENIZER = str(DEMO_DATA / "tokenizer")


def demo_packs() -> PackedDataset:
    """In your program: `pack(your_data, your_tokenizer, max_length=...)`, or `PackedDataset("packed")`."""
    return pack(str(DEMO_DATA / "instructions.jsonl"), TOKENIZER, max_length=1024, limit=100)


def demo_model() -> LlamaForCausalLM:
    """In your program: `AutoModelForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # large, so that sequences that see each other would show in the loss
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)
