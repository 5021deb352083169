"""Attention of packed short sequences on a real device: its rounding, its memory, sizes beyond 32 bits.

What runs on a device at small sizes is in test_short_attention, which takes the device where there is one.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from padless.kernels.rope import rope_qk  # noqa: E402
from padless.kernels.rope_tables import rope_tables  # noqa: E402
from padless.kernels.short_attention import short_attention, tiles_for  # noqa: E402
from padless.kernels.short_attention_inputs import options_of  # noqa: E402
from padless.kernels.short_attention_ref import attend_ref, attend_ref_back  # noqa: E402
from padless.kernels.short_attention_work import WorkList, work_list, work_list_on_device  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs(
    tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v and the gradient of the result."""
    torch.manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(tokens, h, dim, device="cuda", dtype=dtype) for h in counts]


def listed(lengths: list[int], heads: tuple[int, int], dim: int) -> WorkList:
    return work_list(torch.tensor([0, *lengths]).cumsum(0), tiles_for(*heads, dim)).to("cuda")


def flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: list[int]) -> list[Tensor]:
    """aten's FlashAttention-2: the result, and the gradients of q, k and v."""
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    ends = (bounds, bounds, max(lengths), max(lengths), 0.0, True)
    out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *ends, False)
    back = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *ends, seed, unused)
    return [out, *back]


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim"),
    [((32, 8), 128), ((16, 8), 128), ((14, 2), 64), ((24, 8), 96), ((8, 4), 256), ((4, 4), 128)],
)
@pytest.mark.parametrize(
    "lengths", [[5, 1, 40, 17, 300, 129, 64, 1, 777], [1, 2] * 700, [2111]], ids=["mixed", "tiny", "one"]
)
def test_no_further_from_double_precision_than_flash_attention_2(
    lengths: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    """Rotation, attention, and the way back through both."""
    q, k, v, grad = inputs(sum(lengths), heads, dim, dtype)
    work = listed(lengths, heads, dim)
    cos, sin = rope_tables(max(lengths), dim, dtype=torch.float64, device="cuda")
    exact_args = (work.starts, cos, sin, options_of(q, None, None, None))
    wide = [x.double() for x in (q, k, v)]
    exact = [attend_ref(*wide, *exact_args), *attend_ref_back(*wide, grad.double(), *exact_args)]
    cos, sin = cos.float(), sin.float()
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    theirs = flash(*rope_qk(q, k, cos, sin, cu_seqlens=bounds), v, grad, lengths)
    theirs[1:3] = rope_qk(theirs[1], theirs[2], cos, -sin, cu_seqlens=bounds)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    poison = [torch.full_like(x, torch.nan) for x in (q, q, k, k, k)]  # what empty will likely get
    del poison
    out = short_attention(*leaves, work, cos=cos, sin=sin)
    out.backward(grad)
    for name, got, their, true in zip("oqkv", (out, q.grad, k.grad, v.grad), theirs, exact, strict=True):
        assert got is not None and got.isfinite().all(), name
        assert error(got, true) <= 1.02 * error(their, true) + 1e-6, name


def test_the_way_back_takes_little_memory() -> None:
    """Beside the gradients a number a head and token: no sums in float32, which FlashAttention-2 has."""
    lengths = [160] * 100
    q, k, v, grad = inputs(sum(lengths), (32, 8), 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cos, sin = rope_tables(160, 128, device="cuda")
    out = short_attention(*leaves, listed(lengths, (32, 8), 128), cos=cos, sin=sin)
    grads = sum(x.numel() * x.element_size() for x in leaves)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(grad)
    assert torch.cuda.max_memory_allocated() - before <= grads + 5 * q.shape[0] * q.shape[1] * 4


def test_a_run_gives_the_same_bits_twice() -> None:
    lengths = [3, 700, 130, 61, 1, 90] * 5
    q, k, v, grad = inputs(sum(lengths), (32, 8), 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cos, sin = rope_tables(700, 128, device="cuda")
    work = listed(lengths, (32, 8), 128)
    runs = []
    for _ in range(3):
        out = short_attention(*leaves, work, cos=cos, sin=sin)
        runs.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


@pytest.mark.parametrize(("tokens", "heads"), [(600_000, (32, 8)), (140_000, (128, 8))], ids=str)
def test_beyond_32_bits(tokens: int, heads: tuple[int, int]) -> None:
    """BR-108, BR-110, BR-111: the last sequences are as they are alone, forward and back."""
    lengths = [100] * (tokens // 100)
    q, k, v, grad = inputs(tokens, heads, 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cos, sin = rope_tables(100, 128, device="cuda")
    out = short_attention(*leaves, listed(lengths, heads, 128), cos=cos, sin=sin)
    out.backward(grad)
    alone = [x.detach()[-200:].clone().requires_grad_() for x in leaves]
    want = short_attention(*alone, listed([100, 100], heads, 128), cos=cos, sin=sin)
    want.backward(grad[-200:])
    assert torch.equal(out[-200:], want)
    for x, y in zip(leaves, alone, strict=True):
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad[-200:], y.grad)


def test_a_call_waits_for_nothing() -> None:
    lengths = [70, 130]
    q, k, v, grad = inputs(200, (8, 2), 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cos, sin = rope_tables(130, 128, device="cuda")
    work = listed(lengths, (8, 2), 128)
    first = short_attention(*leaves, work, cos=cos, sin=sin)
    first.backward(grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = short_attention(*leaves, work, cos=cos, sin=sin)
        again.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, first)


def test_a_list_of_tiles_that_the_device_makes_is_that_of_the_host_and_waits_for_nothing() -> None:
    lengths = [3, 700, 130, 61, 1, 90] * 20 + [5] * 300 + [0, 0]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    there, tiles = bounds.cuda(), tiles_for(32, 8, 128)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = work_list_on_device(there, sum(lengths), 700, tiles)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = work_list(bounds, tiles)
    assert torch.equal(found.starts.cpu(), wanted.starts)
    for mine, own in ((found.queries.cpu(), wanted.queries), (found.keys.cpu(), wanted.keys)):
        assert torch.equal(mine[: len(own)], own) and not mine[len(own) :].any()
