"""Attention of packed short sequences: kernels and reference against dense attention in double precision.

The kernels run on a CUDA device where there is one, else in Triton's interpreter, on small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines import DEVICE, ENGINES, device_of, use  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from rotary import angles_of, rotate_complex  # noqa: E402
from torch import Tensor  # noqa: E402

from padless.kernels.rope_tables import rope_tables  # noqa: E402
from padless.kernels.short_attention import short_attention, tiles_for  # noqa: E402
from padless.kernels.short_attention_work import (  # noqa: E402
    Tiles,
    WorkList,
    work_list,
    work_list_on_device,
)

# Of a norm. Triton's interpreter multiplies no bfloat16, so that there float16 stands for both.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What computes: the reference serves the CPU, the kernels a device or the interpreter."""
    use(request.param, monkeypatch)
    yield request.param


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    rope: bool,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """All tokens against all under one mask, in float64."""
    tokens = torch.arange(len(q), device=q.device)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(q.device)
    start = torch.tensor([0, *lengths]).cumsum(0).to(q.device)[sequence]
    q, k, v = (x.double() for x in (q, k, v))
    if rope:
        angles = angles_of((tokens - start)[None], q.shape[-1])
        q, k = (rotate_complex(x[None], angles)[0] for x in (q, k))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    past = tokens[:, None] - tokens
    seen = (sequence[:, None] == sequence) & (past >= 0) & (past < (window or len(q) + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def inputs(
    lengths: list[int], heads: tuple[int, int], dim: int, device: str, dtype: torch.dtype = torch.float16
) -> list[Tensor]:
    """q, k, v and the gradient of the result; q, k and v are views into one projection."""
    hq, hk = heads
    qkv = torch.randn(sum(lengths), hq + 2 * hk, dim, device=device).to(dtype)
    grad = torch.randn(sum(lengths), hq, dim, device=device).to(dtype)
    return [*qkv.split((hq, hk, hk), 1), grad]


def listed(lengths: list[int], tiles: Tiles, device: str) -> WorkList:
    return work_list(torch.tensor([0, *lengths]).cumsum(0), tiles).to(device)


def check(
    engine: str,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.float16,
    *,
    tiles: Tiles | None = None,
    rope: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """The result and the gradients of q, k and v against dense attention."""
    device = device_of(engine)
    q, k, v, grad = inputs(lengths, heads, dim, device, dtype)
    work = listed(lengths, tiles or tiles_for(*heads, dim), device)
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    exactly = torch.promote_types(dtype, torch.float32)
    tables = rope_tables(max(lengths), dim, dtype=exactly, device=device) if rope else (None, None)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = short_attention(*leaves, work, cos=tables[0], sin=tables[1], **options)
    want = dense(*exact, lengths, rope=rope, **options)
    out.backward(grad)
    want.backward(grad.double())
    assert out.shape == q.shape and out.dtype == dtype and out.is_contiguous()
    with torch.no_grad():
        assert torch.equal(short_attention(q, k, v, work, cos=tables[0], sin=tables[1], **options), out)
    pairs = [(out, want), *((x.grad, y.grad) for x, y in zip(leaves, exact, strict=True))]
    for got, true in pairs:
        assert got is not None and true is not None
        assert (got.double() - true).norm() <= TOLERANCE[dtype] * (true.norm() + 0.1)


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    heads=st.sampled_from([(4, 1), (3, 1), (2, 2)]),
    tiles=st.sampled_from([Tiles(16, 16), Tiles(4, 32), Tiles(8, 16)]),
    rope=st.booleans(),
    window=st.sampled_from([None, 1, 7]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_any_row_is_dense_attention_under_its_mask(
    lengths: list[int],
    heads: tuple[int, int],
    tiles: Tiles,
    rope: bool,
    window: int | None,
    softcap: float | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        check("kernel", lengths, heads, 32, tiles=tiles, rope=rope, window=window, softcap=softcap)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (2, 2)], ids=str)
def test_head_sizes_and_groups(engine: str, heads: tuple[int, int], dim: int) -> None:
    check(engine, [21, 1, 45], heads, dim)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_types_that_the_kernels_or_the_interpreter_lack_are_the_references(
    engine: str, dtype: torch.dtype
) -> None:
    check(engine, [9, 4], (4, 2), 32, dtype)


def test_more_heads_share_keys_than_a_tile_has_rows(engine: str) -> None:
    check(engine, [5, 4], (70, 1), 16)


def test_one_sequence_fills_the_row_and_tiny_ones_do(engine: str) -> None:
    check(engine, [150], (4, 1), 32)
    check(engine, [1, 2] * 40, (4, 1), 32)


@pytest.mark.parametrize("window", [None, 4])
def test_programs_with_empty_tiles_do_nothing(engine: str, window: int | None) -> None:
    """A list that a device made, of as many tiles as there can be."""
    device = device_of(engine)
    lengths, tiles = [9, 1, 2, 7, 0, 0, 0], Tiles(4, 16)
    q, k, v, grad = inputs(lengths, (4, 2), 16, device)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    works = listed(lengths, tiles, device), work_list_on_device(bounds.int(), 19, 9, tiles)
    assert works[1].query_tiles > works[0].query_tiles and works[1].key_tiles > works[0].key_tiles
    runs = []
    for work in works:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = short_attention(*leaves, work, window=window)
        runs.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_a_row_is_its_sequences_alone_to_the_bit(engine: str) -> None:
    """Nothing of one sequence reaches another, whatever stands there: infinities do not either."""
    device = device_of(engine)
    lengths = [5, 30, 3]
    q, k, v, _ = inputs(lengths, (4, 2), 32, device)
    cos, sin = rope_tables(30, 32, device=device)
    tiles = Tiles(64, 64)
    alone = short_attention(q[5:35], k[5:35], v[5:35], listed([30], tiles, device), cos=cos, sin=sin)
    for x in (q, k):
        x[:5] = x[35:] = 1000.0
    packed = short_attention(q, k, v, listed(lengths, tiles, device), cos=cos, sin=sin)
    assert torch.allclose(packed[5:35], alone, atol=2e-3 if engine == "kernel" else 1e-6)
    assert packed.isfinite().all()


def test_a_first_token_is_its_own_value(engine: str) -> None:
    device = device_of(engine)
    lengths = [3, 1, 4]
    q, k, v, _ = inputs(lengths, (4, 2), 32, device)
    out = short_attention(q, k, v, listed(lengths, Tiles(4, 4), device))
    for first in (0, 3, 4):
        assert torch.equal(out[first], v[first].repeat_interleave(2, 0))


def test_gradients_are_the_same_bits_each_run_and_arrive_at_any_strides(engine: str) -> None:
    device = device_of(engine)
    lengths = [33, 20]
    q, k, v, grad = inputs(lengths, (4, 2), 32, device)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    work = listed(lengths, Tiles(16, 16), device)
    cos, sin = rope_tables(33, 32, device=device)
    strided = grad.transpose(0, 2).contiguous().transpose(0, 2)
    runs = [
        torch.autograd.grad(short_attention(*leaves, work, cos=cos, sin=sin), leaves, g)
        for g in (grad, grad, strided)
    ]
    assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True))


def test_inputs_are_left_alone(engine: str) -> None:
    device = device_of(engine)
    given = inputs([9, 8], (4, 2), 32, device)
    before = [x.clone() for x in given]
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    cos, sin = rope_tables(9, 32, device=device)
    short_attention(*leaves, listed([9, 8], Tiles(4, 16), device), cos=cos, sin=sin).backward(given[3])
    assert all(torch.equal(x, y) for x, y in zip(before, given, strict=True))


def test_no_tokens(engine: str) -> None:
    device = device_of(engine)
    leaves = [
        torch.empty(0, h, 32, device=device, dtype=torch.float16, requires_grad=True) for h in (4, 2, 2)
    ]
    out = short_attention(*leaves, listed([], Tiles(4, 4), device))
    out.sum().backward()
    assert out.shape == (0, 4, 32)
    assert all(x.grad is None or x.grad.shape == x.shape for x in leaves)


@pytest.mark.parametrize("rope", [False, True])
def test_compiled_programs_trace_it(engine: str, rope: bool) -> None:
    device = device_of(engine)
    lengths = [11, 6]
    q, k, v, grad = inputs(lengths, (4, 2), 32, device)
    work = listed(lengths, Tiles(4, 16), device)
    tables = rope_tables(11, 32, device=device) if rope else (None, None)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return short_attention(q * 2, k, v, work, cos=tables[0], sin=tables[1])

    torch._dynamo.reset()  # what was traced for the other engine does not look at the environment again
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, want = compiled(*leaves), layer(*leaves)
    assert torch.allclose(out, want, atol=2e-3)
    got = torch.autograd.grad(out, leaves, grad)
    for x, y in zip(got, torch.autograd.grad(want, leaves, grad), strict=True):
        assert torch.allclose(x, y, atol=2e-3)


def test_what_cannot_be_attended_is_refused_by_shape(engine: str) -> None:
    device = device_of(engine)
    q, k, v, _ = inputs([6], (4, 2), 32, device)
    work = listed([6], Tiles(4, 4), device)
    cos, sin = rope_tables(6, 32, device=device)
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("same T and D", (q, k[:5], v[:5], work), {}),
        ("no multiple", (q[:, :3], k, v, work), {}),
        ("31 dimensions", (q[..., :31], k[..., :31], v[..., :31], work), {}),
        ("must be the same", (q, k.float(), v, work), {}),
        ("for 7 tokens", (q, k, v, listed([7], Tiles(4, 4), device)), {}),
        ("go together", (q, k, v, work), {"cos": cos}),
        ("both be tables", (q, k, v, work), {"cos": cos[:, :8], "sin": sin[:, :8]}),
        ("6 tokens and the table 5 rows", (q, k, v, work), {"cos": cos[:5], "sin": sin[:5]}),
        ("window is 0", (q, k, v, work), {"window": 0}),
        ("softcap is -1", (q, k, v, work), {"softcap": -1.0}),
        ("scale is 0", (q, k, v, work), {"scale": 0.0}),
    ]
    for message, args, options in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            short_attention(*args, **options)


def test_views_into_a_buffer_beyond_2_to_the_31(engine: str) -> None:
    """BR-108, BR-110: offsets that 32 bits cannot hold; only the pages touched take memory."""
    if DEVICE == "cuda":
        pytest.skip("the GPU tests do this with real memory")
    stride = 2**30 + 64
    buffer = torch.empty(2 * stride + 4096, dtype=torch.float16)
    q, k, v = (buffer[at:].as_strided((3, h, 32), (stride, 32, 1)) for at, h in ((0, 2), (64, 1), (96, 1)))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape))
    work = listed([3], Tiles(1, 1), "cpu")
    want = short_attention(q.clone(), k.clone(), v.clone(), work)
    assert torch.equal(short_attention(q, k, v, work), want)
