"""Prepared models on a real device: every backend at hand in bf16, no waiting inside a step, Liger."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny_models import alone, packed, step, tiny  # noqa: E402
from torch import Tensor  # noqa: E402

from padless.runtime.attention import BACKENDS  # noqa: E402
from padless.runtime.errors import AttentionError, IsolationError  # noqa: E402
from padless.runtime.models import check_isolation, prepare_model  # noqa: E402
from padless.runtime.static import pad_batch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64)
LENGTHS = [300, 1, 77, 130, 64, 5]
FAMILIES = ["llama", "qwen3", "gemma3", "glm", "cohere", "olmo2", "gpt_neox", "phi3"]


def on_device(family: str, dtype: Any = None, **changes: Any) -> Any:
    sizes = {**SIZES, **changes, "max_position_embeddings": 1024}
    if family in ("gpt_neox", "phi3"):
        sizes["head_dim"] = None
    if family == "gemma3":
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    model = tiny(family, **sizes)
    for parameter in model.parameters():
        parameter.data.mul_(0.3 if parameter.ndim > 1 else 1.0)
    return model.to("cuda", torch.bfloat16 if dtype is None else dtype)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def as_pack(one: dict[str, Tensor]) -> Any:
    """A single sequence as a batch with boundaries."""
    pack = packed([one["input_ids"].shape[1]])
    batch = pack.to("cuda")
    batch["input_ids"].copy_(one["input_ids"])
    batch["labels"].copy_(one["labels"])
    return batch


def batch_on_device(lengths: list[int] = LENGTHS, seed: int = 0) -> Any:
    return packed(lengths, seed).to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_packed_is_as_near_to_float64_as_unpacked_in_bf16(family: str, backend: str) -> None:
    """Gradients, against the same weights in float64: no more error than sequences alone have by it."""
    batch = batch_on_device()

    def apart(model: Any, ones: list[Any]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            losses = [model(**one, num_items_in_batch=batch.num_targets).loss for one in ones]
            return torch.stack(losses).sum()

        return run

    trained = [one for one in alone(batch) if one["input_ids"].shape[1] > 1]
    exact = on_device(family, torch.float64)
    model = on_device(family)
    exact.load_state_dict(model.state_dict())
    _, wanted = step(exact, apart(exact, [one | {"use_cache": False} for one in trained]))
    try:
        prepare_model(model, attention=backend, liger=False)
        singles = [as_pack(one).model_inputs() for one in trained]
        _, unpacked = step(model, apart(model, singles))
        _, found = step(model, apart(model, [batch.model_inputs()]))
    except (AttentionError, IsolationError) as reason:
        if isinstance(reason, IsolationError) and "cannot do this" not in str(reason):
            raise
        pytest.skip(str(reason)[:150])
    for name, gradient in wanted.items():
        allowed = 2 * relative(unpacked[name], gradient) + 5e-3
        assert relative(found[name], gradient) <= allowed, (name, relative(found[name], gradient), allowed)


LIGER = ("rms_norm", "mlp", "loss") if importlib.util.find_spec("liger_kernel") else ("loss",)
"""What can be switched on here: the loss is our own."""


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "glm", "cohere"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("liger", [False, LIGER], ids=["plain", "liger"])
def test_a_packed_training_step_never_waits_for_the_device(
    family: str, checkpointing: bool, liger: Any
) -> None:
    """BR-171: nothing is read back in forward, backward or optimizer, whatever the boundaries."""
    model = prepare_model(on_device(family), liger=liger).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train(batch: Any) -> None:
        loss = model(**batch.model_inputs(), num_items_in_batch=batch.num_targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = [
        batch_on_device([300, 1, 77], 1),
        batch_on_device([128, 128, 122], 2),
        batch_on_device(LENGTHS, 3),
    ]
    for batch in batches:
        train(batch)
    torch.cuda.synchronize()
    fresh = [batch_on_device([17, 300, 61], 4), batch_on_device([378], 5)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in fresh:
            train(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_model_on_a_device_is_checked_when_it_is_prepared() -> None:
    """With 16 bits and 24 layers rounding stays below what the check calls a leak, and a leak above."""
    model = on_device("qwen3", num_hidden_layers=24)
    runs: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    prepare_model(model, liger=False)
    assert len(runs) > 1
    handle.remove()
    batch = packed([9, 5, 12]).to("cuda")
    mask = torch.ones_like(batch["input_ids"])
    with pytest.raises(IsolationError, match=r"layers\.0"):
        check_isolation(
            on_device("qwen3", num_hidden_layers=24),
            {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": mask},
        )


@pytest.mark.parametrize("family", ["llama", "qwen3", "cohere"])
def test_compiled_steps_have_no_graph_break(family: str) -> None:
    """BR-170."""
    model, batch = prepare_model(on_device(family, torch.float32), liger=False), batch_on_device()
    expected, gradients = step(model, lambda: model(**batch.model_inputs()).loss)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    loss, found = step(model, lambda: compiled(**batch.model_inputs()).loss)
    assert relative(loss, expected) < 1e-4
    for name, gradient in gradients.items():
        assert relative(found[name], gradient) < 5e-3, name


SHAPE: dict[str, int] = {"tokens": 640, "sequences": 9, "max_length": 512, "targets": 600}


def static(lengths: list[int], seed: int, masked: int) -> Any:
    """A batch of SHAPE, whose first tokens are not trained."""
    batch = packed(lengths, seed)
    batch["labels"][0, :masked] = -100
    batch["num_targets"] = int((batch["labels"] != -100).sum())
    return pad_batch(batch, **SHAPE)


@pytest.mark.parametrize("attention", ["flash", "short"])
def test_a_captured_step_is_right_for_other_boundaries_and_labels(attention: str) -> None:
    """Nothing that a batch's values decide is kept in the graph."""
    model = prepare_model(on_device("qwen3"), attention=attention, liger=LIGER).train()
    batches = [static([300, 1, 77, 130, 64, 5], 1, 9), static([20] * 7, 2, 0), static([500, 90], 3, 300)]

    def run(inputs: dict[str, Any], items: Any) -> Tensor:
        loss: Tensor = model(**inputs, num_items_in_batch=items).loss
        return loss

    wanted = []
    for batch in batches:
        inputs = batch.to("cuda").model_inputs()
        wanted.append(step(model, lambda x=inputs, n=batch.num_targets: run(x, n)))
    held = batches[0].to("cuda").model_inputs()
    items = torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(held, items).backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run(held, items)
        loss.backward()
    for at in (1, 2, 0, 1):
        for name, value in batches[at].model_inputs().items():
            if isinstance(value, Tensor):
                held[name].copy_(value)
        items.fill_(batches[at].num_targets)
        graph.replay()
        expected, gradients = wanted[at]
        assert relative(loss, expected) < 1e-3, at
        for name, parameter in model.named_parameters():
            assert relative(parameter.grad, gradients[name]) < 1e-2, (at, name)


def test_graphs_over_the_same_batch_list_their_own_tiles() -> None:
    """A list that another graph makes is there only once that one was replayed."""
    model = prepare_model(on_device("qwen3"), attention="short", liger=False).eval()
    batches = [static([300, 1, 77, 130, 64, 5], 1, 0), static([20] * 7, 2, 0)]
    held = batches[0].to("cuda").model_inputs() | {"labels": None}
    graphs, outs = [], []
    with torch.no_grad():
        wanted = model(**(batches[1].to("cuda").model_inputs() | {"labels": None})).logits
        model(**held)
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(model(**held).logits)
            graphs.append(graph)
    for name, value in batches[1].model_inputs().items():
        if isinstance(value, Tensor) and name != "labels":
            held[name].copy_(value)
    graphs[1].replay()
    assert relative(outs[1], wanted) < 1e-3


def test_the_readmes_captured_training_runs_and_learns(tmp_path: Any) -> None:
    from packed import Folder, Seq, write_folder

    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "torch.cuda.graph(" in b)
    packs = [[Seq([length] * length) for length in (9, 2, 5, 3)]] * 20
    write_folder(tmp_path / "packed", Folder(packs=packs, max_length=64))
    block = block.replace('"packed"', repr(str(tmp_path / "packed"))).replace("lr=1e-4", "lr=1e-2")
    losses: list[float] = []
    names = {"model": on_device("qwen3").train(), "losses": losses}
    exec(block + "    losses.append(float(loss))\n", names)
    assert len(losses) >= len(packs) - 1 and losses[-1] < losses[0] / 9, losses


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_ligers_kernels_compute_the_same_step(family: str) -> None:
    model, batch = prepare_model(on_device(family, torch.float32), liger=False).train(), batch_on_device()
    inputs = dict(batch.model_inputs(), num_items_in_batch=batch.num_targets)
    expected, gradients = step(model, lambda: model(**inputs).loss)
    prepare_model(model, liger=True)
    loss, found = step(model, lambda: model(**inputs).loss)
    assert relative(loss, expected) < 1e-4
    for name, gradient in gradients.items():
        assert relative(found[name], gradient) < 5e-3, name
