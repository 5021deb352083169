"""Head and loss in one, in chunks: against PyTorch's own, in each type, by the kernel and without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines import DEVICE, ENGINES, use  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import cross_entropy, linear  # noqa: E402

from padless.kernels import linear_cross_entropy as module  # noqa: E402
from padless.kernels.linear_cross_entropy import linear_cross_entropy, rows_of_a_chunk  # noqa: E402

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of a norm; losses are float32 throughout."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What computes a chunk: PyTorch on the CPU, the kernel on a device or in Triton's interpreter."""
    use(request.param, monkeypatch)
    monkeypatch.setattr(module, "LOGITS", 4 * 64 * 50)  # chunks of 64 rows
    yield request.param


def inputs(
    engine: str, rows: int = 150, vocabulary: int = 50, dtype: Any = torch.float32, bias: bool = False
) -> tuple[list[Tensor | None], Tensor]:
    """x, weight and bias, which want gradients, and targets, of which every third is left out."""
    device = DEVICE if engine == "kernel" else "cpu"
    torch.manual_seed(0)
    shapes = [(rows, 16), (vocabulary, 16), (vocabulary,)]
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes[: 2 + bias]]
    targets = torch.randint(vocabulary, (rows,)).masked_fill(torch.arange(rows) % 3 == 1, -100).to(device)
    return [*leaves, *[None] * (not bias)], targets


def exactly(leaves: list[Tensor | None], targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients, in float64."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    x, weight, bias = wide
    loss = cross_entropy(linear(x, weight, bias), targets, reduction="sum")
    return loss.detach(), list(torch.autograd.grad(loss, [x for x in wide if x is not None]))


def close(found: Tensor | None, wanted: Tensor, tolerance: float) -> bool:
    assert found is not None and found.shape == wanted.shape
    return bool((found.double() - wanted).norm() <= tolerance * wanted.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_loss_and_gradients_are_those_of_all_logits_at_once(engine: str, dtype: Any, bias: bool) -> None:
    leaves, targets = inputs(engine, dtype=dtype, bias=bias)
    wanted, gradients = exactly(leaves, targets)
    x, weight, shift = leaves
    loss = linear_cross_entropy(x, weight, targets, shift)
    assert loss.dtype == torch.float32 and close(loss, wanted, TOLERANCE[dtype])
    (loss / 7).backward()
    for leaf, gradient in zip([leaf for leaf in leaves if leaf is not None], gradients, strict=True):
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        assert close(leaf.grad, gradient / 7, TOLERANCE[dtype])


def test_what_a_loss_counts_reaches_gradients_in_full_precision(engine: str) -> None:
    """1 / 300 in bfloat16 is off by a thousandth, for every gradient of the model alike."""
    (x, weight, _), targets = inputs(engine, dtype=torch.float16)
    whole, part = (
        torch.autograd.grad(linear_cross_entropy(x, weight, targets) * factor, [x, weight])
        for factor in (1, torch.tensor(1 / 300, device=x.device))
    )
    for found, wanted in zip(part, whole, strict=True):
        assert torch.equal(found, (wanted.float() / 300).to(found.dtype))


@pytest.mark.parametrize("left", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(engine: str, left: str) -> None:
    leaves, targets = inputs(engine)
    _, gradients = exactly(leaves, targets)
    at = ["x", "weight"].index(left)
    leaves[1 - at].requires_grad_(False)  # type: ignore[union-attr]
    linear_cross_entropy(leaves[0], leaves[1], targets).backward()
    assert leaves[1 - at].grad is None  # type: ignore[union-attr]
    assert close(leaves[at].grad, gradients[at], 1e-5)  # type: ignore[union-attr]


def test_without_gradients_logits_are_left_as_they_are_and_the_loss_is_the_same(engine: str) -> None:
    (x, weight, _), targets = inputs(engine)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets)
    assert not loss.requires_grad and torch.equal(loss, linear_cross_entropy(x, weight, targets))


def test_rows_without_a_target_count_for_nothing(engine: str) -> None:
    """Whatever stands there."""
    (x, weight, _), targets = inputs(engine)
    with torch.no_grad():
        x[targets == -100] = torch.inf
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward()
    assert loss.isfinite() and (x.grad[targets == -100] == 0).all() and x.grad.isfinite().all()


@pytest.mark.parametrize("rows", [0, 5])
def test_no_targets_at_all_are_no_loss(engine: str, rows: int) -> None:
    (x, weight, _), targets = inputs(engine, rows=rows)
    loss = linear_cross_entropy(x, weight, targets.fill_(-100))
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not weight.grad.any()


def test_a_target_beyond_the_vocabulary_is_no_small_loss(engine: str) -> None:
    (x, weight, _), targets = inputs(engine)
    targets[4] = 50
    if engine == "kernel":
        assert linear_cross_entropy(x, weight, targets).isnan()
    else:
        with pytest.raises(RuntimeError, match="out of bounds"):
            linear_cross_entropy(x, weight, targets)


def test_autocast_says_what_is_computed_in(engine: str) -> None:
    (x, weight, _), targets = inputs(engine)
    device = x.device.type
    with torch.autocast(device, dtype=torch.bfloat16):
        linear_cross_entropy(x, weight, targets).backward()
    found = [x.grad, weight.grad]
    halves = [leaf.detach().bfloat16().requires_grad_() for leaf in (x, weight)]
    linear_cross_entropy(*halves, targets).backward()
    assert torch.equal(found[0], halves[0].grad.float())
    assert found[1].dtype == torch.float32 and close(found[1], halves[1].grad.double(), 1e-2)


def test_autocast_leaves_float64_as_it_is(engine: str) -> None:
    """As it does for a linear layer."""
    (x, weight, _), targets = inputs(engine, dtype=torch.float64)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets)
    assert torch.equal(loss, linear_cross_entropy(x, weight, targets))


def test_second_derivatives_are_refused(engine: str) -> None:
    """They would come out as zero: what a loss gets from behind it is trained by nobody."""
    (x, weight, _), targets = inputs(engine)
    loss = linear_cross_entropy(x, weight, targets)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, [x], create_graph=True)


def test_a_second_way_back_is_refused(engine: str) -> None:
    """Its gradients were multiplied where they lie."""
    (x, weight, _), targets = inputs(engine)
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("rows", [1, 64, 1_000, 8_213, 16_384, 100_000])
@pytest.mark.parametrize("vocabulary", [96, 32_000, 151_936, 262_144])
def test_chunks_are_even_and_within_their_memory(rows: int, vocabulary: int) -> None:
    chunk = rows_of_a_chunk(rows, vocabulary, 2)
    assert chunk * vocabulary * 2 <= module.LOGITS
    chunks = -(-rows // chunk)
    assert chunk == rows or (chunk % 64 == 0 and (chunk - 64) * chunks < rows)
    # The next larger one would not do with fewer, or not fit.
    assert chunks == 1 or -(-rows // (chunks - 1)) * vocabulary * 2 > module.LOGITS - 64 * vocabulary * 2


def test_shapes_that_do_not_meet_are_refused() -> None:
    x, weight, targets = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    for wrong in (
        (x[:, :2], weight, targets),
        (x, weight, targets[:2]),
        (x, weight, targets, x[0]),
        (x, weight[:0], targets),
    ):
        with pytest.raises(ValueError, match=r"x must be \[n, H\]"):
            linear_cross_entropy(*wrong)


def test_whole_numbers_and_several_devices_are_refused() -> None:
    x, weight, targets = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="one floating type"):
        linear_cross_entropy(x.long(), weight.long(), targets)
    with pytest.raises(ValueError, match="weight meta, targets cpu: they must be on one device"):
        linear_cross_entropy(x, weight.to("meta"), targets)


def test_types_that_do_not_meet_are_refused_as_by_a_linear_layer() -> None:
    x, weight, targets = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    for wrong in ((x.bfloat16(), weight, targets), (x, weight, targets, torch.zeros(5).half())):
        with pytest.raises(TypeError, match="they must be one floating type"):
            linear_cross_entropy(*wrong)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear_cross_entropy(*wrong).isfinite()
