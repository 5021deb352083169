"""How long planning takes and how full the packs are, for every strategy.

    python scripts/bench_plan.py --big --results scripts/results/plan.jsonl
    python scripts/bench_plan.py --lengths token_lengths.parquet --column qwen3_chatml_total

Lengths are lognormal (a million for packs of 4,096 tokens; 20 million for 8,192 with --big), or a
column of a Parquet file. A plan is checked before its time counts. Times are medians of whole
calls, with the spread from fastest to slowest: on a shared machine they move by a quarter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from padless.packer.plan import check_plan, lower_bound
from padless.packer.strategies import STRATEGIES

CAPS = (None, 128)
REPEATS = 5

Lengths = NDArray[np.int32]


def lognormal_lengths(count: int, max_length: int) -> Lengths:
    """Lengths with a median of 403 tokens and a long tail, cut at a pack, [count]."""
    drawn = np.random.default_rng(0).lognormal(6, 1, count)
    return np.clip(drawn, 1, max_length).astype(np.int32)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Lengths, int]]:
    """Name, lengths [N] and max_length of each case asked for."""
    yield "lognormal 1M", lognormal_lengths(1_000_000, 4096), 4096
    if args.big:
        yield "lognormal 20M", lognormal_lengths(20_000_000, 8192), 8192
    if args.lengths is not None:
        table = pq.read_table(args.lengths)
        if args.file is not None:
            table = table.filter(pc.equal(table["file"], args.file))
        lengths = table[args.column].to_numpy()
        for max_length in args.max_length:
            fitting = lengths[lengths <= max_length]
            yield f"{args.file or args.lengths.name} {args.column}", fitting, max_length


def measure(name: str, lengths: Lengths, max_length: int, cap: int | None) -> dict[str, Any]:
    """Time REPEATS plans of one strategy; packs, bound, utilization and seconds."""
    strategy = STRATEGIES[name]
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        plan = strategy(lengths, max_length, max_sequences_per_pack=cap)
        seconds.append(time.perf_counter() - begin)
    check_plan(plan, lengths, max_length, cap)
    return {
        "packs": len(plan),
        "bound_packs": lower_bound(lengths, max_length, cap),
        "utilization": int(lengths.sum(dtype=np.int64)) / (len(plan) * max_length),
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
    }


def hardware() -> str:
    """Processor and number of cores."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {os.cpu_count()} cores"


def rows(case: str, arm: str, result: dict[str, Any], stamp: dict[str, Any]) -> list[str]:
    """One JSON line a metric."""
    units = {"packs": "packs", "bound_packs": "packs", "utilization": "share"}
    return [
        json.dumps(
            {
                "bench": "plan",
                "case": case,
                "arm": arm,
                "metric": metric,
                "value": value,
                "unit": units.get(metric, "s"),
                **stamp,
            }
        )
        for metric, value in result.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--big", action="store_true", help="also 20 million lengths at 8,192")
    parser.add_argument("--lengths", type=Path, help="Parquet file with a column of lengths")
    parser.add_argument("--column", help="its column, in tokens")
    parser.add_argument("--file", help="only its rows whose column `file` is this")
    parser.add_argument(
        "--max-length",
        type=int,
        nargs="+",
        default=[2048],
        help="tokens of a pack, for --lengths; longer sequences are left out",
    )
    parser.add_argument("--results", type=Path, help="append the rows to this JSON lines file")
    args = parser.parse_args()
    if (args.lengths is None) != (args.column is None):
        parser.error("--lengths and --column go together: the file, and which column to plan")

    versions = {name: version(name) for name in ("padless", "numpy", "pyarrow")}
    versions["python"] = platform.python_version()
    stamp = {
        "hardware": hardware(),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
    print(stamp["hardware"], *(f"{k} {v}" for k, v in versions.items()), sep=" | ")
    print(f"{'case':44} {'arm':14} {'packs':>9} {'bound':>9} {'utilization':>11} {'seconds':>23}")
    for name, lengths, max_length in cases(args):
        case = f"{name}, {len(lengths)} at {max_length}"
        for strategy in STRATEGIES:
            for cap in CAPS:
                arm = strategy if cap is None else f"{strategy}, cap {cap}"
                result = measure(strategy, lengths, max_length, cap)
                spread = f"({result['fastest']:.4f} - {result['slowest']:.4f})"
                print(
                    f"{case:44} {arm:14} {result['packs']:9} {result['bound_packs']:9} "
                    f"{result['utilization']:11.3%} {result['seconds']:7.4f} {spread}"
                )
                if args.results is not None:
                    args.results.parent.mkdir(parents=True, exist_ok=True)
                    with args.results.open("a") as file:
                        file.writelines(f"{row}\n" for row in rows(case, arm, result, stamp))


if __name__ == "__main__":
    main()
