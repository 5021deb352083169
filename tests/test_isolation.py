"""A model in which sequences meet is found out by running it, and the layer is named."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest
import torch
from ranks import shard_rank
from tiny_models import packed, tiny
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from padless.runtime.errors import IsolationError, ModelError
from padless.runtime.models import check_isolation, prepare_model

LENGTHS = [5, 1, 9, 3]


def by_positions(**more: Any) -> dict[str, Any]:
    """A packed batch as collators without boundaries make it."""
    batch = packed(LENGTHS)
    return {
        "input_ids": batch["input_ids"],
        "position_ids": batch["position_ids"],
        "use_cache": False,
        **more,
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_ones_is_found_to_mix_sequences(implementation: str) -> None:
    """BR-002: transformers looks for boundaries in positions only where there is no mask."""
    model = tiny("llama", attn_implementation=implementation)
    check_isolation(model, by_positions())
    with pytest.raises(IsolationError, match=r"layers\.0\.self_attn \(LlamaAttention\) a token of sequence"):
        check_isolation(model, by_positions(attention_mask=torch.ones(1, 18, dtype=torch.long)))


def test_a_cache_left_on_is_found_to_mix_sequences() -> None:
    with pytest.raises(IsolationError, match="no cache"):
        check_isolation(tiny("llama"), by_positions(use_cache=True))


def test_rows_with_positions_alone_are_refused_under_flash_attention() -> None:
    """It takes positions for boundaries in a batch of one row only."""
    model = tiny("llama")
    rows = {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
    }
    check_isolation(model, rows | {"use_cache": False})
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(IsolationError, match="in a batch of 2 rows"):
        check_isolation(model, rows)


def test_boundaries_are_never_guessed_from_ids() -> None:
    with pytest.raises(ModelError, match="cu_seq_lens_q or position_ids"):
        check_isolation(tiny("llama"), {"input_ids": torch.ones(1, 6, dtype=torch.long)})


class LeakyAttention(nn.Module):
    """Adds to each token a share of the one before it, wherever that is from."""

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return self.inner(hidden_states=hidden_states + self.share * before, **kwargs)


@pytest.mark.parametrize("share", [0.5, 1e-3])
def test_a_short_convolution_that_leaks_is_named_by_its_layer(share: float) -> None:
    """BR-006: attention is isolated, and what stands before it is not."""
    model = tiny("llama", num_hidden_layers=3)
    model.model.layers[1].self_attn = LeakyAttention(model.model.layers[1].self_attn, share)
    with pytest.raises(IsolationError, match=r"layers\.1\.self_attn \(LeakyAttention\)"):
        prepare_model(model, check=True)
    assert not model.model._forward_pre_hooks, "a refused model is as it was"


def test_a_window_of_another_size_is_found() -> None:
    """One of the check's sequences is longer than the window."""
    model = tiny("olmo3")
    prepare_model(model, check=True)
    model.model.layers[0].self_attn.sliding_window = 3
    with pytest.raises(IsolationError, match=r"layers\.0 .* from what it is alone"):
        check_isolation(model)


def rounds_coarsely(model: Any) -> Any:
    """Each layer's output off by 1 %, and otherwise with each number of tokens, as kernels round."""

    def off(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        draw = torch.Generator().manual_seed(hidden.shape[1])
        hidden.mul_(1 + 0.01 * torch.randn(hidden.shape, generator=draw).to(hidden.dtype))
        return output

    for layer in model.model.layers:
        layer.register_forward_hook(off)
    return model


def test_rounding_that_adds_up_over_many_layers_is_no_leak() -> None:
    """In 16 bits; the last layers are off by more than the first may be."""
    prepare_model(rounds_coarsely(tiny("qwen3", num_hidden_layers=24).bfloat16()), check=True)
    with pytest.raises(IsolationError, match=r"from what it is alone"):
        prepare_model(rounds_coarsely(tiny("qwen3", num_hidden_layers=24)), check=True)


def test_a_lost_window_is_found_among_rounding() -> None:
    model = rounds_coarsely(
        tiny("qwen2", num_hidden_layers=8, layer_types=["sliding_attention"] * 8).bfloat16()
    )
    prepare_model(model, check=True)
    model.model.layers[5].self_attn.sliding_window = 1
    with pytest.raises(IsolationError, match=r"layers\.5 .* from what it is alone"):
        check_isolation(model)


def test_the_check_leaves_modes_gradients_and_random_states_alone() -> None:
    model = tiny("llama")
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    prepare_model(model, check=True)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_in_host_memory_are_checked_at_the_first_packed_batch_and_once() -> None:
    model = tiny("llama")
    runs: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    prepare_model(model)
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert len(runs) == 1
    batch = packed(LENGTHS).model_inputs()
    model(**batch)
    assert len(runs) == 1 + 3 + 3 + 1
    runs.clear()
    model(**batch)
    assert len(runs) == 1


def test_a_leak_found_at_the_first_packed_batch_is_found_at_the_next_one_too() -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn = LeakyAttention(model.model.layers[1].self_attn, 0.5)
    prepare_model(model)
    for _ in range(2):
        with pytest.raises(IsolationError, match=r"layers\.1"):
            model(**packed(LENGTHS).model_inputs())


def test_a_compiled_model_is_checked_too_and_has_no_graph_break_afterwards() -> None:
    model, batch = prepare_model(tiny("llama")), packed(LENGTHS).model_inputs()
    runs: list[int] = []
    handle = model.model.norm.register_forward_hook(lambda *_: runs.append(1))
    expected = prepare_model(tiny("llama"), check=True)(**batch).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**batch).logits, expected)
    assert len(runs) > 3
    handle.remove()
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(model, backend="eager", fullgraph=True)(**batch).logits, expected
    )


def test_layers_are_not_compiled_for_the_check() -> None:
    """Its sequences are of shapes that do not come again; torch gives a function up after eight."""
    model, batch = prepare_model(tiny("llama")), packed(LENGTHS).model_inputs()
    torch._dynamo.reset()
    programs = CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=programs, fullgraph=True)
    expected = prepare_model(tiny("llama"), check=True)(**batch).logits
    torch.testing.assert_close(model(**batch).logits, expected)
    assert programs.frame_count == 1


def test_no_check_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="padless"):
        prepare_model(tiny("llama"), check=False)
    assert "LlamaForCausalLM is not checked" in caplog.text


def test_sharded_models_are_checked_by_all_ranks_at_their_first_packed_batch() -> None:
    """FSDP2: prepared before sharding and after; ranks whose batches differ do not wait for each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(shard_rank, args=(port,), nprocs=2)
