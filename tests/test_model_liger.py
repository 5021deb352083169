"""Liger's parts are switched on one by one, in this model alone, and taken off again.

liger-kernel runs on GPUs only, so a stand-in with its call signatures computes the same in PyTorch here;
tests/test_models_gpu.py has the real one.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from reads import NothingIsRead
from tiny_models import packed, step, tiny
from torch import Tensor

from padless.kernels.linear_cross_entropy import linear_cross_entropy
from padless.runtime import model_liger
from padless.runtime.errors import ModelError
from padless.runtime.model_liger import NORMS, PARTS
from padless.runtime.models import prepare_model, restore_model
from padless.runtime.targets import Targets, count_targets, remember_targets

calls: list[str] = []


class Norm:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
        assert casting in ("llama", "gemma") and not in_place
        calls.append("rms_norm")
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)


class SiLU:
    @staticmethod
    def apply(gate: Tensor, up: Tensor) -> Tensor:
        calls.append("mlp")
        return torch.nn.functional.silu(gate) * up


class GELU:
    @staticmethod
    def apply(gate: Tensor, up: Tensor) -> Tensor:
        calls.append("mlp")
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


seen: list[int] = []
"""Rows that the head and loss were computed for, of each call."""


def fused(x: Tensor, *given: Any, **options: Any) -> Tensor:
    calls.append("loss")
    seen.append(len(x))
    return linear_cross_entropy(x, *given, **options)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    seen.clear()
    names: dict[str, dict[str, Any]] = {
        "rms_norm": dict(LigerRMSNormFunction=Norm),
        "swiglu": dict(LigerSiLUMulFunction=SiLU),
        "geglu": dict(LigerGELUMulFunction=GELU),
    }
    ops = ModuleType("liger_kernel.ops")
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    for name, content in names.items():
        module = ModuleType(f"liger_kernel.ops.{name}")
        vars(module).update(content)
        setattr(ops, name, module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(model_liger, "find_spec", lambda name: object())
    monkeypatch.setattr(model_liger, "linear_cross_entropy", fused)


@pytest.mark.parametrize("items", [None, 14])
@pytest.mark.parametrize("family", NORMS)
def test_with_all_parts_a_training_step_is_the_same(family: str, items: int | None) -> None:
    batch = packed([5, 1, 9, 3]).model_inputs()
    model = prepare_model(tiny(family), check=True).train()
    expected, gradients = step(model, lambda: model(**batch, num_items_in_batch=items).loss)
    assert not calls
    prepare_model(model, check=True, liger=True)
    loss, found = step(model, lambda: model(**batch, num_items_in_batch=items).loss)
    assert {"rms_norm"} <= set(calls)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_the_head_is_applied_to_tokens_that_are_trained_alone() -> None:
    model, batch = prepare_model(tiny("qwen3"), check=True).train(), packed([9, 12]).model_inputs()
    batch["labels"][0, 3:15] = -100
    expected, gradients = step(model, lambda: model(**batch).loss)
    prepare_model(model, check=True, liger=["loss"])
    loss, found = step(model, lambda: model(**batch).loss)
    # Labels 1, 2 and 15 to 20: the first of a sequence has none.
    assert seen == [8]
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("items", [None, 5])
def test_without_a_trained_token_there_is_no_loss(items: int | None) -> None:
    model, batch = prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train(), packed([3, 4])
    batch["labels"].fill_(-100)
    loss = model(**batch.model_inputs(), num_items_in_batch=items).loss
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("items", [None, 14, torch.tensor(14.0)], ids=str)
def test_a_step_reads_nothing_where_the_number_of_labels_is_known(items: Any) -> None:
    """BR-171. A batch that was copied to a device knows it; here the copy is on the CPU, too."""
    model, batch = prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train(), packed([5, 1, 9, 3])
    batch["labels"][0, 8:12] = -100
    inputs = dict(batch.model_inputs(), num_items_in_batch=items)
    expected, gradients = step(model, lambda: model(**inputs).loss)  # boundaries in host memory are read
    with pytest.raises(AssertionError, match="nonzero"), NothingIsRead():
        model(**inputs)
    remember_targets(batch["labels"], Targets(count_targets(batch["labels"]), None))
    with NothingIsRead():
        loss, found = step(model, lambda: model(**inputs).loss)
    assert seen[-2:] == [10, 10]
    assert torch.equal(loss, expected)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


def test_what_is_known_of_labels_ends_when_they_are_changed_or_others_are_given() -> None:
    """More of them than were counted would be left out in silence."""
    model, batch = prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train(), packed([5, 1, 9, 3])
    ids, labels = batch["input_ids"], batch["labels"]
    trained = labels.clone()
    labels[0, 3:] = -100
    remember_targets(labels, Targets(count_targets(labels), None))
    shifted = torch.nn.functional.pad(trained, (0, 1), value=-100)[..., 1:]
    model(**batch.model_inputs(), shift_labels=shifted)
    model(**dict(batch.model_inputs(), labels=ids))
    labels.copy_(trained)
    model(**batch.model_inputs())
    assert seen == [14, 17, 14]


@pytest.mark.parametrize("captured", [False, True])
def test_labels_that_came_unseen_after_the_count_make_the_loss_infinite(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`labels.data` has no version; a replayed step is given whatever lies in its memory."""
    model, batch = prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train(), packed([5, 1, 9, 3])
    labels = batch["labels"]
    remember_targets(labels, Targets(10, 10))
    monkeypatch.setattr(model_liger, "_is_captured", lambda x: captured)
    places = [1, 2, 3, 4, *range(7, 15), 16, 17]
    for trained, finite in ((8, True), (10, True), (11, False)):
        labels.data.copy_(batch["input_ids"])
        labels.data[0, [0, 5, 6, 15, *places[trained:]]] = -100
        loss, gradients = step(model, lambda: model(**batch.model_inputs()).loss)
        assert bool(loss.isfinite()) is finite
        assert all(bool(gradient.isfinite().all()) for gradient in gradients.values()) is finite


def test_labels_that_are_shifted_already_may_be_fewer_than_were_counted() -> None:
    """The first token's label, which nobody predicts."""
    model, batch = prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train(), packed([5, 9])
    batch["labels"].copy_(batch["input_ids"])[0, 3:7] = -100
    expected = model(**batch.model_inputs()).loss
    remember_targets(batch["labels"], Targets(count_targets(batch["labels"]), None))
    assert torch.equal(model(**batch.model_inputs()).loss, expected)
    assert seen == [9, 10]


def test_a_captured_step_goes_over_the_most_labels_that_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replayed over other labels in the same memory."""
    model, batch = prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train(), packed([5, 1, 9, 3])
    labels = batch["labels"]
    labels[0, 8:12] = -100
    expected = model(**batch.model_inputs()).loss
    monkeypatch.setattr(model_liger, "_is_captured", lambda x: True)
    for most, rows in ((None, 18), (12, 12), (18, 18)):
        remember_targets(labels, Targets(count_targets(labels), most))
        with NothingIsRead():
            loss = model(**batch.model_inputs()).loss
        torch.testing.assert_close(loss, expected)
        assert seen[-1] == rows


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_a_switch(part: str) -> None:
    model = prepare_model(tiny("qwen3"), check=True, liger=[part]).train()
    out = model(**packed([3, 4]).model_inputs())
    assert set(calls) == {part}
    assert (out.logits is None) == (part == "loss")


def test_logits_are_made_where_they_are_asked_for() -> None:
    model, batch = prepare_model(tiny("qwen3"), check=True, liger=["loss"]), packed([3, 4]).model_inputs()
    assert model.eval()(**batch).logits.shape == (1, 7, 96)
    assert model.train()(**dict(batch, labels=None)).logits.shape == (1, 7, 96)
    ids = batch["input_ids"]
    assert model(input_ids=ids, labels=ids).logits.shape == (1, 7, 96)
    assert not calls


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    model, batch = (
        prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train(),
        packed([3, 4]).model_inputs(),
    )
    with pytest.raises(ModelError):
        model(**batch, attention_mask=torch.ones(1, 7))
    assert model.lm_head(torch.zeros(1, 2, 32)).shape == (1, 2, 96)


def test_restored_models_and_copies_stand_on_their_own() -> None:
    model, batch = tiny("qwen3").train(), packed([3, 4]).model_inputs()
    attributes = [sorted(vars(module)) for module in model.modules()]
    prepare_model(model, check=True, liger=True)
    expected = model(**batch).loss
    twin = copy.deepcopy(model)
    restore_model(model)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    with torch.no_grad():
        model.lm_head.weight.zero_()
    calls.clear()
    assert torch.equal(twin(**batch).loss, expected) and set(calls) == set(PARTS)
    restore_model(twin)
    calls.clear()
    torch.testing.assert_close(twin(**batch).loss, expected)
    assert not calls


def test_wrong_names_and_a_missing_liger_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("all", ["rope"], None, 1, [["loss"]]):
        with pytest.raises(ModelError, match="rms_norm, mlp, loss"):
            prepare_model(tiny("qwen3"), liger=wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(model_liger, "find_spec", lambda name: None)
    prepare_model(tiny("qwen3"), liger="auto")
    for asked in (True, ["loss", "mlp"]):
        with pytest.raises(ModelError, match=r"pip install 'padless\[liger\]'"):
            prepare_model(tiny("qwen3"), liger=asked)
    model = prepare_model(tiny("qwen3"), check=True, liger=["loss"]).train()  # which is not Liger's
    assert model(**packed([3, 4]).model_inputs()).logits is None


def lora(model: Any, **options: Any) -> Any:
    """With adapters that change something from the start."""
    peft = pytest.importorskip("peft")
    options = dict(r=2, target_modules=["q_proj"]) | options
    return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_under_lora_a_step_with_the_fused_loss_is_the_same(task: str | None) -> None:
    """PEFT's wrappers answer in the model's name: the loss has to be set where the head is."""
    model, batch = lora(tiny("qwen3"), task_type=task).train(), packed([5, 1, 9, 3]).model_inputs()
    attributes = [sorted(vars(module)) for module in model.modules()]
    prepare_model(model, check=True)
    expected, gradients = step(model, lambda: model(**batch).loss)
    prepare_model(model, check=True, liger=["loss"])
    loss, found = step(model, lambda: model(**batch).loss)
    assert set(calls) == {"loss"}
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert found.keys() == gradients.keys() and gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    restore_model(model)
    assert [sorted(vars(module)) for module in model.modules()] == attributes


@pytest.mark.parametrize("prepared", ["before", "after"])
@pytest.mark.parametrize(
    "options", [dict(target_modules=["q_proj", "lm_head"]), dict(modules_to_save=["lm_head"])]
)
def test_a_head_that_is_trained_by_an_adapter_keeps_its_own_loss(
    options: dict[str, Any], prepared: str
) -> None:
    """Its weight is not all that such a head computes with, whenever the adapter came."""
    batch, model = packed([5, 1, 9, 3]).model_inputs(), tiny("qwen3")
    if prepared == "before":
        prepare_model(model, check=True, liger=["loss"])
    model = lora(model, **options).train()
    if prepared == "after":
        prepare_model(model, check=True, liger=["loss"])
    loss, found = step(model, lambda: model(**batch).loss)
    prepare_model(model, check=True, liger=False)
    expected, gradients = step(model, lambda: model(**batch).loss)
    assert not calls and torch.equal(loss, expected)
    assert any("lm_head" in name for name in gradients) and found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name


def test_a_head_whose_adapter_was_merged_is_fused_again() -> None:
    model, batch = prepare_model(tiny("qwen3"), liger=["loss"]), packed([3, 4]).model_inputs()
    merged = lora(model, target_modules=["lm_head"]).merge_and_unload().train()
    assert merged(**batch).logits is None and calls == ["loss"]
    assert torch.isfinite(merged(**batch).loss)


def test_calls_for_some_logits_or_a_tuple_are_the_models_own() -> None:
    model, batch = prepare_model(tiny("qwen3"), liger=["loss"]).train(), packed([3, 4]).model_inputs()
    last = dict(batch, logits_to_keep=2, shift_labels=batch["labels"][:, -2:])
    assert model(**last).logits.shape == (1, 2, 96)
    loss, logits = model(**batch, return_dict=False)[:2]
    assert loss.ndim == 0 and logits.shape == (1, 7, 96)
    assert not calls
