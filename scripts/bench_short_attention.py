"""Rotation and attention of packed rows on a GPU: our kernels, which do both, against RoPE and a library.

    python scripts/bench_short_attention.py [--seconds S] [--output FILE]

The library is FlashAttention-2 as PyTorch bundles it; it gets q and k turned in place by our rotary kernel
in one launch (the fastest of those in bench_rope), and its gradients turned back in place. `forward` keeps
nothing; `both ways` is forward with what backward needs, then backward: kernels one after the other, by the
device's clock (triton's do_bench, calls queued ahead). `called alone` is the same from an idle device,
through autograd where there is one: Python's time shows where it is longer. `extra memory` is the peak of
the way back beyond the three gradients. The floor is the bytes that must move (q, k, v in, out and
log-sum-exp out; backward these and the gradient in, three out) over the speed of a copy in the same run.
Errors are against float64, relative to the norm.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_host import host_us
from bench_results import Results
from torch import Tensor
from triton.testing import do_bench

from padless.kernels.rope import rope_qk_
from padless.kernels.rope_tables import rope_tables
from padless.kernels.short_attention import short_attention, tiles_for
from padless.kernels.short_attention_inputs import Saved, options_of
from padless.kernels.short_attention_launch import backward, forward
from padless.kernels.short_attention_ref import attend_ref, attend_ref_back
from padless.kernels.short_attention_work import work_list

Run = Callable[[], object]


def lengths_about(tokens: int, median: float, spread: float) -> list[int]:
    """Lognormal lengths that fill a row exactly; always the same."""
    draw = random.Random(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(8, round(draw.lognormvariate(math.log(median), spread)))))
    return lengths


ALPACA = lengths_about(16_384, 130, 0.65)
CASES: dict[str, tuple[list[int], int, int, int]] = {
    "alpaca-like T=16,384 32/8 d=128": (ALPACA, 32, 8, 128),
    "alpaca-like T=65,536 32/8 d=128": (lengths_about(65_536, 130, 0.65), 32, 8, 128),
    "about 400 T=32,768 32/8 d=128": (lengths_about(32_768, 400, 0.3), 32, 8, 128),
    "about 1,000 T=32,768 32/8 d=128": (lengths_about(32_768, 1_000, 0.1), 32, 8, 128),
    "about 3,000 T=32,768 32/8 d=128": (lengths_about(32_768, 3_000, 0.1), 32, 8, 128),
    "4 x 8,192 T=32,768 32/8 d=128": ([8_192] * 4, 32, 8, 128),
    "alpaca-like T=16,384 16/8 d=128": (ALPACA, 16, 8, 128),
    "alpaca-like T=16,384 32/32 d=128": (ALPACA, 32, 32, 128),
    "alpaca-like T=16,384 14/2 d=64": (ALPACA, 14, 2, 64),
    "alpaca-like T=16,384 32/8 d=64": (ALPACA, 32, 8, 64),
    "alpaca-like T=16,384 24/8 d=96": (ALPACA, 24, 8, 96),
    "alpaca-like T=16,384 16/8 d=256": (ALPACA, 16, 8, 256),
}


class Case:
    """Inputs of one row, and each arm's calls."""

    def __init__(self, lengths: list[int], q_heads: int, k_heads: int, dim: int) -> None:
        self.tokens, self.longest, self.heads, self.dim = sum(lengths), max(lengths), (q_heads, k_heads), dim
        torch.manual_seed(0)
        shapes = [(self.tokens, h, dim) for h in (q_heads, k_heads, k_heads, q_heads)]
        self.q, self.k, self.v, self.grad = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes
        )
        self.ends = torch.tensor([0, *lengths]).cumsum(0)
        self.bounds = self.ends.int().cuda()
        self.cos, self.sin = rope_tables(self.longest, dim, device="cuda")
        self.back = -self.sin
        self.work = work_list(self.ends, tiles_for(q_heads, k_heads, dim)).to("cuda")
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v)]
        self.given = [x.detach().clone() for x in self.leaves]  # q and k of the libraries turn in place

    def ours(self) -> Tensor:
        """Under autograd where it is on."""
        return short_attention(*self.leaves, self.work, cos=self.cos, sin=self.sin)

    def ours_both(self) -> tuple[Tensor, ...]:
        """The result and the gradients of q, k, v."""
        out = self.ours()
        return (out, *torch.autograd.grad(out, self.leaves, self.grad))

    def kernels(self, *, keep: bool) -> Saved:
        """Without autograd."""
        q, k, v = (x.detach() for x in self.leaves)
        return forward(q, k, v, self.work, self.cos, self.sin, options_of(q, None, None, None), keep=keep)

    def kernels_both(self) -> tuple[Tensor, ...]:
        """Without autograd."""
        saved, v = self.kernels(keep=True), self.v.detach()
        options = options_of(v, None, None, None)
        return saved.out, *backward(saved, v, self.grad, self.work, self.cos, self.sin, options)

    def flash(self) -> tuple[Tensor, ...]:
        """RoPE in place, then FlashAttention-2 as PyTorch bundles it: q, k, and what backward takes."""
        q, k, v = self.given
        rope_qk_(q, k, self.cos, self.sin, cu_seqlens=self.bounds)
        ends = (self.bounds, self.bounds, self.longest, self.longest, 0.0, True)
        out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *ends, False)
        return q, k, v, out, lse, *ends, seed, unused

    def flash_both(self) -> tuple[Tensor, ...]:
        """The result and the gradients of q, k, v."""
        q, k, v, out, lse, *rest = self.flash()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(self.grad, q, k, v, out, lse, *rest)
        rope_qk_(dq, dk, self.cos, self.back, cu_seqlens=self.bounds)
        return out, dq, dk, dv

    def restore(self) -> None:
        """q and k of the libraries as they were given."""
        for x, y in zip(self.given, self.leaves, strict=True):
            x.copy_(y.detach())

    def errors(self) -> dict[str, list[float]]:
        """Of the result and the gradients, relative to their norms in float64."""
        cos, sin = rope_tables(self.longest, self.dim, dtype=torch.float64, device="cuda")
        rest = (self.work.starts, cos, sin, options_of(self.q, None, None, None))
        wide = [x.detach().double() for x in self.leaves]
        exact = (attend_ref(*wide, *rest), *attend_ref_back(*wide, self.grad.double(), *rest))
        self.restore()
        arms = {"padless short": self.ours_both(), "rope + flash": self.flash_both()}
        self.restore()
        return {
            arm: [float((x.detach().double() - y).norm() / y.norm()) for x, y in zip(got, exact, strict=True)]
            for arm, got in arms.items()
        }

    def floors(self, copied: float) -> dict[str, float]:
        """Microseconds that the bytes take."""
        (heads, groups), token = self.heads, self.dim * 2
        read, out, log_sums = (heads + 2 * groups) * token, heads * token, heads * 4
        forward = self.tokens * (read + out + log_sums) / copied
        backward = self.tokens * (2 * read + 2 * out + log_sums) / copied
        return {"forward": forward * 1e6, "both ways": (forward + backward) * 1e6}


def device_us(run: Run, seconds: float) -> float:
    """The median of a call among queued ones, the caches cold of its inputs, in microseconds."""
    median: float = do_bench(run, warmup=20, rep=int(seconds * 1e3), return_mode="median")
    return median * 1e3


def alone_us(arms: dict[str, Run], seconds: float) -> dict[str, float]:
    """Microseconds of a call on an idle device, the caches cold of its inputs; arms take turns."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for run in arms.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in arms}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[next(iter(arms))]) < 7:
        for name, run in arms.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def extra_memory(run: Run, kept: int) -> float:
    """MB at the peak of a call beyond what is kept of it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    peak = torch.cuda.max_memory_allocated() - before - kept
    del result
    return peak / 1e6


def bench(title: str, copied: float, seconds: float, results: Results) -> None:
    """Rows of one case."""
    case = Case(*CASES[title])
    if case.tokens <= 32_768 and case.longest < 4_096:
        for arm, errors in case.errors().items():
            for name, error in zip(("result", "grad q", "grad k", "grad v"), errors, strict=True):
                results.add(title, arm, f"error of {name}", error * 1e3, "1e-3")
    floors = case.floors(copied)
    runs: dict[str, dict[str, Run]] = {
        "forward": {"padless short": lambda: case.kernels(keep=False), "rope + flash": case.flash},
        "both ways": {"padless short": case.kernels_both, "rope + flash": case.flash_both},
    }
    for metric, arms in runs.items():
        results.add(title, "floor", metric, floors[metric], "us")
        took = {arm: device_us(run, seconds) for arm, run in arms.items()}
        for arm, value in took.items():
            results.add(title, arm, metric, value, "us")
        speedup = took["rope + flash"] / took["padless short"]
        results.add(title, "padless short", f"{metric}, speedup", speedup, "x")
    case.restore()
    alone = alone_us({"padless short": case.ours_both, "rope + flash": case.flash_both}, seconds)
    for arm, value in alone.items():
        results.add(title, arm, "both ways, called alone", value, "us")
    case.restore()
    grads = sum(x.numel() * 2 for x in case.leaves)
    out = case.ours()
    ours = extra_memory(lambda: torch.autograd.grad(out, case.leaves, case.grad, retain_graph=True), grads)
    q, k, v, flash_out, lse, *rest = case.flash()
    back = torch.ops.aten._flash_attention_backward
    theirs = extra_memory(lambda: back(case.grad, q, k, v, flash_out, lse, *rest), grads)
    results.add(title, "padless short", "extra memory", ours, "MB")
    results.add(title, "rope + flash", "extra memory", theirs, "MB")


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.1, help="a measurement")
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder / "bench_short_attention.jsonl")
    options = parser.parse_args()
    results = Results(bench="bench_short_attention", path=options.output)
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / device_us(lambda: target.copy_(source), 0.2) * 1e6
    results.add("ceilings", "copy", "read and written", copied / 1e9, "GB/s")
    small = Case([64] * 4, 16, 8, 128)
    results.add("T=256 16/8 d=128", "padless short", "host, both ways", host_us(small.ours_both), "us")
    results.add("T=256 16/8 d=128", "rope + flash", "host, both ways", host_us(small.flash_both), "us")
    begin = time.perf_counter()
    for _ in range(10):
        work_list(torch.tensor([0, *ALPACA]).cumsum(0), tiles_for(32, 8, 128))
    results.add("T=16,384", "work list", "host", (time.perf_counter() - begin) * 100, "ms")
    for title in CASES:
        bench(title, copied, options.seconds, results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
