"""Mamba-2, gated-delta and short-conv layers are told the boundaries of a packed batch, or refused.

On a CPU no kernel knows boundaries: transformers' own code for it raises, which is a refusal with the reason.
Here that code is given what it lacks, by running it once for each sequence that it was told of. So what is
tested is that each kind of layer is told, rightly, and that packed then equals unpacked, with gradients.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import alone, packed, step
from torch import Tensor

from padless.runtime.errors import IsolationError, ModelError
from padless.runtime.models import prepare_model
from padless.runtime.varlen_batch import VarlenBatch

LENGTHS = [5, 1, 9, 3]
CLOSE = dict(atol=1e-5, rtol=1e-5)
SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
MAMBA: dict[str, Any] = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2
)
DELTA: dict[str, Any] = dict(
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16
)

CONV, SCAN, RULE = "causal_conv1d_fn", "mamba2_chunk_scan", "torch_chunk_gated_delta_rule"
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "short-conv": ("Lfm2", dict(layer_types=["conv", "full_attention"]), (CONV,)),
    "mamba-2": ("Bamba", dict(MAMBA, attn_layer_indices=[1]), (CONV, SCAN)),
    "mamba-2 beside attention": ("FalconH1", dict(MAMBA, mamba_d_ssm=64, head_dim=8), (CONV, SCAN)),
    "gated delta": ("Qwen3Next", DELTA | EXPERTS, (CONV, RULE)),
}
"""Class, its settings, and the functions of its module that tokens meet in."""
each_kind = pytest.mark.parametrize("kind", KINDS)


def hybrid(kind: str) -> Any:
    name, more, _ = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES, **more)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():  # states that matter: as they are made, they hardly do
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.2)
        return model.eval()


class Kernels:
    """What the functions were told, and which of them look at it."""

    def __init__(
        self, kind: str, model: Any, monkeypatch: pytest.MonkeyPatch, deaf: str | None = None
    ) -> None:
        self.told: dict[str, list[Any]] = {}
        module = sys.modules[type(model).__module__]
        for name in KINDS[kind][2]:
            fallback = inspect.unwrap(getattr(module, name))
            monkeypatch.setattr(module, name, self._kernel(name, fallback, deaf=name == deaf))

    def _kernel(self, name: str, fallback: Callable[..., Any], *, deaf: bool) -> Callable[..., Any]:
        time = 2 if name == CONV else 1
        known = inspect.signature(fallback).parameters

        def kernel(*given: Any, **options: Any) -> Any:
            told = options.get("cu_seqlens") if name == RULE else options.get("seq_idx")
            self.told.setdefault(name, []).append(told)
            bounds = bounds_of(told, given[0].shape[time]) if not deaf else [0, given[0].shape[time]]
            arguments = inspect.signature(fallback).bind(
                *given, **{k: v for k, v in options.items() if k in known}
            )
            length = given[0].shape[time]

            def cut(value: Any, start: int, end: int) -> Any:
                by_token = isinstance(value, Tensor) and value.ndim > time and value.shape[time] == length
                return value.narrow(time, start, end - start) if by_token else value

            found = [
                fallback(**{k: cut(v, a, b) for k, v in flat(arguments.arguments).items()})
                for a, b in zip(bounds, bounds[1:], strict=False)
            ]
            if isinstance(found[0], tuple):
                return torch.cat([one[0] for one in found], time), None
            return torch.cat(found, time)

        return kernel


def flat(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in arguments.items() if k != "kwargs"}


def bounds_of(told: Tensor | None, tokens: int) -> list[int]:
    """Who is told nothing takes the row for one sequence."""
    if told is None:
        return [0, tokens]
    if told.ndim == 1:
        return [int(bound) for bound in told]
    assert told.dtype == torch.int32 and told.shape == (1, tokens)
    return [0, *(told[0].diff().nonzero().flatten() + 1).tolist(), tokens]


def train(model: Any, batch: VarlenBatch, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    targets = batch.num_targets
    return step(model, lambda: model(**inputs, num_items_in_batch=targets).loss)


@each_kind
@pytest.mark.parametrize("without", [None, "seq_idx"], ids=["padless's batch", "a collator without seq_idx"])
def test_packed_equals_unpacked_where_the_kernels_know_boundaries(
    kind: str, without: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-006, BR-007: boundaries reach convolution and recurrence, also of a batch with one form of them."""
    model, batch = hybrid(kind), packed(LENGTHS)
    targets = batch.num_targets
    loss, gradients = step(
        model,
        lambda: sum(model(**one, num_items_in_batch=targets, use_cache=False).loss for one in alone(batch)),
    )
    kernels = Kernels(kind, model, monkeypatch)
    prepare_model(model, check=True)
    kernels.told.clear()
    inputs = {name: value for name, value in batch.model_inputs().items() if name != without}
    packed_loss, packed_gradients = train(model, batch, inputs)
    for name, told in kernels.told.items():
        assert told and all(one is not None for one in told), name
    torch.testing.assert_close(packed_loss, loss, **CLOSE)
    assert packed_gradients.keys() == gradients.keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, **CLOSE, msg=name)


@pytest.mark.parametrize(("kind", "deaf"), [(kind, name) for kind in KINDS for name in KINDS[kind][2]])
def test_a_kernel_that_does_not_listen_is_found(
    kind: str, deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-006: attention is apart, and a state or a convolution runs on from one sequence into the next."""
    model = hybrid(kind)
    Kernels(kind, model, monkeypatch, deaf=deaf)
    with pytest.raises(IsolationError, match=r"in layers\.0\.\w+ \(\w+\) a token of sequence"):
        prepare_model(model, check=True)


@each_kind
def test_without_kernels_the_model_is_refused_with_what_is_missing(kind: str) -> None:
    """BR-006, BR-007: without kernels that know boundaries a hybrid model is not trained packed."""
    for check in (True, "auto"):
        model = hybrid(kind)
        with pytest.raises(
            IsolationError, match=r"can't keep packed sequences apart without `[\w-]+`\. Install"
        ):
            prepare_model(model, check=check)(**packed(LENGTHS).model_inputs())
    with pytest.raises(ModelError, match="check=False is refused"):
        prepare_model(hybrid(kind), check=False)


@each_kind
def test_calls_without_boundaries_are_what_they_were(kind: str) -> None:
    ids = torch.arange(3, 10)[None]
    expected = hybrid(kind)(input_ids=ids).logits
    assert torch.equal(prepare_model(hybrid(kind))(input_ids=ids).logits, expected)
