"""How long planning takes and how full the packs are, for every strategy and for peers' algorithms.

    python scripts/bench_plan.py --big --results scripts/results/plan.jsonl
    python scripts/bench_plan.py --lengths token_lengths.parquet --column qwen3_chatml_total

Lengths are a column of a Parquet file, or lognormal: a million for packs of 4,096 tokens, with --big
20 million for 8,192. A plan is checked before its time counts. Times are medians of whole
calls, with the spread from fastest to slowest: on a shared machine they move by a quarter. The
peers' loops (see peer_packers.py) run once, and not for the 20 million.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from peer_packers import PEERS, Packs

from padless.packer.plan import PackPlan, check_plan, lower_bound
from padless.packer.strategies import STRATEGIES

CAPS = (None, 64, 128)
REPEATS = 5
BIG = 10_000_000
"""Sequences from which on a case is too much for loops, and for five repeats."""

Lengths = NDArray[np.int32]


def lognormal_lengths(count: int, max_length: int) -> Lengths:
    """Lengths with a median of 403 tokens and a long tail, cut at a pack, [count]."""
    drawn = np.random.default_rng(0).lognormal(6, 1, count)
    return np.clip(drawn, 1, max_length).astype(np.int32)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Lengths, int]]:
    """Name, lengths [N] and max_length of each case asked for."""
    if args.lengths is None:
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


def arms(lengths: Lengths, max_length: int) -> Iterator[tuple[str, int | None, Callable[[], PackPlan], int]]:
    """Name, cap, a call that plans and how often to repeat it, for all that plan the case."""
    for cap in CAPS:
        for name, strategy in STRATEGIES.items():
            arm = name if cap is None else f"{name}, cap {cap}"
            plan = partial(strategy, lengths, max_length, max_sequences_per_pack=cap)
            yield arm, cap, plan, REPEATS if len(lengths) < BIG else 1
    if len(lengths) < BIG:
        values = lengths.tolist()
        for name, loop in PEERS.items():
            yield name, None, partial(plan_by, loop, values, max_length), 1


def plan_by(loop: Callable[[list[int], int], Packs], lengths: list[int], max_length: int) -> PackPlan:
    """A peer's packs as a plan."""
    packs = loop(lengths, max_length)
    offsets = np.cumsum([0, *(len(pack) for pack in packs)])
    return PackPlan(np.concatenate([np.array(pack, np.int32) for pack in packs]), offsets)


def measure(
    call: Callable[[], PackPlan], repeats: int, lengths: Lengths, max_length: int, cap: int | None
) -> dict[str, Any]:
    """Time `repeats` plans; packs, bound, largest number of sequences, utilization and seconds."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = call()
        seconds.append(time.perf_counter() - begin)
    check_plan(plan, lengths, max_length, cap)
    return {
        "most_sequences": int(np.diff(plan.offsets).max()),
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
    units = {"packs": "packs", "bound_packs": "packs", "utilization": "share", "most_sequences": "sequences"}
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
    print(
        f"{'case':44} {'arm':19} {'packs':>9} {'+bound':>7} {'utilization':>11} {'most':>5} {'seconds':>23}"
    )
    for name, lengths, max_length in cases(args):
        case = f"{name}, {len(lengths)} at {max_length}"
        for arm, cap, call, repeats in arms(lengths, max_length):
            result = measure(call, repeats, lengths, max_length, cap)
            over = result["packs"] - result["bound_packs"]
            print(
                f"{case:44} {arm:19} {result['packs']:9} {over:+7} {result['utilization']:11.3%}",
                f"{result['most_sequences']:5} {result['seconds']:7.4f}",
                f"({result['fastest']:.4f} - {result['slowest']:.4f})",
                flush=True,
            )
            if args.results is not None:
                args.results.parent.mkdir(parents=True, exist_ok=True)
                with args.results.open("a") as file:
                    file.writelines(f"{row}\n" for row in rows(case, arm, result, stamp))


if __name__ == "__main__":
    main()
