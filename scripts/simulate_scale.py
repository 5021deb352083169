"""A thousand million sequences planned in windows, as nodes of a cluster would do it: time, memory, sizes.

Nothing is tokenized: lengths are drawn (lognormal, cut to 1 .. max_length) and lie in files of uint16, a
window a file, as the nodes that tokenized them would leave them. Each worker takes a window, plans it with
the strategy that `build` takes, proves the plan, and writes it with numbers local to the window: 4 bytes a
sequence, 2 a pack. No process ever holds more than its window. What windows cost is told against the bound
over all lengths, which needs their histogram alone.

    python scripts/simulate_scale.py --sequences 1e9 --window 16e6 --workers 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_results import Results
from peak_memory import Sampler

from padless.packer.plan import check_plan, drawn_order, lower_bound
from padless.packer.strategies import STRATEGIES

HERE = Path(__file__).parent
CAP = 1024
"""Sequences in a pack, as `build` has it."""


def draw(folder: Path, window: int, count: int, median: float, max_length: int) -> None:
    """Lengths of one window."""
    drawn = np.random.Generator(np.random.PCG64(window)).lognormal(np.log(median), 1.0, count)
    np.clip(drawn, 1, max_length).astype(np.uint16).tofile(folder / f"lengths-{window:05d}.u16")


def plan(folder: Path, window: int, strategy: str, max_length: int) -> dict[str, float]:
    """Plan one window and write the plan; what it gave, and how long planning and proving took."""
    lengths = np.fromfile(folder / f"lengths-{window:05d}.u16", dtype=np.uint16)
    started = time.perf_counter()
    found = STRATEGIES[strategy](lengths, max_length, max_sequences_per_pack=CAP, seed=window, shuffle=True)
    planned = time.perf_counter()
    check_plan(found, lengths, max_length, CAP)
    proved = time.perf_counter()
    found.order.astype(np.uint32, copy=False).tofile(folder / f"order-{window:05d}.u32")
    np.diff(found.offsets).astype(np.uint16).tofile(folder / f"sizes-{window:05d}.u16")
    return {
        "packs": len(found),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "plan_seconds": planned - started,
        "check_seconds": proved - planned,
    }


def bound(folder: Path, windows: int, max_length: int) -> int:
    """What no plan over all windows together can go below, from the histogram of their lengths."""
    counts = np.zeros(max_length + 1, dtype=np.int64)
    for window in range(windows):
        lengths = np.fromfile(folder / f"lengths-{window:05d}.u16", dtype=np.uint16)
        counts += np.bincount(lengths, minlength=max_length + 1)
    tokens = int((counts * np.arange(max_length + 1)).sum())
    # `lower_bound` takes lengths one by one; on a thousandth of them it says whether tokens decide.
    some = np.repeat(np.arange(max_length + 1), counts // 1000)
    by_tokens = -(-int(some.sum()) // max_length)
    share = lower_bound(some, max_length, CAP) / max(by_tokens, 1)
    return max(-(-tokens // max_length), int(tokens / max_length * share))


def _work(job: tuple[Path, int, int, float, str, int]) -> dict[str, float]:
    folder, window, count, median, strategy, max_length = job
    draw(folder, window, count, median, max_length)
    return plan(folder, window, strategy, max_length)


def main() -> None:
    """Draw, plan, prove, add up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=float, default=1e9)
    parser.add_argument("--window", type=float, default=2**24, help="sequences planned together")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of a pack, below 65,536")
    parser.add_argument("--median", type=float, default=600, help="tokens of a sequence")
    parser.add_argument("--strategy", default="bfd", choices=sorted(STRATEGIES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where lengths and plans lie for the time of the run")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "simulate_scale.jsonl")
    options = parser.parse_args()
    total, window = int(options.sequences), int(options.window)
    counts = [min(window, total - first) for first in range(0, total, window)]
    results = Results(bench="scale", path=options.results)
    case = f"{total:,} sequences, windows of {window:,}"
    sampler = Sampler()
    sampler.watch(os.getpid())
    with tempfile.TemporaryDirectory(prefix="simulate-scale-", dir=options.folder) as name:
        folder = Path(name)
        jobs = [
            (folder, number, count, options.median, options.strategy, options.max_length)
            for number, count in enumerate(counts)
        ]
        started = time.perf_counter()
        with multiprocessing.get_context("fork").Pool(options.workers) as pool:
            found = list(pool.imap_unordered(_work, jobs))
        seconds = time.perf_counter() - started
        sizes: dict[str, int] = {}
        for path in folder.iterdir():
            sizes[path.name.split("-")[0]] = sizes.get(path.name.split("-")[0], 0) + path.stat().st_size
        least = bound(folder, len(counts), options.max_length)
    # How a reader mixes the windows: an order of windows and, in each, its own; both from the seed.
    started = time.perf_counter()
    drawn_order(len(counts), 0)
    order_seconds = time.perf_counter() - started
    packs, tokens = (int(sum(one[key] for one in found)) for key in ("packs", "tokens"))
    add = results.add
    add(case, options.strategy, "tokens", tokens, "tokens")
    add(case, options.strategy, "packs", packs, "packs")
    add(case, options.strategy, "packs_over_bound", packs - least, "packs")
    add(case, options.strategy, "utilization", tokens / (packs * options.max_length), "share")
    add(case, options.strategy, "wall", seconds, f"s, {options.workers} workers, lengths drawn too")
    for key in ("plan_seconds", "check_seconds"):
        add(case, options.strategy, key, sum(one[key] for one in found), "s of one core")
    add(case, options.strategy, "order_of_windows", order_seconds, "s")
    add(case, options.strategy, "peak_anonymous_pss", sampler.peak_anonymous / 1e6, "MB")
    for name, size in sorted(sizes.items()):
        add(case, options.strategy, f"bytes_of_{name}", size / total, "bytes a sequence")
    print(json.dumps({"windows": len(counts), "bound": least}))


if __name__ == "__main__":
    main()
