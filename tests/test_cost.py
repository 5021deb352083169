"""FLOPs by a config.json are those of the matrices that the model really has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless.packer.cost import causal_pairs, cost_of, read_cost
from padless.packer.errors import InputError

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", TINY),
    ("llama", {**TINY, "head_dim": 16}),
    ("mistral", {**TINY, "sliding_window": 8}),
    ("gemma2", {**TINY, "head_dim": 8, "sliding_window": 8}),
    ("qwen2", TINY),
    ("qwen3_moe", {**TINY, "head_dim": 8, **EXPERTS}),
    ("mixtral", {**TINY, "num_local_experts": 3, "num_experts_per_tok": 3}),
    (
        "deepseek_v3",
        {**TINY, "num_key_value_heads": 4, **LATENT, "n_routed_experts": 4, "n_shared_experts": 2}
        | {
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    ("gpt2", {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4}),
    ("gpt_neox", {**TINY, "num_key_value_heads": None}),
]


def matrices(kind: str, fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The configuration as transformers writes it, and the numbers in its model's matrices."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if v is not None})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = {
        id(weight): weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and "embed" not in name and ".wte." not in name and ".wpe." not in name
    }
    tied = model.get_output_embeddings().weight  # may be the embedding's own
    counted[id(tied)] = tied.numel()
    return json.loads(config.to_json_string(use_diff=False)), sum(counted.values())


@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_every_matrix_a_token_goes_through_is_counted(kind: str, fields: dict[str, Any]) -> None:
    """All experts are chosen here, so that every matrix is gone through."""
    config, numbers = matrices(kind, fields)
    cost = cost_of(config)
    assert cost.parameters == numbers
    assert cost.linear == 6 * numbers


def test_attention_counts_queries_and_values_of_every_pair() -> None:
    # Forward: 2 FLOPs a number of the query and 2 a number of the value; three times with backward.
    cost = cost_of(TINY)
    assert cost.full == 4 * 4 * 3 * (2 * 8 + 2 * 8)
    assert cost.attention(np.array([3.0]))[0] == cost.full * (1 + 2 + 3)
    assert cost.total(np.array([3.0]))[0] == 3 * cost.linear + cost.full * 6


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_pairs_are_those_that_a_causal_mask_leaves(window: int | None) -> None:
    for length in range(1, 12):
        rows = range(length)
        seen = sum(1 for q in rows for k in rows if k <= q and (window is None or q - k < window))
        assert causal_pairs(np.array([float(length)]), window)[0] == seen


def test_layers_with_a_window_see_no_further() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    cost = cost_of({**TINY, "layer_types": kinds, "sliding_window": 2})
    whole = cost_of(TINY)
    assert (cost.full, cost.sliding, cost.window) == (whole.full / 2, whole.full / 2, 2)
    assert cost.attention(np.array([4.0]))[0] == cost.full * 10 + cost.sliding * 7
    assert cost_of({**TINY, "sliding_window": 2, "use_sliding_window": False}).sliding == 0


def test_known_models_have_the_parameters_they_are_named_for() -> None:
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    cost = cost_of({**llama, "num_attention_heads": 32, "num_key_value_heads": 8})
    assert cost.parameters / 1e9 == pytest.approx(7.5, abs=0.01)  # 8.03 with the embedding
    assert (cost.heads, cost.head_size) == (32, 128)


def test_a_folder_and_a_file_are_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "tiny" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"text_config": TINY}))
    assert read_cost(file) == read_cost(file.parent) == cost_of(TINY, name="tiny")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ("{}", "has no hidden_size or n_embd"),
        (json.dumps({**TINY, "hidden_size": "many"}), "hidden_size is 'many'"),
        (json.dumps({**TINY, "layer_types": ["linear_attention"] * 4}), "layers of type linear_attention"),
        (json.dumps({**TINY, "layer_types": ["full_attention"]}), "layer_types"),
    ],
)
def test_a_config_whose_flops_are_not_known_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=words):
        read_cost(tmp_path)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--model takes a model's config.json"):
        read_cost(tmp_path / "nowhere")
