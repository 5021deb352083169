"""Rotary embeddings on a GPU: checks padless' kernel, then times it beside its peers and a plain copy.

    python scripts/bench_rope.py [--tiles] [--cases N | --norms] [--unsloth FOLDER]

Every arm turns the same packed rows. `eager` is what a call costs in a loop of calls, Python included;
`graph` the kernels alone, replayed. Enough sets of inputs take turns that no cache holds them. The copy
moves q's and k's bytes in the same run: the fastest of PyTorch's, of a Triton kernel's and of one in place.
`backward` is both ways less forward; for norm and rotation it has the weights' gradients too, except in arms
named frozen. FOLDER holds Unsloth's unpacked wheels (peer_unsloth.py). A peer that is not there, fails, or
does not agree with padless is left out, and said so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from bench_clock import Arm, time_eager, time_graph
from bench_host import host_us
from bench_results import Results
from peer_unsloth import UnslothKernels, load_unsloth
from torch import Tensor

from padless.kernels import rope_launch
from padless.kernels.qk_norm_rope import qk_norm_rope
from padless.kernels.rope import rope_qk, rope_qk_
from padless.kernels.rope_inputs import RopeInputs
from padless.kernels.rope_ref import rotate_ref
from padless.kernels.rope_tables import rope_tables

CASES = (
    (2_048, 32, 8, 128),
    (8_192, 32, 8, 128),
    (32_768, 32, 8, 128),
    (131_072, 32, 8, 128),
    (2_048, 64, 8, 128),
    (8_192, 64, 8, 128),
    (32_768, 64, 8, 128),
    (131_072, 64, 8, 128),
    (524_288, 64, 8, 128),
    (32_768, 14, 2, 64),
)
TILES = tuple(
    (t, h, w) for t in (1, 2, 4, 8, 16) for h in (2, 4, 8, 16) for w in (1, 2, 4) if t * h in (8, 16, 32, 64)
)
BLOCKS = ((1024, 2), (2048, 4), (4096, 4))
"""Elements and warps of a program that copies."""
LENGTH = 777  # tokens of a sequence: an alpaca row of the longer sort
CACHE = 512 * 2**20
NORM_CASES = ((2_048, 32, 8, 128), (8_192, 32, 8, 128), (32_768, 32, 8, 128))  # Qwen3-8B


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(source, target, size, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """The ceiling in Triton: a program moves BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


class Inputs:
    """One set: q and k of a packed row as a projection gives them, and all that any arm asks for."""

    def __init__(self, tokens: int, q_heads: int, k_heads: int, dim: int) -> None:
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = torch.randn(1, tokens, q_heads, dim, **like)
        self.k = torch.randn(1, tokens, k_heads, dim, **like)
        self.copies = [torch.empty(0), torch.empty(0)]

    def renew(self) -> None:
        """Draws q and k again: rows in bf16 stretch what is turned in place, 33,000 times to inf."""
        self.q.normal_()
        self.k.normal_()


class Shared:
    """Positions and tables, the same for all sets."""

    def __init__(self, tokens: int, dim: int) -> None:
        bounds = [*range(0, tokens, LENGTH), tokens]
        self.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        self.position_ids = (torch.arange(tokens, device="cuda") % LENGTH)[None]
        self.cos, self.sin = rope_tables(8192, dim, device="cuda")
        rows = [t[self.position_ids].repeat(1, 1, 2).bfloat16() for t in (self.cos, self.sin)]
        self.row_cos, self.row_sin = rows
        # Unsloth looks positions up itself: int32, as its kernel reads them, spares it a conversion a call.
        self.whole_tables = [t.repeat(1, 2).bfloat16() for t in (self.cos, self.sin)]
        self.short_ids = self.position_ids.int()


def arms_for(shared: Shared, unsloth: UnslothKernels | None = None) -> dict[str, Arm]:
    """Name -> call on one set of inputs."""
    cos, sin, row_cos, row_sin = shared.cos, shared.sin, shared.row_cos, shared.row_sin
    cu_seqlens, ids = shared.cu_seqlens, shared.position_ids
    arms: dict[str, Arm] = {
        "padless cu_seqlens": lambda x: rope_qk_(x.q, x.k, cos, sin, cu_seqlens=cu_seqlens),
        "padless position_ids": lambda x: rope_qk_(x.q, x.k, cos, sin, position_ids=ids),
        "padless gathered": lambda x: rope_qk_(x.q, x.k, row_cos, row_sin),
        "padless new tensors": lambda x: rope_qk(x.q, x.k, cos, sin, cu_seqlens=cu_seqlens),
    }
    try:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as hf

        # The plain function: with `kernels` installed transformers wraps it.
        compiled = torch.compile(hf, dynamic=False)
        arms["HF eager"] = lambda x: hf(x.q.transpose(1, 2), x.k.transpose(1, 2), row_cos, row_sin)
        arms["HF compiled"] = lambda x: compiled(x.q.transpose(1, 2), x.k.transpose(1, 2), row_cos, row_sin)
    except ImportError as error:
        print(f"left out: HF ({error})")
    try:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb as liger

        arms["Liger"] = lambda x: liger(x.q.transpose(1, 2), x.k.transpose(1, 2), row_cos, row_sin)
    except ImportError as error:
        print(f"left out: Liger ({error})")
    if unsloth:
        turn, tables, short = unsloth.rope, shared.whole_tables, shared.short_ids
        arms["Unsloth"] = lambda x: turn(x.q.transpose(1, 2), x.k.transpose(1, 2), *tables, short)
    return arms


@contextmanager
def left_out(name: str, arm: str) -> Iterator[None]:
    """A peer that fails is said and the run goes on; padless' own failures end it."""
    try:
        yield
    except Exception as error:
        if arm.startswith("padless"):
            raise
        print(f"left out: {arm} at {name} ({type(error).__name__}: {error})", flush=True)


def agree(arm: Arm, padless: Arm, one: Inputs) -> None:
    """Raises ValueError where an arm gives something else than padless, both on a copy of `one`."""
    found: list[Any] = [call(argparse.Namespace(q=one.q.clone(), k=one.k.clone())) for call in (padless, arm)]
    for want, got in zip(*found, strict=True):
        got = (got if got.shape == want.shape else got.transpose(1, 2))[:, :4096].float()
        want = want[:, :4096].float()
        apart = float((got - want).norm() / want.norm())
        if not apart < 0.02:  # bf16 rounds by 0.2 %
            raise ValueError(f"differs from padless by {apart:.2g} of its norm")


def check(shared: Shared, one: Inputs) -> None:
    """padless against its reference, to the bit, before any clock starts; raises AssertionError."""
    q, k = one.q[:, :4096].clone(), one.k[:, :4096].clone()
    ids = shared.position_ids[:, : q.shape[1]].contiguous()
    dim = q.shape[-1]
    want = rotate_ref(q, k, RopeInputs(shared.cos, shared.sin, ids, None, None, dim, False))
    bounds = shared.cu_seqlens.clamp(max=q.shape[1])
    for name, got in {
        "position_ids": rope_qk(q, k, shared.cos, shared.sin, position_ids=ids),
        "cu_seqlens": rope_qk(q, k, shared.cos, shared.sin, cu_seqlens=bounds),
        "in place": rope_qk_(q.clone(), k.clone(), shared.cos, shared.sin, position_ids=ids),
    }.items():
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), name
    exact = q.double(), k.double()
    wide = rotate_ref(
        *exact, RopeInputs(shared.cos.double(), shared.sin.double(), ids, None, None, dim, False)
    )
    errors = [(x.double() - y).norm() / y.norm() for x, y in zip(want, wide, strict=True)]
    rounding = [(y.bfloat16().double() - y).norm() / y.norm() for y in wide]
    print("error against float64, and of rounding alone:", [f"{float(e):.2e}" for e in (*errors, *rounding)])


def peak_bytes(call: Callable[[], object]) -> int:
    """Memory that a call allocates on top of what there is."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def backward_bytes(shared: Shared, one: Inputs) -> int:
    """Memory that the backward pass allocates in place: a leaf + 0 stands for a projection's output."""
    leaves = [x.clone().requires_grad_() for x in (one.q, one.k)]
    turned = rope_qk_(
        leaves[0] + 0, leaves[1] + 0, shared.cos, shared.sin, cu_seqlens=shared.cu_seqlens, reuse_grads=True
    )
    sent = [torch.randn_like(x) for x in turned]
    return peak_bytes(lambda: torch.autograd.grad(turned, leaves, sent, retain_graph=True))


def copy_ceiling(name: str, pairs: list[Any], results: Results) -> float:
    """Microseconds of the fastest copy of one buffer of each pair into the other, or onto itself."""

    def by_triton(block: int, warps: int, *, in_place: bool) -> Arm:
        def copy(x: Any) -> None:
            grid = (triton.cdiv(x[0].numel(), block),)
            copy_kernel[grid](x[0], x[0] if in_place else x[1], x[0].numel(), BLOCK=block, num_warps=warps)

        return copy

    copies: dict[str, Arm] = {
        "copy by torch": lambda x: x[1].copy_(x[0]),
        **{f"copy by Triton {b} {w} warps": by_triton(b, w, in_place=False) for b, w in BLOCKS},
        **{f"copy in place {b} {w} warps": by_triton(b, w, in_place=True) for b, w in BLOCKS},
    }
    times = {arm: time_graph(call, pairs, 0.1) for arm, call in copies.items()}
    for arm, took in times.items():
        results.add(name, arm, "graph", took, "us")
    return min(times.values())


def norm_arms(
    shared: Shared, weights: list[torch.nn.Parameter], unsloth: UnslothKernels | None
) -> dict[str, Arm]:
    """Name -> norm and rotation of one set of inputs."""
    cos, sin, cu_seqlens = shared.cos, shared.sin, shared.cu_seqlens
    arms: dict[str, Arm] = {
        "padless": lambda x: qk_norm_rope(x.q, x.k, *weights, cos, sin, cu_seqlens=cu_seqlens),
        "padless gathered": lambda x: qk_norm_rope(x.q, x.k, *weights, shared.row_cos, shared.row_sin),
    }
    try:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
    except ImportError as error:
        print(f"left out: HF ({error})")
        return arms
    norms = [Qwen3RMSNorm(len(w)) for w in weights]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight = weight

    def hf(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(
            norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), shared.row_cos, shared.row_sin
        )
        return turned

    compiled = torch.compile(hf, dynamic=False)
    arms["HF eager"] = lambda x: hf(x.q, x.k)
    arms["HF compiled"] = lambda x: compiled(x.q, x.k)
    if unsloth:
        turn, tables, short = unsloth.norm_rope, shared.whole_tables, shared.short_ids
        frozen = [Qwen3RMSNorm(len(w)) for w in weights]
        for norm, weight in zip(frozen, weights, strict=True):
            norm.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        arms["Unsloth trained"] = lambda x: turn(*norms, x.q, x.k, *tables, short)
        arms["Unsloth frozen"] = lambda x: turn(*frozen, x.q, x.k, *tables, short)
    return arms


def both_ways(arm: Arm, grads: tuple[Tensor, ...], weights: list[torch.nn.Parameter]) -> Arm:
    """The arm, and then its gradients for q, k and the weights."""

    def run(x: Any) -> None:
        q, k = x.q.detach().requires_grad_(), x.k.detach().requires_grad_()
        x = argparse.Namespace(q=q, k=k)
        out: Any = arm(x)
        own = [g if g.shape == y.shape else g.transpose(1, 2) for g, y in zip(grads, out, strict=True)]
        torch.autograd.grad(out, [q, k, *weights], own)

    return run


def bench_norm(case: tuple[int, int, int, int], results: Results, *, unsloth: UnslothKernels | None) -> None:
    """Rows of norm and rotation: forward, and both ways with the weights' gradients."""
    tokens, q_heads, k_heads, dim = case
    name = f"norm+rope T={tokens:,} {q_heads}/{k_heads} d={dim}"
    sets = [Inputs(*case) for _ in range(4)]
    shared = Shared(tokens, dim)
    torch._dynamo.reset()
    weights = [torch.nn.Parameter(torch.randn(dim).cuda().bfloat16()) for _ in range(2)]
    grads = tuple(torch.randn_like(x) for x in (sets[0].q, sets[0].k))
    arms = norm_arms(shared, weights, unsloth)
    for arm, call in arms.items():
        with left_out(name, arm):
            with torch.no_grad():
                agree(call, arms["padless"], sets[0])
                results.add(name, arm, "eager", time_eager(call, sets), "us")
                forward = time_graph(call, sets)
                results.add(name, arm, "graph", forward, "us")
                if tokens <= 2_048:
                    results.add(name, arm, "host", host_us(partial(call, sets[0])), "us")
            both = both_ways(call, grads, [] if arm.endswith("frozen") else weights)
            results.add(name, arm, "both ways eager", time_eager(both, sets), "us")
            both_graph = time_graph(both, sets)
            results.add(name, arm, "both ways graph", both_graph, "us")
            results.add(name, arm, "backward", both_graph - forward, "us")


def bench(
    case: tuple[int, int, int, int], results: Results, *, tiles: bool, unsloth: UnslothKernels | None
) -> None:
    """Rows of one case: every arm, the copy, padless' share of it, memory."""
    tokens, q_heads, k_heads, dim = case
    name = f"T={tokens:,} {q_heads}/{k_heads} d={dim}"
    size = tokens * (q_heads + k_heads) * dim * 2
    sets = [Inputs(*case) for _ in range(max(2, min(24, -(-CACHE // size))))]
    shared = Shared(tokens, dim)
    torch._dynamo.reset()  # after eight shapes it would give up compiling, without a word
    check(shared, sets[0])
    for one in sets:
        one.copies = [torch.empty_like(one.q), torch.empty_like(one.k)]

    def copy(x: Inputs) -> None:
        x.copies[0].copy_(x.q)
        x.copies[1].copy_(x.k)

    flat = [torch.empty(size // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2 * len(sets))]
    pairs: list[Any] = list(zip(flat[::2], flat[1::2], strict=True))
    for source, _ in pairs:
        source.normal_()
    ceiling = copy_ceiling(name, pairs, results)
    del flat, pairs
    results.add(name, "copy of q, of k", "graph", time_graph(copy, sets), "us")
    for one in sets:
        one.copies = []
    if tiles:
        usual = rope_launch.tile_for
        for tile in TILES:
            rope_launch.tile_for = lambda *_, tile=tile: rope_launch.Tile(*tile)
            rope_launch._LAUNCHES.clear()
            took = time_graph(arms_for(shared)["padless cu_seqlens"], sets)
            results.add(name, "padless tile {}x{} {} warps".format(*tile), "of copy", ceiling / took, "share")
        rope_launch.tile_for = usual
        rope_launch._LAUNCHES.clear()
        return
    arms = arms_for(shared, unsloth)
    for arm, call in arms.items():
        if tokens > 131_072 and arm.startswith("HF"):
            continue
        with left_out(name, arm):
            for one in sets:
                one.renew()
            agree(call, arms["padless new tensors"], sets[0])
            results.add(name, arm, "eager", time_eager(call, sets), "us")
            graph = time_graph(call, sets)
            results.add(name, arm, "graph", graph, "us")
            results.add(name, arm, "of copy", ceiling / graph, "share")
            if tokens <= 2_048:
                results.add(name, arm, "host", host_us(partial(call, sets[0])), "us")
    results.add(
        name, "padless cu_seqlens", "memory", peak_bytes(lambda: arms["padless cu_seqlens"](sets[0])), "B"
    )
    results.add(name, "padless reuse_grads", "memory", backward_bytes(shared, sets[0]), "B")
    back: Arm = lambda x: both_ways(arms["padless new tensors"], (x.q, x.k), [])(x)  # noqa: E731
    took = time_graph(back, sets) - time_graph(arms["padless new tensors"], sets)
    results.add(name, "padless new tensors", "backward", took, "us")
    if tokens <= 2_048:
        leaves: list[Tensor] = [x.clone().requires_grad_() for x in (sets[0].q, sets[0].k)]
        views = [x.view(x.shape) for x in leaves]
        with_grad: Arm = lambda _: rope_qk(*views, shared.cos, shared.sin, cu_seqlens=shared.cu_seqlens)  # noqa: E731
        results.add(name, "padless under autograd", "host", host_us(partial(with_grad, sets[0])), "us")


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="time tiles instead of peers; without norms")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--cases", type=int, nargs="*", help="numbers of the cases, from 0; without norms")
    some.add_argument("--norms", action="store_true", help="norm and rotation alone")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "bench_rope.jsonl")
    parser.add_argument("--unsloth", type=Path, help="folder of Unsloth's unpacked wheels")
    options = parser.parse_args()
    unsloth = None
    try:
        unsloth = load_unsloth(options.unsloth) if options.unsloth else None
        print("" if unsloth else "left out: Unsloth (no --unsloth FOLDER)")
    except ImportError as error:
        print(f"left out: Unsloth ({error})")
    begin = time.perf_counter()
    results = Results(bench="bench_rope", path=options.output)
    every = [] if options.norms else range(len(CASES))
    for number in options.cases if options.cases is not None else every:
        bench(CASES[number], results, tiles=options.tiles, unsloth=unsloth)
        torch.cuda.empty_cache()
    if options.cases is None and not options.tiles:
        for case in NORM_CASES:
            bench_norm(case, results, unsloth=unsloth)
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
