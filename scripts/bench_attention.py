"""Varlen attention on a GPU: every backend at hand against float64, then against the floors and each other.

    python scripts/bench_attention.py [--cases N ...] [--output FILE]

Packed rows, 32 query and 8 key heads of 128, bf16, causal. `forward` is what a call costs in a row of
calls under autograd (so with what backward needs), `both ways` with the gradients of q, k and v, by the
device's clock; `host` is Python's own time for a forward call. The floor is the larger of the bytes that
must move (q, k, v in, out and log-sum-exp out; backward those, the gradient in, three out) over the copy's
speed, and the products that causal sequences need (backward 2.5 times forward's) over a matrix product's
speed, both measured in the same run. The arm `auto` is the backend it takes, as a share of the fastest.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_host import host_us
from bench_results import Results
from torch import Tensor

from padless.runtime.attention import BACKENDS, Boundaries, Request, choose, varlen_attention
from padless.runtime.attention.flex import block_mask
from padless.runtime.errors import BackendError

HEADS, DIM = (32, 8), 128
LEFT_OUT = ("sdpa", "sdpa_mask")
"""Not held against the others: one takes a launch a sequence, the other a mask of the whole row."""
DTYPE = torch.bfloat16


def lengths_about(tokens: int, median: float, spread: float) -> list[int]:
    """Lognormal lengths that fill a row exactly; always the same."""
    draw = random.Random(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(16, round(draw.lognormvariate(math.log(median), spread)))))
    return lengths


CASES = {
    "alpaca-like, T=16,384": lengths_about(16_384, 135, 0.6),
    "alpaca-like, T=65,536": lengths_about(65_536, 135, 0.6),
    "about 1,000, T=32,768": lengths_about(32_768, 1_000, 0.1),
    "about 2,000, T=32,768": lengths_about(32_768, 2_000, 0.1),
    "8 x 4,096, T=32,768": [4_096] * 8,
    "4 x 8,192, T=32,768": [8_192] * 4,
}


class Case:
    """Inputs of one row."""

    def __init__(self, lengths: list[int], heads: tuple[int, int] = HEADS) -> None:
        self.lengths, self.tokens, self.longest = lengths, sum(lengths), max(lengths)
        self.bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        q, k = (torch.randn(self.tokens, h, DIM, device="cuda", dtype=DTYPE) for h in heads)
        v, self.grad = torch.randn_like(k), torch.randn_like(q)
        self.leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward(self, backend: str) -> Tensor:
        """Attention as a layer calls it."""
        return varlen_attention(*self.leaves, self.bounds, self.longest, backend=backend)

    def both(self, backend: str) -> list[Tensor]:
        """Output and gradients."""
        out = self.forward(backend)
        return [out, *torch.autograd.grad(out, self.leaves, self.grad)]


def median_us(run: Callable[[], object], seconds: float = 0.25) -> float:
    """Median time of a call among many, by the device's clock, in microseconds."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 100):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 5)
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Bytes a second of a large copy, read and written; operations a second of a large bf16 product."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / median_us(lambda: target.copy_(source)) * 1e6
    x, y = (torch.randn(8_192, 8_192, device="cuda", dtype=DTYPE) for _ in range(2))
    return copied, 2 * 8_192**3 / median_us(lambda: x @ y) * 1e6


def floors(lengths: list[int], copied: float, multiplied: float) -> dict[str, float]:
    """Microseconds that no kernel can be under."""
    tokens, (heads, groups) = sum(lengths), HEADS
    read = tokens * (heads + 2 * groups) * DIM * 2
    out = tokens * heads * DIM * 2
    log_sums = tokens * heads * 4
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    products = 4 * pairs * heads * DIM
    forward = max((read + out + log_sums) / copied, products / multiplied)
    backward = max((2 * read + 2 * out + log_sums) / copied, 2.5 * products / multiplied)
    return {"forward": forward * 1e6, "both ways": (forward + backward) * 1e6}


def check(name: str) -> None:
    """A backend against float64, before any clock starts; raises AssertionError."""
    for lengths in (CASES["alpaca-like, T=16,384"][:40], [1_000, 1_100, 3_000]):
        case = Case(lengths, (8, 2))
        got = case.both(name)
        case.leaves = [x.detach().double().requires_grad_() for x in case.leaves]
        case.grad = case.grad.double()
        for x, y in zip(got, case.both("sdpa"), strict=True):
            error = float((x.double() - y).norm() / y.norm())
            assert error < 1e-2, (name, lengths[:3], error)


def at_hand() -> list[str]:
    """The backends that can do these calls; the others' reasons are printed."""
    names = []
    for name in BACKENDS:
        if name in LEFT_OUT:
            continue
        try:
            check(name)
            names.append(name)
        except BackendError as reason:
            print(f"left out: {reason}")
    return names


def auto_for(case: Case) -> str:
    """What `auto` takes."""
    request = Request(
        case.leaves[0].device, DTYPE, DIM, *HEADS, case.tokens, len(case.lengths), case.longest,
        causal=True, window=False, softcap=False, sinks=False, deterministic=False, backward=True,
    )  # fmt: skip
    return choose(request)


def bench(title: str, names: list[str], speeds: tuple[float, float], results: Results) -> None:
    """Rows of one case."""
    case = Case(CASES[title])
    lowest = floors(case.lengths, *speeds)
    for metric, value in lowest.items():
        results.add(title, "floor", metric, value, "us")
    other = Case([length + 3 for length in case.lengths])
    took: dict[str, float] = {}
    for name in names:
        other.both(name)  # what compiles has seen another shape, as it has in a stream of packs
        times = {
            "forward": median_us(lambda name=name: case.forward(name)),  # type: ignore[misc]
            "both ways": median_us(lambda name=name: case.both(name)),  # type: ignore[misc]
        }
        for metric, value in times.items():
            results.add(title, name, metric, value, "us")
            results.add(title, name, f"{metric}, of floor", value / lowest[metric], "x")
        took[name] = times["both ways"]
    fresh = partial(Boundaries, case.bounds, case.longest, case.tokens)
    made = median_us(lambda: block_mask(fresh(), True, None))
    results.add(title, "flex", "block mask, once a batch", made, "us")
    picked = auto_for(case)
    results.add(title, f"auto: {picked}", "both ways, of fastest", took[picked] / min(took.values()), "x")


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases, from 0")
    results_folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results_folder / "bench_attention.jsonl")
    options = parser.parse_args()
    results = Results(bench="bench_attention", path=options.output)
    speeds = ceilings()
    results.add("ceilings", "copy", "read and written", speeds[0] / 1e9, "GB/s")
    results.add("ceilings", "matrix product", "8,192 cubed, bf16", speeds[1] / 1e12, "TFLOP/s")
    names = at_hand()
    small = Case([64] * 4, HEADS)
    for name in names:
        results.add("T=256", name, "host", host_us(lambda name=name: small.forward(name)), "us")  # type: ignore[misc]
    for number, title in enumerate(CASES):
        if options.cases is None or number in options.cases:
            bench(title, names, speeds, results)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
