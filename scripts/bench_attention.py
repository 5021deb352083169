"""Varlen attention on a GPU: every backend at hand, and rotation with it, against float64 and the floors.

    python scripts/bench_attention.py [--rows N ...] [--skip ARM ...] [--seconds S] [--output FILE]

Packed rows (attention_cases.py), bf16, causal. `forward` is what a call costs in a row of calls under
autograd (so with what backward needs), `both ways` with the gradients of q, k and v, by the device's clock;
`alone` the same from an idle device, the caches cold of its inputs, so that Python's time shows; `host`
Python's own time of a call; `extra memory` the peak of the way back beyond the gradients. The floor is the
larger of bytes over a copy's speed and products over a matrix product's, both measured in the same run;
rotation, that one's bytes are few, is not in it. `auto` is what it takes, as a share of the fastest.

An arm that fails is said, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attention_cases import ARMS, DTYPE, ROWS, Case, Row
from bench_clock import median_us
from bench_host import host_us
from bench_results import Results

from padless.kernels.short_attention import tiles_for
from padless.kernels.short_attention_work import work_list
from padless.runtime.attention import BACKENDS, Boundaries
from padless.runtime.attention.flex import block_mask
from padless.runtime.errors import BackendError

Run = Callable[[], object]
NAMES = ("result", "grad q", "grad k", "grad v")


def device_us(run: Run, seconds: float) -> float:
    """Median time of a call among five, by the device's clock, in microseconds."""

    def five() -> None:
        for _ in range(5):
            run()

    return median_us(five, 5, seconds)


def alone_us(arms: dict[str, Run], seconds: float) -> dict[str, float]:
    """Microseconds of a call on an idle device, the caches cold of its inputs; arms take turns."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for run in arms.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in arms}
    until = time.perf_counter() + seconds * len(arms)
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


def extra_memory(case: Case, arm: str) -> float:
    """MB at the peak of the way back beyond the gradients."""
    out = case.forward(arm)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() + sum(x.numel() * x.element_size() for x in case.leaves)
    torch.autograd.grad(out, case.leaves, case.grad)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def ceilings(results: Results, seconds: float) -> tuple[float, float]:
    """Bytes a second of a large copy, read and written; operations a second of a large bf16 product."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / device_us(lambda: target.copy_(source), seconds) * 1e6
    x, y = (torch.randn(8_192, 8_192, device="cuda", dtype=DTYPE) for _ in range(2))
    multiplied = 2 * 8_192**3 / device_us(lambda: x @ y, seconds) * 1e6
    results.add("ceilings", "copy", "read and written", copied / 1e9, "GB/s")
    results.add("ceilings", "matrix product", "8,192 cubed, bf16", multiplied / 1e12, "TFLOP/s")
    return copied, multiplied


def at_hand(skip: list[str], results: Results) -> list[str]:
    """The arms that can do these calls and are right, by float64; the others' reasons are printed."""
    title = next(iter(ROWS))
    cases = Case(ROWS[title].lengths), Case([1_000, 1_100, 3_000])
    arms = []
    for arm in ARMS:
        if arm in skip:
            continue
        try:
            errors, longer = (case.errors([arm])[arm] for case in cases)
            assert max(*errors, *longer) < 1e-2, f"errors of {errors} and {longer}"
        except BackendError as reason:
            print(f"left out: {arm}: {reason}")
            continue
        except Exception as error:
            print(f"FAILED: {arm}: {type(error).__name__}: {error}")
            continue
        for name, error in zip(NAMES, errors, strict=True):
            results.add(title, arm, f"error of {name}", error * 1e3, "1e-3")
        arms.append(arm)
    return arms


def hosts(arms: list[str], results: Results) -> None:
    """Python's time for short rows, and of the list of tiles; aten's operator alone for comparison."""
    small = Case([64] * 4)
    for arm in arms:
        if arm in (*BACKENDS, "fused", "rope + flash"):
            results.add("T=256", arm, "host", host_us(partial(small.forward, arm)), "us")
            results.add("T=256", arm, "host, both ways", host_us(partial(small.both, arm)), "us")
    operator = torch.ops.aten._flash_attention_forward.default
    given = (*small.leaves, small.bounds, small.bounds, 64, 64, 0.0, True, False)
    results.add("T=256", "flash's operator", "host", host_us(lambda: operator(*given, scale=0.1)), "us")
    ends = ROWS["alpaca-like, T=16,384"].lengths
    work_list(torch.tensor([0, *ends]).cumsum(0), tiles_for(32, 8, 128))
    begin = time.perf_counter()
    for _ in range(10):
        work_list(torch.tensor([0, *ends]).cumsum(0), tiles_for(32, 8, 128))
    results.add("T=16,384", "work list", "host", (time.perf_counter() - begin) * 100, "ms")


def bench(
    title: str, row: Row, arms: list[str], speeds: tuple[float, float], seconds: float, results: Results
) -> None:
    """Rows of one case."""
    case = Case(row.lengths, row.heads)
    other = Case([length + 3 for length in case.lengths], row.heads)
    lowest = case.floors(*speeds)
    for metric, value in lowest.items():
        results.add(title, "floor", metric, value, "us")
    auto = f"auto: {case.auto()}"
    took: dict[str, dict[str, float]] = {}
    for arm in (*(arm for arm in arms if arm in row.arms), auto):
        run = "auto" if arm == auto else arm
        try:
            other.both(run)  # what compiles has seen another shape, as it has in a stream of packs
            took[arm] = {
                "forward": device_us(partial(case.forward, run), seconds),
                "both ways": device_us(partial(case.both, run), seconds),
            }
            for metric, value in took[arm].items():
                results.add(title, arm, metric, value, "us")
                results.add(title, arm, f"{metric}, of floor", value / lowest[metric], "x")
            if "fused" in row.arms:
                results.add(title, arm, "extra memory", extra_memory(case, run), "MB")
        except Exception as error:
            print(f"FAILED: {title}: {arm}: {type(error).__name__}: {error}")
    del other
    compare(title, took, auto, results)
    if row.alone:
        alone = alone_us({arm: partial(case.both, arm.split(":")[0]) for arm in took}, seconds)
        for arm, value in alone.items():
            results.add(title, arm, "both ways, alone", value, "us")
    if "flex" in took:
        fresh = partial(Boundaries, case.bounds, case.longest, case.tokens)
        made = device_us(lambda: block_mask(fresh(), True, None), seconds)
        results.add(title, "flex", "block mask, once a batch", made, "us")


def compare(title: str, took: dict[str, dict[str, float]], auto: str, results: Results) -> None:
    """`auto` beside the fastest; our kernels with the rotation inside beside the two that they replace."""
    for metric in ("forward", "both ways"):
        plain = [took[arm][metric] for arm in took if arm in BACKENDS]
        if auto in took and plain:
            results.add(title, auto, f"{metric}, of fastest", took[auto][metric] / min(plain), "x")
        for arm in took:
            if arm.startswith("rope + ") and "fused" in took:
                speedup = took[arm][metric] / took["fused"][metric]
                results.add(title, f"fused over {arm}", f"{metric}, speedup", speedup, "x")


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of the rows, from 0")
    parser.add_argument("--skip", nargs="*", default=["efficient"], help="arms to leave out (efficient)")
    parser.add_argument("--seconds", type=float, default=0.12, help="a measurement")
    results_folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results_folder / "bench_attention.jsonl")
    options = parser.parse_args()
    results = Results(bench="bench_attention", path=options.output)
    speeds = ceilings(results, options.seconds)
    arms = at_hand(options.skip, results)
    try:
        hosts(arms, results)
    except Exception as error:
        print(f"FAILED: host times: {type(error).__name__}: {error}")
    for number, (title, row) in enumerate(ROWS.items()):
        if options.rows is None or number in options.rows:
            try:
                bench(title, row, arms, speeds, options.seconds, results)
            except Exception as error:
                print(f"FAILED: {title}: {type(error).__name__}: {error}")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
