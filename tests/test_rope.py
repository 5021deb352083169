"""Rotary embeddings: the kernel and the reference against complex numbers in double precision.

The kernel runs on a CUDA device where there is one, else in Triton's interpreter, on small shapes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines import DEVICE, ENGINES, device_of, use  # noqa: E402
from rotary import LAYOUTS, angles_of, qkv_views, rotate_complex  # noqa: E402
from torch import Tensor  # noqa: E402

from padless.kernels.rope import rope_qk, rope_qk_  # noqa: E402
from padless.kernels.rope_tables import mrope_axes, rope_tables  # noqa: E402

# Triton's interpreter cuts float32 to bfloat16 instead of rounding: one unit in the last place.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What computes: the reference serves the CPU, the kernel a device or the interpreter."""
    use(request.param, monkeypatch)
    yield request.param


def assert_close(got: Tensor, want: Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[got.dtype] * scale
    assert got.isfinite().all()
    assert torch.all((got.double() - want).abs() <= tolerance * (1 + want.abs()))


def positions_of(source: str, batch: int, tokens: int, device: str) -> tuple[Tensor, dict[str, Any]]:
    """Each token's position [B, T], and the arguments that say so."""
    if source == "index":
        return torch.arange(tokens, device=device).expand(batch, tokens), {}
    if source == "cu_seqlens":
        total = batch * tokens
        bounds = [0, 1, 1, min(4, total), total - 2]  # an empty sequence, and two tokens past the last
        places = torch.arange(total)
        start = torch.tensor([max(b for b in bounds if b <= t) for t in range(total)])
        bounds_on = torch.tensor(bounds, dtype=torch.int32, device=device)
        return (places - start).view(batch, tokens).to(device), {"cu_seqlens": bounds_on}
    ids = torch.randint(0, 50, (batch, tokens), device=device)
    if source == "position_ids int32":
        return ids, {"position_ids": ids.int()}
    if source == "position_ids, one row for all":
        return ids[:1].expand(batch, tokens), {"position_ids": ids[0]}
    return ids, {"position_ids": ids}


SOURCES = ("index", "cu_seqlens", "position_ids", "position_ids int32", "position_ids, one row for all")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pair_turns_by_its_tokens_position(
    engine: str, layout: str, interleaved: bool, source: str
) -> None:
    device = device_of(engine)
    q, k = qkv_views(layout, 2, 7, (5, 1), 12, device=device)
    cos, sin = rope_tables(50, 8, device=device)
    positions, given = positions_of(source, 2, 7, device)
    angles = angles_of(positions, 8)
    before = q.clone(), k.clone()
    new_q, new_k = rope_qk(q, k, cos, sin, interleaved=interleaved, **given)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    assert_close(new_q, rotate_complex(q, angles, interleaved=interleaved))
    assert_close(new_k, rotate_complex(k, angles, interleaved=interleaved))
    same = rope_qk_(q, k, cos, sin, interleaved=interleaved, **given)
    assert torch.equal(q, new_q) and torch.equal(k, new_k)
    assert same[0].data_ptr() == q.data_ptr() and same[1].data_ptr() == k.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (14, 2), (3, 3), (1, 1), (28, 4)], ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(16, 16), (80, 20), (96, 96), (10, 2)])
def test_any_heads_sizes_and_types(
    engine: str, heads: tuple[int, int], dim: int, turned: int, dtype: torch.dtype
) -> None:
    """BR-161: what lies beyond the rotary part is not touched, and the table's guard row not read."""
    device = device_of(engine)
    q, k = qkv_views("contiguous", 1, 5, heads, dim, device=device, dtype=dtype)
    tables = [
        torch.cat((t, torch.full_like(t[:1], torch.nan))) for t in rope_tables(5, turned, device=device)
    ]
    angles = angles_of(torch.arange(5, device=device)[None], turned)
    new = rope_qk(q, k, *(t[:5] for t in tables))
    for x, y in zip((q, k), new, strict=True):
        assert torch.equal(y[..., turned:], x[..., turned:])
        assert_close(y, rotate_complex(x, angles))


def test_the_result_is_rounded_once(engine: str) -> None:
    """BR-157: at most a unit in the last place from turning in float32 and rounding at the end."""
    device = device_of(engine)
    q, k = qkv_views("contiguous", 1, 16, (4, 2), 64, device=device, dtype=torch.bfloat16)
    cos, sin = rope_tables(8192, 64, base=500_000.0, device=device)
    ids = torch.randint(0, 8192, (16,), device=device)
    exact = rope_qk(q.float(), k.float(), cos, sin, position_ids=ids)
    for got, want in zip(rope_qk(q, k, cos, sin, position_ids=ids), exact, strict=True):
        units = got.view(torch.int16).int() - want.bfloat16().view(torch.int16).int()
        assert units.abs().max() <= (1 if engine == "kernel" and device == "cpu" else 0)


def test_positions_restart_with_each_sequence(engine: str) -> None:
    """BR-153."""
    device = device_of(engine)
    vector = torch.randn(2, 16, device=device)
    q = vector.expand(8, 2, 16).clone()
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    new_q, _ = rope_qk(q, q[:, :1].clone(), *rope_tables(8, 16, device=device), cu_seqlens=cu_seqlens)
    assert torch.equal(new_q[:3], new_q[3:6])
    assert not torch.equal(new_q[3], new_q[6])


def test_a_padded_row_is_its_sequences_alone_where_far_positions_scale(engine: str) -> None:
    """BR-154: sequences of 3 and 2 and a padded tail in bfloat16; all gradients finite."""
    device = device_of(engine)
    near, far = rope_tables(8, 16, device=device), rope_tables(8, 16, base=1e6, scale=1.2, device=device)
    tables = [torch.cat((x[:4], y[4:])) for x, y in zip(near, far, strict=True)]
    q, k = qkv_views("contiguous", 1, 8, (4, 2), 16, device=device, dtype=torch.bfloat16)
    for x in (q, k):
        x[:, 5:] = 0
        x.requires_grad_()
    out = rope_qk(q, k, *tables, cu_seqlens=torch.tensor([0, 3, 5, 8], dtype=torch.int32, device=device))
    sum(x.float().square().sum() for x in out).backward()
    for place in (slice(0, 3), slice(3, 5)):
        alone = rope_qk(q[:, place].detach(), k[:, place].detach(), *tables)
        assert all(torch.equal(x[:, place], y) for x, y in zip(out, alone, strict=True))
    assert not out[0][:, 5:].any() and not out[1][:, 5:].any()
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


def test_q_and_k_are_not_mixed_up(engine: str) -> None:
    """BR-160."""
    device = device_of(engine)
    tables = rope_tables(4, 16, device=device)
    q, k = qkv_views("contiguous", 1, 4, (4, 2), 16, device=device)
    for x, y in ((q, torch.zeros_like(k)), (torch.zeros_like(q), k)):
        new_x, new_y = rope_qk(x, y, *tables)
        assert new_x.any() == x.any() and new_y.any() == y.any()


@pytest.mark.parametrize("sections_interleaved", [False, True])
def test_multi_axis_positions(engine: str, sections_interleaved: bool) -> None:
    """Each frequency turns by the axis that its section names."""
    device = device_of(engine)
    q, k = qkv_views("heads first", 2, 6, (4, 2), 16, device=device)
    ids = torch.randint(0, 30, (3, 2, 6), device=device)
    axes = mrope_axes([4, 2, 2], interleaved=sections_interleaved, device=device)
    want_axes = [0, 1, 2, 0, 1, 2, 0, 0] if sections_interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    assert axes.tolist() == want_axes
    angles = torch.stack([angles_of(row, 16) for row in ids])  # [A, B, T, R/2]
    chosen = torch.stack([angles[axis, :, :, i] for i, axis in enumerate(want_axes)], dim=-1)
    new_q, new_k = rope_qk(q, k, *rope_tables(30, 16, device=device), position_ids=ids, frequency_axes=axes)
    assert_close(new_q, rotate_complex(q, chosen))
    assert_close(new_k, rotate_complex(k, chosen))


@pytest.mark.parametrize("rows", [1, 2])
def test_gathered_tables_are_what_transformers_hands_over(engine: str, rows: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    device = device_of(engine)
    q, k = (x.transpose(1, 2) for x in qkv_views("heads first", 2, 9, (4, 2), 16, device=device))
    angles = torch.randn(rows, 9, 8, device=device).repeat(1, 1, 2)
    want = llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    got = rope_qk(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin())
    half = rope_qk(
        q.transpose(1, 2), k.transpose(1, 2), angles.cos()[..., :8], angles.sin()[..., :8], rotary_dim=16
    )
    for x, y, z in zip(want, got, half, strict=True):
        assert_close(y, x.transpose(1, 2).double())
        assert torch.equal(y, z)


def test_interleaved_and_partial_as_glm_turns(engine: str) -> None:
    glm = pytest.importorskip("transformers.models.glm.modeling_glm")
    device = device_of(engine)
    q, k = (x.transpose(1, 2) for x in qkv_views("heads first", 2, 9, (4, 2), 16, device=device))
    angles = torch.randn(2, 9, 4, device=device).repeat(1, 1, 2)
    want = glm.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    got = rope_qk(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin(), interleaved=True)
    for x, y in zip(want, got, strict=True):
        assert_close(y, x.transpose(1, 2).double())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_turn_back(engine: str, layout: str, checkpointed: bool, in_place: bool) -> None:
    """BR-159: with and without recomputing, for projections that are views; inputs stay unless asked."""
    device = device_of(engine)
    leaves = [x.requires_grad_() for x in qkv_views(layout, 2, 6, (4, 2), 12, device=device)]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    positions, given = positions_of("position_ids", 2, 6, device)
    tables = rope_tables(50, 8, device=device)
    weights = [torch.randn_like(x) for x in leaves]

    def layer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ((x * 2).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        return (rope_qk_ if in_place else rope_qk)(q, k, *tables, **given)

    out = (
        torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
        if checkpointed
        else layer(*leaves)
    )
    sum((x * w).sum() for x, w in zip(out, weights, strict=True)).backward()
    angles = angles_of(positions, 8)
    for x, w, y in zip(leaves, weights, out, strict=True):
        assert_close(y.detach(), rotate_complex(2 * x.detach(), angles))
        assert_close(x.grad, 2 * rotate_complex(w, angles, inverse=True))


def test_a_gradient_that_others_hold_is_left_alone(engine: str) -> None:
    """A sum hands one gradient, expanded from one number, to both of its sides."""
    device = device_of(engine)
    q, k = (x.requires_grad_() for x in qkv_views("contiguous", 1, 4, (2, 1), 8, device=device))
    other = torch.randn(1, 4, 2, 8, device=device, requires_grad=True)
    new_q, new_k = rope_qk_(q * 1, k * 1, *rope_tables(4, 8, device=device))
    ((new_q + other).sum() + new_k.sum()).backward()
    assert torch.equal(other.grad, torch.ones_like(other))
    angles = angles_of(torch.arange(4, device=device)[None], 8)
    assert_close(q.grad, rotate_complex(torch.ones_like(q), angles, inverse=True))


@pytest.mark.parametrize("view", [False, True])
def test_overwriting_what_autograd_saved_is_an_error_not_a_wrong_gradient(engine: str, view: bool) -> None:
    device = device_of(engine)
    leaf = torch.randn(1, 4, 2, 8, device=device, requires_grad=True)
    q, k = leaf.exp(), leaf * 2
    if view:
        q, k = q.transpose(1, 2).transpose(1, 2), k.view(k.shape)
    new_q, new_k = rope_qk_(q, k, *rope_tables(4, 8, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (new_q.sum() + new_k.sum()).backward()


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tables = rope_tables(3, 4, dtype=torch.float64)
    q, k = (torch.randn(3, h, 6, dtype=torch.float64, requires_grad=True) for h in (2, 1))
    assert torch.autograd.gradcheck(lambda q, k: rope_qk(q, k, *tables), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: rope_qk(q, k, *tables), (q, k))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_programs_trace_it(engine: str, in_place: bool) -> None:
    device = device_of(engine)
    tables = rope_tables(6, 8, device=device)

    def layer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (rope_qk_ if in_place else rope_qk)(q * 2, k * 2, *tables)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in qkv_views("contiguous", 1, 6, (4, 2), 8, device=device)]
    want = torch.autograd.grad(sum(x.square().sum() for x in layer(*leaves)), leaves)
    out = compiled(*leaves)
    for x, y in zip(out, layer(*leaves), strict=True):
        assert torch.equal(x, y)
    got = torch.autograd.grad(sum(x.square().sum() for x in out), leaves)
    assert all(torch.allclose(x, y) for x, y in zip(got, want, strict=True))


def test_views_into_a_buffer_beyond_2_to_the_31(engine: str) -> None:
    """BR-108, BR-109, BR-110: offsets that 32 bits cannot hold; only the pages touched take memory."""
    if engine == "kernel" and DEVICE == "cuda":
        pytest.skip("the GPU tests do this with real memory")
    stride = 2**30 + 64
    buffer = torch.empty(2 * stride + 4096, dtype=torch.float16)  # 4 GiB of addresses
    q, k = (buffer[at:].as_strided((3, h, 16), (stride, 16, 1)) for at, h in ((0, 4), (64, 2)))
    for x in (q, k):
        x.copy_(torch.randn(x.shape))
    want = rope_qk(q.clone(), k.clone(), *rope_tables(3, 16))
    got = rope_qk_(q, k, *rope_tables(3, 16))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_tables_are_exact_far_out() -> None:
    """BR-155: positions are never rounded; 1,000,000 is as exact as 1, and neighbours differ by one step."""
    cos, sin = rope_tables(1_000_001, 8)
    angles = angles_of(torch.tensor([[15_962, 131_071, 999_999, 1_000_000]]), 8)[0]
    rows = torch.tensor([15_962, 131_071, 999_999, 1_000_000])
    assert (cos[rows].double() - angles.cos()).abs().max() < 6e-8
    assert (sin[rows].double() - angles.sin()).abs().max() < 6e-8
    assert not torch.equal(cos[131_070], cos[131_071])
    step = cos[1_000_000].double() * cos[999_999].double() + sin[1_000_000].double() * sin[999_999].double()
    assert (step - cos[1].double()).abs().max() < 2e-7


def test_autocast_leaves_tables_alone() -> None:
    """BR-156."""
    outside = rope_tables(8192, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rope_tables(8192, 128)
    assert all(torch.equal(x, y) for x, y in zip(inside, outside, strict=True))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (5, 2, 8)}, r"k \[.*5, 2, 8\]"),
        ({"k": (4, 2, 6)}, "heads of 8 and 6"),
        ({"k": (1, 4, 2, 8)}, r"\[T, H, D\] or \[B, T, H, D\]"),
        ({"tables": (4, 5)}, "rotary dimension 10 is larger than the head's 8"),
        ({"tables": (3, 4)}, "4 tokens in a row and a table of 3"),
        ({"tables": (1, 4, 7)}, "rotary dimension 7 is odd"),
        ({"tables": (1, 3, 8)}, "a row for each of q's tokens"),
        ({"tables": (1, 4, 8), "position_ids": (0, 1, 2, 3)}, "leave position_ids"),
        ({"rotary_dim": 6}, "has 3 columns"),
        ({"position_ids": (0, 1, 2)}, r"position_ids are \[3\]"),
        ({"position_ids": (0, 1, 2, 3), "cu_seqlens": (0, 4)}, "give one of them"),
        ({"cu_seqlens": (0,)}, r"N >= 1"),
        ({"frequency_axes": (0, 1, 1, 1)}, "rows of position_ids"),
        ({"max_seqlen": 5}, "max_seqlen is 5 and the table has 4"),
    ],
)
@pytest.mark.parametrize("call", [rope_qk, rope_qk_])
def test_what_does_not_fit_is_refused_by_name_and_shape(
    engine: str, call: Any, change: dict[str, Any], message: str
) -> None:
    """BR-162."""
    device = device_of(engine)
    given = {name: ints(*change[name]).to(device) for name in change if isinstance(change[name], tuple)}
    for name in ("k", "tables"):
        given.pop(name, None)
    given |= {name: value for name, value in change.items() if isinstance(value, int)}
    q = torch.randn(4, 4, 8, device=device)
    k = torch.randn(change.get("k", (4, 2, 8)), device=device)
    cos = torch.randn(change.get("tables", (4, 4)), device=device)
    before = q.clone()
    with pytest.raises(ValueError, match=message):
        call(q, k, cos, cos.clone(), **given)
    assert torch.equal(q, before)


@pytest.mark.parametrize("given", [{"position_ids": (0, 4, 1, 2)}, {"cu_seqlens": (0, 1, 6)}])
def test_positions_beyond_the_table_never_read_past_it(engine: str, given: dict[str, Any]) -> None:
    """BR-162: an error where looking is free, NaN for that token where it would wait for the device."""
    device = device_of(engine)
    tokens = 4 if "position_ids" in given else 6
    q, k = torch.randn(tokens, 2, 8, device=device), torch.randn(tokens, 1, 8, device=device)
    cos, sin = (torch.cat((t, torch.zeros_like(t)))[:4] for t in rope_tables(4, 8, device=device))
    arguments = {name: ints(*values).to(device) for name, values in given.items()}
    if engine == "reference":
        with pytest.raises(ValueError, match="a table of 4"):
            rope_qk(q, k, cos, sin, **arguments)
        return
    new_q, new_k = rope_qk(q, k, cos, sin, **arguments)
    wrong = 1 if "position_ids" in given else 5
    for x in (new_q, new_k):
        assert x[wrong].isnan().all()
        assert x.isfinite().all(dim=-1).all(dim=-1).sum() == tokens - 1


def test_overlapping_memory_is_refused_in_place_only(engine: str) -> None:
    device = device_of(engine)
    tables = rope_tables(4, 8, device=device)
    buffer = torch.randn(4, 6, 8, device=device)
    for q, k in (
        (buffer[:, :4], buffer[:, 3:5]),
        (buffer, buffer),
        (buffer[:, :1].expand(4, 4, 8), buffer[:, 5:]),
        (buffer[:3, :4], buffer[1:, 2:4]),
    ):
        rows = [t[: q.shape[0]] for t in tables]
        with pytest.raises(ValueError, match="overlap"):
            rope_qk_(q, k, *rows)
        new_q, _ = rope_qk(q, k, *rows)
        assert new_q.isfinite().all()
    for q, k in (
        (buffer[:, :4], buffer[:, 4:]),
        (buffer[:, 0::2], buffer[:, 1::2]),
        (buffer[:2], buffer[2:]),
    ):
        rope_qk_(q, k, *(t[: q.shape[0]] for t in tables))


def test_a_leaf_that_requires_grad_is_not_overwritten(engine: str) -> None:
    device = device_of(engine)
    q = torch.randn(4, 2, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        rope_qk_(q, torch.randn(4, 1, 8, device=device), *rope_tables(4, 8, device=device))


def test_no_tokens_are_no_work(engine: str) -> None:
    device = device_of(engine)
    new_q, new_k = rope_qk_(
        torch.empty(0, 2, 8, device=device),
        torch.empty(0, 1, 8, device=device),
        *rope_tables(4, 8, device=device),
    )
    assert new_q.shape == (0, 2, 8) and new_k.shape == (0, 1, 8)


def test_triton_is_imported_only_for_a_kernel() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch; from padless.kernels.rope import rope_qk;"
        "x = torch.randn(2, 2, 4); rope_qk(x, x, torch.ones(2, 2), torch.ones(2, 2));"
        "sys.exit(any('padless.kernels.rope_launch' == name for name in sys.modules))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.parametrize("bounds", [[1, 5], [0, 4, 2, 5], [0, 3, 6]])
def test_boundaries_that_do_not_fit_the_tokens_are_refused(bounds: list[int]) -> None:
    q, k = torch.ones(5, 2, 8), torch.ones(5, 1, 8)
    cos, sin = rope_tables(8, 8)
    with pytest.raises(ValueError, match="begin at 0, never fall and stay within the tokens"):
        rope_qk(q, k, cos, sin, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("rows", [True, False])
def test_gradients_are_turned_where_they_lie_only_when_told(rows: bool) -> None:
    """reuse_grads: the same gradients, in the memory of those that came in."""
    tables = rope_tables(8, 16)
    shape = (8,) if rows else (1, 8)
    q, k = (torch.randn(*shape, heads, 16, requires_grad=True) for heads in (4, 2))
    sent = [torch.randn_like(x) for x in (q, k)]
    kept = [x.clone() for x in sent]
    want = torch.autograd.grad(rope_qk_(q * 1, k * 1, *tables), (q, k), sent)
    assert all(map(torch.equal, sent, kept))
    made = [q * 1, k * 1]
    inner = [x.detach().requires_grad_() for x in made]
    turned = rope_qk_(inner[0].view_as(inner[0]) + 0, inner[1] + 0, *tables, reuse_grads=True)
    got = torch.autograd.grad(turned, inner, sent)
    assert all(map(torch.equal, got, want))
    assert [x.data_ptr() for x in got] == [x.data_ptr() for x in sent]


class _Viewed(torch.autograd.Function):
    """Doubles, and returns a view of what it made, as fused norms do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x.reshape(-1) * 2).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_views_that_a_custom_function_returns_are_turned_in_place() -> None:
    tables = rope_tables(8, 16)
    q, k = (torch.randn(1, 8, heads, 16, requires_grad=True) for heads in (4, 2))
    sent = [torch.randn_like(x) for x in (q, k)]
    want = rope_qk(q * 2, k * 2, *tables)
    got = rope_qk_(_Viewed.apply(q).transpose(1, 2).transpose(1, 2), _Viewed.apply(k), *tables)
    assert all(map(torch.equal, got, want))
    for mine, theirs in zip(
        torch.autograd.grad(got, (q, k), sent), torch.autograd.grad(want, (q, k), sent), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
