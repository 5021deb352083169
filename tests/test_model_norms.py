"""Norms of q and k are computed with the rotation on the packed path, and nowhere else."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import alone, packed, step, tiny

from padless.runtime.model_families import find_decoder
from padless.runtime.models import prepare_model, restore_model

LENGTHS = [5, 1, 9, 3]
CLOSE = dict(atol=1e-5, rtol=1e-5)
normed = pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3"])


def norms_of(model: Any) -> list[Any]:
    return [norm for layer in find_decoder(model).attention for norm in (layer.q_norm, layer.k_norm)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The norm modules whose class's forward ran."""
    ran: list[Any] = []
    for family in ("qwen3", "qwen3_moe", "gemma3"):
        kind = type(norms_of(tiny(family))[0])

        @functools.wraps(kind.forward)
        def forward(self: Any, x: Any, own: Any = kind.forward) -> Any:
            ran.append(self)
            return own(self, x)

        monkeypatch.setattr(kind, "forward", forward)
    yield ran


@normed
def test_a_packed_call_norms_in_the_rotation_and_others_in_the_norms(family: str, calls: list[Any]) -> None:
    model, batch = prepare_model(tiny(family), check=False), packed(LENGTHS).model_inputs()
    norms = norms_of(model)
    calls.clear()
    model(**batch)
    assert calls and not any(called is norm for called in calls for norm in norms)
    calls.clear()
    model(input_ids=batch["input_ids"], use_cache=False)
    assert all(sum(called is norm for called in calls) == 1 for norm in norms)
    restore_model(model)
    calls.clear()
    model(input_ids=batch["input_ids"], use_cache=False)
    assert all(sum(called is norm for called in calls) == 1 for norm in norms)


@normed
@pytest.mark.parametrize("checkpointing", [False, True])
def test_norms_in_the_rotation_compute_what_the_modules_do(family: str, checkpointing: bool) -> None:
    batch = packed(LENGTHS).model_inputs()

    def run(rope: bool) -> Any:
        model = prepare_model(tiny(family), check=True, rope=rope).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return step(model, lambda: model(**batch).loss)

    loss, found = run(rope=True)
    expected, gradients = run(rope=False)
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert any("q_norm" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE, msg=name)


@normed
def test_a_norm_that_somebody_listens_to_is_run_where_it_is(family: str) -> None:
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    expected = model(**batch).logits
    seen: list[Any] = []
    first = norms_of(model)[0]
    first.register_forward_hook(lambda norm, given, out: seen.append(out.shape))
    torch.testing.assert_close(model(**batch).logits, expected, **CLOSE)
    assert len(seen) == 1


@normed
def test_a_norm_whose_forward_somebody_replaced_is_run_as_replaced(family: str) -> None:
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    expected = model(**batch).logits
    norm = norms_of(model)[1]
    norm.forward = lambda x: torch.zeros_like(x)
    assert float((model(**batch).logits - expected).detach().abs().max()) > 1e-3


@normed
def test_a_norm_that_was_replaced_by_another_module_is_run(family: str) -> None:
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    expected = model(**batch).logits
    layer = find_decoder(model).attention[0]
    layer.q_norm = torch.nn.Identity()
    assert float((model(**batch).logits - expected).detach().abs().max()) > 1e-3


@normed
def test_a_norm_of_another_class_computes_what_that_does(family: str) -> None:
    """torch's own has no 1 + weight, and by default no eps."""
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    for layer in find_decoder(model).attention:
        layer.q_norm, layer.k_norm = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8, eps=1e-6)
    found = model(**batch).logits
    want = [restore_model(model)(input_ids=one["input_ids"]).logits for one in alone(packed(LENGTHS))]
    torch.testing.assert_close(found, torch.cat(want, 1), **CLOSE)


@normed
def test_a_norm_whose_forward_is_wrapped_is_run_wrapped(family: str) -> None:
    """As by accelerate's hooks, which bear the name of what they wrap, here Liger's, set by us."""
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    expected, seen = model(**batch).logits, []
    norm = norms_of(model)[0]
    own = norm.forward

    def forward(x: Any) -> Any:
        seen.append(x.shape)
        return own(x)

    forward.__module__ = "padless.runtime.model_liger"
    norm.forward = functools.partial(forward)
    functools.update_wrapper(norm.forward, forward)
    torch.testing.assert_close(model(**batch).logits, expected, **CLOSE)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("family", "weights", "norms", "autocast"),
    [
        ("gemma3", torch.float32, torch.bfloat16, False),
        ("qwen3", torch.float32, torch.bfloat16, False),
        ("gemma3", torch.float16, torch.bfloat16, False),
        ("gemma3", torch.float16, torch.float16, True),
        ("qwen3", torch.float16, torch.float16, True),
    ],
)
def test_norms_of_any_type_are_computed(
    family: str, weights: torch.dtype, norms: torch.dtype, autocast: bool
) -> None:
    model = prepare_model(tiny(family).to(weights), check=False)
    for norm in norms_of(model):
        norm.to(norms)
    batch = packed(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, gradients = step(model, lambda: model(**batch.model_inputs()).loss)
        found = model(**batch.model_inputs()).logits.float()
        want = [restore_model(model)(input_ids=one["input_ids"]).logits for one in alone(batch)]
    expected = torch.cat(want, 1).float()
    close = 1e-5 if weights is torch.float32 else 3e-2
    assert float((found - expected).abs().max() / expected.abs().max()) < close
    assert sum("q_norm" in name and bool(gradient.any()) for name, gradient in gradients.items()) == 2


@normed
def test_a_copy_uses_its_own_norms(family: str) -> None:
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    expected = model(**batch).logits
    other = copy.deepcopy(model)
    for norm in norms_of(model):
        torch.nn.init.zeros_(norm.weight)
    torch.testing.assert_close(other(**batch).logits, expected, **CLOSE)
    assert float((model(**batch).logits - expected).detach().abs().max()) > 1e-3


@normed
def test_frozen_norms_get_no_gradients_and_the_others_theirs(family: str) -> None:
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    _, gradients = step(model, lambda: model(**batch).loss)
    for norm in norms_of(model):
        norm.weight.requires_grad_(False)
    _, found = step(model, lambda: model(**batch).loss)
    assert set(gradients) - set(found) == {name for name in gradients if "q_norm" in name or "k_norm" in name}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], **CLOSE, msg=name)
