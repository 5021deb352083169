"""The rotary kernel on a real device: sizes that the interpreter cannot reach, outputs poisoned beforehand.

What runs on a device at small sizes is in test_rope, which takes the device where there is one.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from rotary import angles_of, rotate_complex  # noqa: E402
from torch import Tensor  # noqa: E402

from padless.kernels.rope import rope_qk, rope_qk_  # noqa: E402
from padless.kernels.rope_inputs import RopeInputs  # noqa: E402
from padless.kernels.rope_ref import rotate_ref  # noqa: E402
from padless.kernels.rope_tables import rope_tables  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def qk(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(tokens, h, dim, device="cuda", dtype=dtype) for h in heads]


def ends(tokens: int) -> Tensor:
    """Tokens to look at: the first, some in the middle, the last."""
    middle = torch.randint(0, tokens, (64,), device="cuda")
    return torch.cat(
        (torch.arange(8, device="cuda"), middle, torch.arange(tokens - 8, tokens, device="cuda"))
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (28, 4), (5, 1)], ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(128, 128), (64, 64), (80, 20), (96, 48)])
def test_the_kernel_is_the_reference_to_the_bit(
    heads: tuple[int, int], dim: int, turned: int, interleaved: bool
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k = (x[None] for x in qk(517, heads, dim, dtype))
        cos, sin = rope_tables(517, turned, device="cuda")
        cu_seqlens = torch.tensor([0, 100, 100, 229, 517], dtype=torch.int32, device="cuda")
        given = RopeInputs(cos, sin, None, cu_seqlens, None, turned, interleaved)
        want = rotate_ref(q, k, given)
        poison = [torch.full_like(x, torch.nan) for x in (q, k)]  # what empty_like will likely get
        del poison
        got = rope_qk(q, k, cos, sin, cu_seqlens=cu_seqlens, interleaved=interleaved, rotary_dim=turned)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
        rope_qk_(q, k, cos, sin, cu_seqlens=cu_seqlens, interleaved=interleaved, rotary_dim=turned)
        assert torch.equal(q, got[0]) and torch.equal(k, got[1])


@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [(140_000, (128, 8), 128), (4_200_000, (4, 1), 128), (524_288, (64, 8), 128), (70_000, (2, 1), 64)],
)
def test_beyond_32_bits_and_beyond_a_grid_axis(tokens: int, heads: tuple[int, int], dim: int) -> None:
    """BR-108, BR-110, BR-111: the last token is right, forward and back."""
    q, k = qk(tokens, heads, dim)
    cos, sin = rope_tables(tokens, dim, device="cuda")
    at = ends(tokens)
    before = q[at].clone(), k[at].clone()
    rope_qk_(q, k, cos, sin)
    angles = angles_of(at[None], dim)
    for x, y in zip(before, (q, k), strict=True):
        want = rotate_complex(x[None], angles)[0]
        assert ((y[at].double() - want).abs() <= 2**-8 * want.abs() + 2e-3).all()
    del x, y
    grads = [torch.randn_like(x) for x in (q, k)]
    leaves = [x.requires_grad_() for x in (q, k)]
    torch.autograd.backward(rope_qk(*leaves, cos, sin), grads)
    for leaf, grad in zip(leaves, grads, strict=True):
        want = rotate_complex(grad[at][None], angles, inverse=True)[0]
        assert leaf.grad is not None
        assert ((leaf.grad[at].double() - want).abs() <= 2**-8 * want.abs() + 2e-3).all()


def test_slices_of_a_fused_projection_beyond_32_bits() -> None:
    """BR-109: bitwise what contiguous copies give."""
    fused = torch.randn(180_000, 3 * 32, 128, device="cuda", dtype=torch.bfloat16)
    q, k = fused[:, :32], fused[:, 32:64]
    v = fused[:, 64:].clone()
    tables = rope_tables(180_000, 128, device="cuda")
    want = rope_qk(q.contiguous(), k.contiguous(), *tables)
    rope_qk_(q, k, *tables)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1]) and torch.equal(fused[:, 64:], v)


def test_in_place_takes_no_memory() -> None:
    q, k = qk(8192, (32, 8), 128)
    tables = rope_tables(8192, 128, device="cuda")
    rope_qk_(q, k, *tables)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rope_qk_(q, k, *tables)
    assert torch.cuda.max_memory_allocated() == before


def test_valid_input_does_not_wait_for_the_device() -> None:
    """BR-162."""
    q, k = qk(1024, (8, 2), 64)
    tables = rope_tables(1024, 64, device="cuda")
    cu_seqlens = torch.tensor([0, 500, 1024], dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        out = rope_qk_(leaves[0] * 1, leaves[1] * 1, *tables, cu_seqlens=cu_seqlens)
        torch.autograd.backward(out, [torch.ones_like(x) for x in out])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


def test_cuda_graphs_capture_it() -> None:
    q, k = qk(300, (8, 2), 64)
    tables = rope_tables(300, 64, device="cuda")
    want = rope_qk(q, k, *tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope_qk(q, k, *tables)
    for x in out:
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(out, want, strict=True))


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_what_was_launched_just_before_is_waited_for(tokens: int) -> None:
    """Kernels and copies: a launch may begin before the last one has ended, and turns what that wrote."""
    q, k = qk(tokens, (32, 8), 128)
    tables = rope_tables(tokens, 128, device="cuda")
    want = rope_qk(q, k, *tables)
    turned = [torch.empty_like(x) for x in (q, k)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, y in zip(turned, (q, k), strict=True):
            x.copy_(y)
        rope_qk_(*turned, *tables)
        again = rope_qk(*turned, *tables)
    for _ in range(20):
        fresh = [x.clone() for x in (q, k)]
        rope_qk_(*fresh, *tables)
        assert all(torch.equal(x, y) for x, y in zip(fresh, want, strict=True))
        for x, y in zip(turned, (q, k), strict=True):
            x.copy_(y)
        rope_qk_(*turned, *tables)
        twice = rope_qk(*turned, *tables)
        assert all(torch.equal(x, y) for x, y in zip(turned, want, strict=True))
        for x in (*turned, *again):
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip((*turned, *again), (*want, *twice), strict=True))
