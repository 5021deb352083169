"""Varlen attention on a real device: every backend at hand against float64, forward and backward.

The reference is `sdpa` in float64, one sequence after the other, which test_attention holds against a
slower one. FlexAttention and FlashAttention-4 compile for seconds a kind, so they get fewer kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attending import bounds_of  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from padless.runtime.attention import (  # noqa: E402
    BACKENDS,
    boundaries_of,
    by_lengths,
    short,
    varlen_attention,
)
from padless.runtime.attention.boundaries import copied_from  # noqa: E402
from padless.runtime.errors import BackendError  # noqa: E402
from padless.runtime.varlen_batch import VarlenBatch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [5, 128, 1, 300, 129, 17, 64, 700]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "both ways": {"causal": False, "scale": 0.05},
    "window": {"window": 50},
    "softcap": {"softcap": 5.0},
    "sinks and window": {"sinks": True, "window": 130},
    "deterministic": {"deterministic": True},
}
COMPILING = ("flex", "flash_attn_4")
KERNELS = ("short", "flash", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex", "efficient", "xformers")


def qkv(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    made = [torch.randn(tokens, h, dim, device="cuda").to(dtype) for h in (heads[0], heads[1], heads[1])]
    return [x.requires_grad_() for x in made]


def run(leaves: list[Tensor], grad: Tensor, lengths: list[int], **features: Any) -> list[Tensor]:
    """Output and gradients; the last leaf is sinks where there are four."""
    if len(leaves) == 4:
        features["sinks"] = leaves[3]
    bounds = bounds_of(lengths, "cuda")
    out = varlen_attention(*leaves[:3], bounds, max(lengths), **features)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def recorded(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The same, which notes the module that does it."""

    def noting(*given: Any) -> Any:
        calls.append(function.__module__)
        return function(*given)

    return noting


def check(backend: str, leaves: list[Tensor], lengths: list[int] = LENGTHS, **features: Any) -> None:
    """The backend against float64, or skips where it says that it cannot."""
    features = dict(features)
    if features.pop("sinks", False):
        leaves = [*leaves, torch.randn(leaves[0].shape[1], device="cuda", requires_grad=True)]
    grad = torch.randn_like(leaves[0])
    poison = [torch.full_like(x, torch.nan) for x in leaves]  # what empty_like will likely get
    del poison
    try:
        got = run(leaves, grad, lengths, backend=backend, **features)
    except BackendError as reason:
        pytest.skip(str(reason))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    features.pop("deterministic", None)
    want = run(wide, grad.double(), lengths, backend="sdpa", **features)
    bound = 1e-2 if leaves[0].dtype == torch.bfloat16 else 2e-3
    assert all(error(x, y) < bound for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("backend", KERNELS)
def test_grouped_heads_and_every_feature(backend: str, features: str) -> None:
    if backend == "flex" and features == "both ways":
        pytest.skip("compiles for long")
    check(backend, qkv(sum(LENGTHS), (8, 2), 128), **FEATURES[features])


@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("backend", [name for name in KERNELS if name not in COMPILING])
def test_head_sizes_and_empty_sequences_at_the_end(backend: str, dim: int) -> None:
    """BR-163, BR-164: boundaries filled up as pad_batch does it, at the head sizes that crashed."""
    check(backend, qkv(sum(LENGTHS), (6, 2), dim, torch.float16), [*LENGTHS, 0, 0, 0])


@pytest.mark.parametrize("backend", KERNELS)
def test_sequences_of_one_token(backend: str) -> None:
    """BR-165: each output is its value."""
    q, k, v = qkv(3, (6, 2), 64)
    try:
        out = varlen_attention(q, k, v, bounds_of([1, 1, 1], "cuda"), 1, backend=backend)
    except BackendError as reason:
        pytest.skip(str(reason))
    assert torch.equal(out, v.repeat_interleave(3, 1))
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_float32_and_large_heads_go_to_the_efficient_kernel() -> None:
    check("auto", qkv(sum(LENGTHS), (4, 2), 64, torch.float32))
    check("efficient", qkv(sum(LENGTHS), (2, 1), 512, torch.float16), window=40)


@pytest.mark.parametrize("backend", KERNELS)
def test_views_of_a_fused_projection(backend: str) -> None:
    fused = torch.randn(1, 12, sum(LENGTHS), 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    leaves = [x[0].transpose(0, 1) for x in fused.split([8, 2, 2], 1)]
    check(backend, leaves)


@pytest.mark.parametrize(
    "backend", ["short", "flash", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex"]
)
def test_deterministic_gradients_are_the_same_to_the_bit(backend: str) -> None:
    leaves = qkv(sum(LENGTHS) * 8, (8, 2), 128)
    grad = torch.randn_like(leaves[0])
    lengths = [x * 8 for x in LENGTHS]
    try:
        runs = [run(leaves, grad, lengths, backend=backend, deterministic=True) for _ in range(4)]
    except BackendError as reason:
        pytest.skip(str(reason))
    assert all(torch.equal(x, y) for again in runs[1:] for x, y in zip(again, runs[0], strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "flex", "flash_attn_4"])
def test_a_step_with_new_boundaries_does_not_wait_for_the_device(backend: str) -> None:
    """BR-162, BR-171."""
    leaves = qkv(640, (8, 2), 128)
    grad = torch.ones_like(leaves[0])
    batches = [bounds_of(x, "cuda") for x in ([300, 340], [320, 320])]

    def step(bounds: Tensor) -> Tensor:
        outs = [varlen_attention(*leaves, bounds, 340, backend=backend) for _ in range(2)]
        torch.autograd.grad(outs, leaves, [grad, grad])
        return outs[0]

    try:
        step(batches[0])
    except BackendError as reason:
        pytest.skip(str(reason))
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step(batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


@pytest.mark.parametrize("long", [[], [4_096, 4_096]], ids=["short", "long ones first"])
def test_what_auto_takes_for_known_lengths_is_right_and_does_not_wait(long: list[int]) -> None:
    """BR-171: our kernels where they were measured, for the row or its short sequences."""
    rows = [[*long, *[length] * (9_000 // length)] for length in (100, 90)]
    leaves = [qkv(sum(lengths), (8, 2), 128) for lengths in rows]
    grads = [torch.randn_like(x[0]) for x in leaves]
    bounds = []
    for lengths in rows:
        bounds.append(bounds_of(lengths, "cuda"))
        copied_from(bounds[-1], bounds_of(lengths))

    def step(row: int) -> list[Tensor]:
        out = varlen_attention(*leaves[row], bounds[row], max(rows[row]))
        return [out, *torch.autograd.grad(out, leaves[row], grads[row])]

    step(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = [x.detach().double().requires_grad_() for x in leaves[1]]
    want = run(wide, grads[1].double(), rows[1], backend="sdpa")
    assert all(error(x, y) < 1e-2 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["auto", "short", "flash", "efficient", "flex", "flash_attn_4"])
def test_compiled_without_a_graph_break(backend: str) -> None:
    """BR-170."""
    leaves = qkv(sum(LENGTHS), (8, 2), 128)
    grad = torch.randn_like(leaves[0])

    @torch.compile(fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return varlen_attention(q * 1.0, k, v, bounds, longest, backend=backend, window=100)

    try:
        out = compiled(*leaves, bounds_of(LENGTHS, "cuda"), max(LENGTHS))
    except Exception as refused:
        if "cannot do this" in str(refused):
            pytest.skip(str(refused))
        raise
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    want = run(leaves, grad, LENGTHS, backend=backend, window=100)
    assert all(error(x, y) < 5e-3 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("known", [True, False], ids=["short", "flash"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_compiled_auto_looks_at_the_lengths_when_it_runs(
    known: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program for all batches, each by the faster kernel; nobody waits (BR-170, BR-171)."""
    taken: list[str] = []
    for kernel in (by_lengths.flash, by_lengths):
        for name in ("kept_forward", "kept_backward"):
            monkeypatch.setattr(kernel, name, recorded(getattr(kernel, name), taken))
    programs = CompileCounterWithBackend("inductor")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=programs)
    def compiled(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return varlen_attention(q * 1.0, k, v, bounds, longest, deterministic=deterministic)

    leaves = qkv(9_000, (8, 2), 128)
    grad = torch.randn_like(leaves[0])
    for length, mode in ((100, "default"), (90, "default"), (75, "error")):
        lengths = [length] * (9_000 // length)
        bounds = bounds_of(lengths)
        batch = VarlenBatch(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).to("cuda")
        bounds = batch["cu_seq_lens_q"] if known else bounds.cuda()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = compiled(*leaves, bounds, 100)
            got = [out, *torch.autograd.grad(out, leaves, grad)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert set(taken) == {short.__name__ if known else by_lengths.flash.__name__} and len(taken) == 6
    assert programs.frame_count == 2  # from the second on a program is for any number of sequences
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = run(wide, grad.double(), lengths, backend="sdpa")
    assert all(error(x, y) < 1e-2 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("there", [True, False], ids=["short there", "flash there"])
def test_either_goes_back_from_what_the_other_left(there: bool) -> None:
    """Lengths that are known on the way there are not always on the way back."""
    lengths = [100, 300, 1, 50] * 20
    leaves = qkv(sum(lengths), (8, 2), 128)
    grad = torch.randn_like(leaves[0])
    told, untold = bounds_of(lengths, "cuda"), bounds_of(lengths, "cuda")
    copied_from(told, bounds_of(lengths))
    first, second = (told, untold) if there else (untold, told)
    rest = 300, "auto", 128**-0.5, None, None, False
    out, lse = torch.ops.padless.attention_by_lengths(*(x.detach() for x in leaves), first, *rest)
    back = torch.ops.padless.attention_by_lengths_backward
    got = [out, *back(grad, *(x.detach() for x in leaves), out, lse, second, *rest)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = run(wide, grad.double(), lengths, backend="sdpa")
    assert all(error(x, y) < 1e-2 for x, y in zip(got, want, strict=True))


def test_deterministic_and_sinks_compile_too() -> None:
    leaves = [*qkv(sum(LENGTHS), (8, 2), 128), torch.randn(8, device="cuda", requires_grad=True)]
    grad = torch.randn_like(leaves[0])
    compiled = torch.compile(varlen_attention, fullgraph=True)
    out = compiled(
        *leaves[:3], bounds_of(LENGTHS, "cuda"), 700, sinks=leaves[3], deterministic=True, backend="flash"
    )
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    want = run(leaves, grad, LENGTHS, backend="flash", deterministic=True)
    assert all(error(x, y) < 5e-3 for x, y in zip(got, want, strict=True))


def test_cuda_graphs_capture_it() -> None:
    q, k, v = (x.detach() for x in qkv(sum(LENGTHS), (8, 2), 128))
    bounds = bounds_of(LENGTHS, "cuda")
    want = varlen_attention(q, k, v, bounds, 700)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_attention(q, k, v, bounds, 700)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)


def test_a_row_beyond_32_bits_forward() -> None:
    """More than 2**31 elements of q: the last sequence is what it is alone."""
    tokens = 2**31 // (32 * 128) + 5_000
    q, k, v = (x.detach() for x in qkv(tokens, (32, 8), 128))
    lengths = [4_096] * (tokens // 4_096)
    lengths.append(tokens - sum(lengths))
    out = varlen_attention(q, k, v, bounds_of(lengths, "cuda"), 4_096, backend="flash")
    last = lengths[-1]
    alone = varlen_attention(
        *(x[-last:] for x in (q, k, v)), bounds_of([last], "cuda"), last, backend="flash"
    )
    assert torch.equal(out[-last:], alone)


def test_boundaries_on_another_device_are_refused() -> None:
    q, k, v = qkv(8, (2, 2), 64)
    with pytest.raises(ValueError, match="cu_seqlens on cpu"):
        varlen_attention(q, k, v, bounds_of([8]), 8)


def test_lengths_are_read_once_a_batch_from_a_device_without_a_copy() -> None:
    bounds = torch.tensor([0, 4, 4, 8], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] repeats 4"):
        boundaries_of(bounds, 4, 8).lengths()
    assert boundaries_of(bounds_of([3, 5], "cuda"), 5, 8).lengths() == [3, 5]


def test_every_backend_is_here_or_says_why() -> None:
    q, k, v = qkv(8, (2, 2), 64)
    want = varlen_attention(q, k, v, bounds_of([8], "cuda"), 8, backend="sdpa")
    here = []
    for name in BACKENDS:
        try:
            got = varlen_attention(q, k, v, bounds_of([8], "cuda"), 8, backend=name)
        except BackendError as reason:
            assert name in str(reason) and "auto" in str(reason)
            continue
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        here.append(name)
    assert {"flash", "efficient", "sdpa"} <= {*here}  # what torch itself has
