"""Norm and rotation fused: kernels and reference against double precision and against transformers' modules.

The kernels run on a CUDA device where there is one, else in Triton's interpreter, on small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines import DEVICE, ENGINES, device_of, use  # noqa: E402
from rotary import LAYOUTS, angles_of, qkv_views, rotate_complex  # noqa: E402
from torch import Tensor  # noqa: E402

from padless.kernels import qk_norm_rope as module  # noqa: E402
from padless.kernels.qk_norm_rope import qk_norm_rope  # noqa: E402
from padless.kernels.rope import rope_qk  # noqa: E402
from padless.kernels.rope_tables import mrope_axes, rope_tables  # noqa: E402

# Triton's interpreter cuts float32 to bfloat16 instead of rounding, and here three times in a row.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


@pytest.fixture(params=ENGINES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the inputs lie, so that the reference computes or the kernels do."""
    use(request.param, monkeypatch)
    yield device_of(request.param)


def assert_close(got: Tensor, want: Tensor, scale: float = 1.0, rounded: torch.dtype | None = None) -> None:
    """As close as `rounded`, the type that was rounded to on the way, lets it be."""
    assert got.isfinite().all()
    tolerance = TOLERANCE[rounded or got.dtype] * scale
    assert torch.all((got.double() - want).abs() <= tolerance * (1 + want.abs()))


def exact(q: Tensor, k: Tensor, weights: list[Tensor], angles: Tensor, **options: Any) -> list[Tensor]:
    """In double precision, by complex numbers; differentiable."""
    plus, eps = options.get("plus_one", False), options.get("eps", 1e-6)
    normed = [
        x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (w + plus)
        for x, w in zip((q, k), weights, strict=True)
    ]
    return [rotate_complex(x, angles, interleaved=options.get("interleaved", False)) for x in normed]


def weights_of(dim: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(dim, device=device, dtype=dtype) for _ in range(2)]


def assert_exact(q: Tensor, k: Tensor, weights: list[Tensor], angles: Tensor, given: dict[str, Any]) -> None:
    """Results and all four gradients; `given` holds the tables and what else the call takes."""
    leaves = [x.requires_grad_() for x in (q, k, *weights)]
    before = [x.detach().clone() for x in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = qk_norm_rope(*leaves, **given)
    want = exact(wide[0], wide[1], wide[2:], angles, **given)
    coming = [torch.randn_like(x) for x in out]
    grads = torch.autograd.grad(out, leaves, coming)
    want_grads = torch.autograd.grad(want, wide, [x.double() for x in coming])
    for x, y in zip((*out, *grads[:2]), (*want, *want_grads[:2]), strict=True):
        assert x.dtype == q.dtype
        assert_close(x, y, 1 + float(y.abs().max()))
    for x, y in zip(grads[2:], want_grads[2:], strict=True):
        assert x.dtype == weights[0].dtype
        assert_close(x, y, (q.shape[0] * q.shape[1] * q.shape[2]) ** 0.5, rounded=q.dtype)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_normed_and_turned_and_everything_trains(
    device: str, layout: str, interleaved: bool, plus_one: bool
) -> None:
    q, k = (x.detach() for x in qkv_views(layout, 2, 9, (5, 1), 12, device=device))
    cos, sin = rope_tables(50, 8, device=device)
    ids = torch.randint(0, 50, (2, 9), device=device)
    given = {"cos": cos, "sin": sin, "position_ids": ids, "interleaved": interleaved, "plus_one": plus_one}
    assert_exact(q, k, weights_of(12, device), angles_of(ids, 8), given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (14, 2), (3, 3)], ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(16, 16), (20, 6), (96, 96)])
def test_any_heads_sizes_and_types(
    device: str, heads: tuple[int, int], dim: int, turned: int, dtype: torch.dtype
) -> None:
    q, k = qkv_views("contiguous", 1, 5, heads, dim, device=device, dtype=dtype)
    cos, sin = rope_tables(5, turned, device=device)
    angles = angles_of(torch.arange(5, device=device)[None], turned)
    for of_weights in {dtype, torch.float32}:
        assert_exact(
            q.detach(),
            k.detach(),
            weights_of(dim, device, of_weights),
            angles,
            {"cos": cos, "sin": sin, "eps": 1e-2},
        )


@pytest.mark.parametrize("source", ["cu_seqlens", "gathered", "axes"])
def test_positions_from_anywhere(device: str, source: str) -> None:
    q, k = qkv_views("heads first", 1, 8, (4, 2), 16, device=device)
    cos, sin = rope_tables(30, 16, device=device)
    given: dict[str, Any] = {"cos": cos, "sin": sin}
    if source == "cu_seqlens":
        given["cu_seqlens"] = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
        angles = angles_of(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device), 16)
    elif source == "gathered":
        ids = torch.randint(0, 30, (1, 8), device=device)
        given |= {"cos": cos[ids].repeat(1, 1, 2), "sin": sin[ids].repeat(1, 1, 2)}
        angles = angles_of(ids, 16)
    else:
        rows = torch.randint(0, 30, (3, 1, 8), device=device)
        axes = mrope_axes([4, 2, 2], device=device)
        given |= {"position_ids": rows, "frequency_axes": axes}
        angles = torch.stack([angles_of(rows[a], 16)[..., i] for i, a in enumerate(axes.tolist())], dim=-1)
    assert_exact(q.detach(), k.detach(), weights_of(16, device), angles, given)


def test_a_position_that_the_table_lacks_and_heads_of_zeros_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token without a row is NaN, no other is; where eps is 0, idle lanes add nothing to weights."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k = (x.detach().requires_grad_() for x in qkv_views("contiguous", 1, 5, (3, 1), 12, device=DEVICE))
    weights = [w.requires_grad_() for w in weights_of(12, DEVICE)]
    tables = rope_tables(5, 12, device=DEVICE)
    for ids, lost in ([0, 1, 2, 3, 4], []), ([0, 1, 9, -1, 4], [2, 3]):
        positions = torch.tensor([ids], device=DEVICE)
        out = qk_norm_rope(q, k, *weights, *tables, eps=0.0, position_ids=positions)
        grads = torch.autograd.grad(out, (q, k, *weights), [torch.ones_like(x) for x in out])
        for x in (*out, *grads[:2]):
            assert x.isnan().flatten(2).any(-1)[0].tolist() == [at in lost for at in range(5)]
        assert all(bool(x.isnan().any()) is bool(lost) for x in grads[2:])


def modules_of(family: str, dim: int, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """The norms of q and k of a family in transformers, and its rotation."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    kind = modeling.Qwen3RMSNorm if family == "qwen3" else modeling.Gemma3RMSNorm
    norms = [kind(dim, eps=1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    return norms, modeling.apply_rotary_pos_emb


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_it_is_what_the_model_computes(device: str, family: str) -> None:
    """Norm, transpose, rotation by gathered rows: values and the gradients of norms that train."""
    norms, rotation = modules_of(family, 16, torch.float32)
    norms = [norm.to(device) for norm in norms]
    q, k = (x.requires_grad_() for x in qkv_views("contiguous", 2, 9, (4, 2), 16, device=device))
    angles = torch.randn(2, 9, 8, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    want = rotation(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)
    weights = [norm.weight for norm in norms]
    got = qk_norm_rope(q, k, *weights, cos, sin, plus_one=family == "gemma3")
    coming = [torch.randn_like(x) for x in got]
    leaves = [q, k, *weights]
    want_grads = torch.autograd.grad(want, leaves, [x.transpose(1, 2) for x in coming])
    for x, y in zip(got, want, strict=True):
        assert_close(x.detach(), y.transpose(1, 2).double(), 3)
    for x, y in zip(torch.autograd.grad(got, leaves, coming), want_grads, strict=True):
        assert_close(x, y.double(), 20)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_rounds_where_the_model_rounds(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit the model's own norm and then rope_qk; the other family's rounding gives other bits."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    norms, _ = modules_of(family, 64, dtype)
    q, k = qkv_views("contiguous", 1, 32, (4, 2), 64, dtype=dtype)
    tables = rope_tables(32, 64)
    with torch.no_grad():
        want = rope_qk(norms[0](q), norms[1](k), *tables)
        weights = [norm.weight for norm in norms]
        plus = family == "gemma3"
        got = qk_norm_rope(q, k, *weights, *tables, plus_one=plus)
        other = qk_norm_rope(q, k, *(w + 1 if plus else w - 1 for w in weights), *tables, plus_one=not plus)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not torch.equal(other[0], want[0])


def test_the_gradients_of_weights_are_the_same_bits_each_time(device: str) -> None:
    q, k = (x.requires_grad_() for x in qkv_views("contiguous", 1, 101, (4, 2), 16, device=device))
    weights = [w.requires_grad_() for w in weights_of(16, device)]
    tables = rope_tables(101, 16, device=device)
    coming = [torch.randn_like(x) for x in (q, k)]
    runs = [
        torch.autograd.grad(qk_norm_rope(q, k, *weights, *tables), (q, k, *weights), coming) for _ in range(2)
    ]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_frozen_weights_and_frozen_inputs(device: str) -> None:
    q, k = qkv_views("contiguous", 1, 6, (4, 2), 16, device=device)
    weights, tables = weights_of(16, device), rope_tables(6, 16, device=device)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, *weights)]
    sum(x.square().sum() for x in qk_norm_rope(*leaves, *tables)).backward()
    frozen = [x.detach().clone().requires_grad_() for x in (q, k)]
    sum(x.square().sum() for x in qk_norm_rope(*frozen, *weights, *tables)).backward()
    only = [x.detach().clone().requires_grad_() for x in weights]
    sum(x.square().sum() for x in qk_norm_rope(q, k, *only, *tables)).backward()
    got = [x.grad for x in (*frozen, *only)]
    assert all(torch.equal(x, y.grad) for x, y in zip(got, leaves, strict=True))


def test_recomputed_activations_give_the_same_gradients(device: str) -> None:
    leaves = [x.requires_grad_() for x in qkv_views("contiguous", 1, 6, (4, 2), 16, device=device)]
    leaves += [x.requires_grad_() for x in weights_of(16, device)]
    tables = rope_tables(6, 16, device=device)

    def layer(*x: Tensor) -> Tensor:
        return sum(y.square().sum() for y in qk_norm_rope(x[0] * 2, x[1] * 2, x[2], x[3], *tables))

    want = torch.autograd.grad(layer(*leaves), leaves)
    again = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
    got = torch.autograd.grad(again, leaves)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_gradients_that_are_expanded_or_missing(device: str) -> None:
    """A sum's gradient has strides of 0; of an output that nobody uses there is none."""
    q, k = (x.requires_grad_() for x in qkv_views("fused", 1, 6, (4, 2), 16, device=device))
    weights = [x.requires_grad_() for x in weights_of(16, device)]
    tables = rope_tables(6, 16, device=device)
    new_q, _ = qk_norm_rope(q, k, *weights, *tables)
    got = torch.autograd.grad(new_q.sum(), (q, k, *weights))
    wide = [x.detach().double().requires_grad_() for x in (q, weights[0])]
    angles = angles_of(torch.arange(6, device=device)[None], 16)
    want = torch.autograd.grad(exact(wide[0], wide[0], [wide[1]] * 2, angles)[0].sum(), wide)
    assert_close(got[0], want[0], 5)
    assert_close(got[2], want[1], 20)
    assert not got[1].any() and not got[3].any()


def test_derivatives_by_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tables = rope_tables(3, 4, dtype=torch.float64)
    leaves = [
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 6), (3, 1, 6), (6,), (6,))
    ]
    for plus_one in (False, True):
        assert torch.autograd.gradcheck(lambda *x, p=plus_one: qk_norm_rope(*x, *tables, plus_one=p), leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_programs_trace_it(device: str, layout: str) -> None:
    tables = rope_tables(6, 8, device=device)
    leaves = [x.detach().requires_grad_() for x in qkv_views(layout, 1, 6, (4, 2), 8, device=device)]
    leaves += [x.requires_grad_() for x in weights_of(8, device)]

    def layer(*x: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(*x, *tables, plus_one=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want, got = layer(*leaves), compiled(*leaves)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    grads = [torch.autograd.grad(sum(x.square().sum() for x in out), leaves) for out in (got, want)]
    assert all(torch.allclose(x, y) for x, y in zip(*grads, strict=True))
    given = (*leaves, 1e-6, True, *tables, None, None, None, 8, False)
    torch.library.opcheck(module._traced, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU tests do this with real memory")
def test_views_into_a_buffer_beyond_2_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-108, BR-109: offsets that 32 bits cannot hold, forward and back; only pages touched take memory."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    stride = 2**30 + 64
    buffer = torch.empty(2 * stride + 4096, dtype=torch.float16)
    q, k = (buffer[at:].as_strided((3, h, 16), (stride, 16, 1)) for at, h in ((0, 4), (64, 2)))
    for x in (q, k):
        x.copy_(torch.randn(x.shape))
    weights, tables = weights_of(16, "cpu"), rope_tables(3, 16)
    runs = []
    for views in ((q, k), (q.clone(), k.clone())):
        leaves = [x.detach().requires_grad_() for x in (*views, *weights)]
        out = qk_norm_rope(*leaves, *tables)
        runs.append((*out, *torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_weight": (6,)}, ValueError, r"q_weight is \[6\] and heads have 8"),
        ({"k_weight": (2, 8)}, ValueError, r"k_weight is \[2, 8\]"),
        ({"dtype": torch.float16}, TypeError, "q_weight is torch.float16"),
        ({"k": (4, 2, 6)}, ValueError, "heads of 8 and 6"),
        ({"tables": (3, 4)}, ValueError, "4 tokens in a row and a table of 3"),
        ({"max_seqlen": 5}, ValueError, "max_seqlen is 5"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_shape(
    device: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    dtype = change.get("dtype", torch.float32)
    q_weight, k_weight = (
        torch.randn(change.get(name, (8,)), device=device, dtype=dtype) for name in ("q_weight", "k_weight")
    )
    cos = torch.randn(change.get("tables", (4, 4)), device=device)
    q, k = torch.randn(4, 4, 8, device=device), torch.randn(change.get("k", (4, 2, 8)), device=device)
    with pytest.raises(error, match=message):
        qk_norm_rope(q, k, q_weight, k_weight, cos, cos, max_seqlen=change.get("max_seqlen"))


def test_no_tokens_are_no_work(device: str) -> None:
    leaves = [torch.empty(0, h, 8, device=device, requires_grad=True) for h in (2, 1)]
    leaves += [x.requires_grad_() for x in weights_of(8, device)]
    out = qk_norm_rope(*leaves, *rope_tables(4, 8, device=device))
    grads = torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])
    assert out[0].shape == (0, 2, 8) and not grads[2].any() and not grads[3].any()
