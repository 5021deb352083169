"""Norm and rotation on a real device: sizes that the interpreter cannot reach, graphs, no waiting."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from padless.kernels.qk_norm_rope import qk_norm_rope  # noqa: E402
from padless.kernels.qk_norm_rope_ref import NormInputs, norm_rotate_ref, norm_rotate_ref_back  # noqa: E402
from padless.kernels.rope_inputs import RopeInputs  # noqa: E402
from padless.kernels.rope_tables import rope_tables  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [(4097, (32, 8), 128), (3001, (14, 2), 64), (20_000, (16, 8), 128), (999, (5, 1), 96)],
)
def test_the_kernels_are_the_reference(tokens: int, heads: tuple[int, int], dim: int, plus_one: bool) -> None:
    """Against float64, no further off than the reference in bfloat16; weights the same bits each run."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (torch.randn(1, tokens, h, dim, **like).requires_grad_() for h in heads)
    weights = [torch.randn(dim, **like).requires_grad_() for _ in range(2)]
    tables = rope_tables(tokens, dim, device="cuda")
    coming = [torch.randn_like(x) for x in (q, k)]
    out = qk_norm_rope(q, k, *weights, *tables, plus_one=plus_one)
    runs = [torch.autograd.grad(out, (q, k, *weights), coming, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    with torch.no_grad():
        given = RopeInputs(*tables, None, None, None, dim, False)
        norm = NormInputs(*weights, 1e-6, plus_one)
        reference = (*norm_rotate_ref(q, k, norm, given), *norm_rotate_ref_back(q, k, *coming, norm, given))
        wide = RopeInputs(*(t.double() for t in tables), None, None, None, dim, False)
        wide_norm = NormInputs(*(w.double() for w in weights), 1e-6, plus_one)
        exact = (
            *norm_rotate_ref(q.double(), k.double(), wide_norm, wide),
            *norm_rotate_ref_back(q.double(), k.double(), *(x.double() for x in coming), wide_norm, wide),
        )
        for x, y, z in zip((*out, *runs[0]), reference, exact, strict=True):
            assert (x.double() - z).norm() <= 1.05 * (y.double() - z).norm()


def test_beyond_32_bits() -> None:
    """BR-108, BR-110: the last tokens are those of the slice alone, forward and back."""
    q, k = (torch.randn(300_000, h, 128, device="cuda", dtype=torch.bfloat16) for h in (64, 1))
    weights = [torch.randn(128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    tables = rope_tables(300_000, 128, device="cuda")
    runs = []
    for rows in (slice(None), slice(-9, None)):
        leaves = [x[rows].detach().requires_grad_() for x in (q, k)]
        ids = torch.arange(300_000, device="cuda")[rows]
        out = qk_norm_rope(*leaves, *weights, *tables, position_ids=ids)
        grads = torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])
        runs.append([x[-9:] for x in (*out, *grads)])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_it_neither_waits_nor_breaks_a_graph() -> None:
    q, k = (torch.randn(300, h, 64, device="cuda") for h in (8, 2))
    weights = [torch.randn(64, device="cuda") for _ in range(2)]
    tables = rope_tables(300, 64, device="cuda")
    want = qk_norm_rope(q, k, *weights, *tables)
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaves = [x.detach().requires_grad_() for x in (q, k, *weights)]
        out = qk_norm_rope(*leaves, *tables)
        torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qk_norm_rope(q, k, *weights, *tables)
    for x in out:
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(out, want, strict=True))


@pytest.mark.parametrize("tokens", [2048, 6000])
def test_what_was_launched_just_before_is_waited_for(tokens: int) -> None:
    """Forward, back and the sum of parts follow each other at once; the same bits in a stream and a graph."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    source = [torch.randn(1, tokens, h, 128, **like) for h in (32, 8)]
    leaves = [torch.empty_like(x).requires_grad_() for x in source]
    leaves += [torch.randn(128, **like).requires_grad_() for _ in range(2)]
    tables, coming = rope_tables(tokens, 128, device="cuda"), [torch.randn_like(x) for x in source]

    def both_ways() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            for x, y in zip(leaves, source, strict=False):
                x.copy_(y)
        out = qk_norm_rope(*leaves, *tables)
        return (*(x.detach() for x in out), *torch.autograd.grad(out, leaves, coming))

    want = both_ways()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_ways()
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(both_ways(), want, strict=True))
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, want, strict=True))
