"""What the examples share: a tiny random model, and rows packed with the tokenizer of the demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from padless.packer import PackConfig, pack_dataset
from padless.runtime.models import prepare_model

TOKENIZER = Path(__file__).parents[2] / "packer" / "demo_data" / "tokenizer"


def tiny_model(seed: int = 0) -> Any:
    """A random Llama, prepared for packed batches; put your own model here."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocab = len(json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]) + 64
    return prepare_model(LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_key_value_heads=2, **sizes)))


def packed(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    """Rows as a packed folder; on the command line this is `pack-dataset build rows.jsonl ...`."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / "packed"
    options = {"tokenizer": str(TOKENIZER), "max_length": 256, "workers": 1, **options}
    pack_dataset(PackConfig(sources=(str(folder / "rows.jsonl"),), output=str(output), **options))
    return output


def logits(model: Any, batch: Any) -> torch.Tensor:
    """The model's logits of a packed batch, without the loss that it would compute."""
    inputs = {name: value for name, value in batch.model_inputs().items() if name != "labels"}
    found: torch.Tensor = model(**inputs).logits
    return found
