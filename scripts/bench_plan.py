"""How long planning takes and how full the packs are, for every strategy and for peers' algorithms.

    python scripts/bench_plan.py --big --lengths token_lengths.parquet --record
    python scripts/bench_plan.py --lengths my_lengths.parquet --column tokens --max-length 2048
    python scripts/bench_plan.py --quarter

Lengths are lognormal, a million for packs of 4,096 tokens and with --big 20 million for 8,192; with
--lengths also those of a Parquet file, one case for each value of its column `file`. A plan is checked
before its time counts. Times are medians of whole calls, arms in turn, since on a shared machine they
move by a quarter; the fastest stands beside. The peers' loops (see peer_packers.py) and, where it is
installed, TRL's own function (its Arrow work included) run once, and not for the 20 million;
"shuffled" has the packs in a drawn order, as a build writes them.
With --quarter all of that is left out for 50,000 lengths from a quarter to a half of a pack, where packs over
the bound are those over the linear program's, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from bench_results import Results
from numpy.typing import NDArray
from peer_packers import PEERS, Packs

from padless.packer.plan import PackPlan, check_plan, lower_bound
from padless.packer.strategies import STRATEGIES
from padless.packer.strategies.pricing import linear_bound

RESULTS = Path(__file__).parent / "results" / "bench_plan.jsonl"
BIG = 10_000_000
"""Sequences from which on a case is too much for loops, and for five repeats."""

Lengths = NDArray[np.int32]
Arm = tuple[str, int | None, Callable[[], PackPlan]]


def lognormal_lengths(count: int, max_length: int) -> Lengths:
    """Lengths with a median of 403 tokens and a long tail, cut at a pack, [count]."""
    drawn = np.random.default_rng(0).lognormal(6, 1, count)
    return np.clip(drawn, 1, max_length).astype(np.int32)


def file_cases(args: argparse.Namespace) -> Iterator[tuple[str, Lengths, int]]:
    """Name, lengths [N] and max_length of each case of a file of lengths."""
    table = pq.read_table(args.lengths)
    names = table["file"].unique().to_pylist() if "file" in table.column_names else [None]
    for name in names:
        rows = table if name is None else table.filter(pc.equal(table["file"], name))
        for column in args.column:
            lengths = rows[column].to_numpy()
            for max_length in args.max_length:
                fitting = lengths[lengths <= max_length]
                yield f"{name or args.lengths.name} {column} at {max_length:,}", fitting, max_length


def arms(lengths: Lengths, max_length: int, caps: tuple[int | None, ...]) -> Iterator[Arm]:
    """Name, cap and a call that plans, for padless's strategies."""
    for cap in caps:
        for name, strategy in STRATEGIES.items():
            slow = name in ("ordered", "optimal") and len(lengths) >= BIG
            if name != "none" and not slow:
                arm = name if cap is None else f"{name}, cap {cap}"
                yield arm, cap, partial(strategy, lengths, max_length, max_sequences_per_pack=cap)


def shuffled(lengths: Lengths, max_length: int, cap: int) -> PackPlan:
    """What a build with `bfd` does: a cap, and the packs in a drawn order."""
    return STRATEGIES["bfd"](lengths, max_length, max_sequences_per_pack=cap, shuffle=True)


def plan_by(loop: Callable[[list[int], int], Packs], lengths: list[int], max_length: int) -> PackPlan:
    """A peer's packs as a plan."""
    packs = loop(lengths, max_length)
    offsets = np.cumsum([0, *(len(pack) for pack in packs)])
    return PackPlan(np.concatenate([np.array(pack, np.int32) for pack in packs]), offsets)


def plan_by_trl(pack: Callable[[pa.Table, int], pa.Table], lengths: Lengths, max_length: int) -> PackPlan:
    """TRL's own packs, of one batch with all rows, as a plan; the rows' tokens are nulls, free to move."""
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
    rows = pa.ListArray.from_arrays(offsets, pa.nulls(int(offsets[-1])))
    packs = pack(pa.table({"input_ids": rows}), max_length)["seq_lengths"].combine_chunks()
    order = np.empty(len(lengths), np.int64)
    order[np.argsort(packs.flatten().to_numpy(), kind="stable")] = np.argsort(lengths, kind="stable")
    return PackPlan(order, packs.offsets.to_numpy().astype(np.int64))


def measure(
    results: Results | None,
    case: str,
    arms: list[Arm],
    repeats: int,
    lengths: Lengths,
    max_length: int,
    bound_of: Callable[[Lengths, int, int | None], int] = lower_bound,
) -> None:
    """Run every arm `repeats` times, in turn, check its plan, and give its rows."""
    seconds: dict[str, list[float]] = {arm: [] for arm, _, _ in arms}
    plans: dict[str, PackPlan] = {}
    for _ in range(repeats):
        for arm, _, call in arms:
            begin = time.perf_counter()
            plans[arm] = call()
            seconds[arm].append(time.perf_counter() - begin)
    tokens = int(lengths.sum(dtype=np.int64))
    for arm, cap, _ in arms:
        plan = plans[arm]
        check_plan(plan, lengths, max_length, cap)
        used, bound = tokens / (len(plan) * max_length), bound_of(lengths, max_length, cap)
        middle, fastest = statistics.median(seconds[arm]), min(seconds[arm])
        if results is None:
            over = len(plan) - bound
            print(
                f"{case:52} {arm:22} {len(plan):9,} {over:+7,} {used:9.3%} {middle:8.4f} s {fastest:8.4f} s"
            )
            continue
        results.add(case, arm, "packs", len(plan), "packs")
        results.add(case, arm, "bound_packs", bound, "packs")
        results.add(case, arm, "utilization", used, "share")
        results.add(case, arm, "seconds", middle, "s")
        results.add(case, arm, "fastest", fastest, "s")


def measure_quarter() -> None:
    """Lengths of which packs hold two or three, against the linear program's bound."""
    for max_length in (1024, 2048, 4096, 8192):
        drawn = np.random.default_rng(0).integers(max_length // 4 + 1, max_length // 2, 50_000)
        lengths = drawn.astype(np.int32)
        own = [arm for arm in arms(lengths, max_length, (None,)) if arm[0] in ("bfd", "spread", "optimal")]
        measure(None, f"a quarter to a half of {max_length:,}", own, 1, lengths, max_length, linear_bound)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--big", action="store_true", help="also 20 million lengths at 8,192")
    parser.add_argument("--quarter", action="store_true", help="only lengths of a quarter to a half")
    parser.add_argument("--lengths", type=Path, help="Parquet file with columns of lengths")
    parser.add_argument("--column", nargs="+", default=["qwen3_chatml_total", "qwen3_chat_total"])
    parser.add_argument("--max-length", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--record", action="store_true", help=f"append the rows to {RESULTS.name}")
    args = parser.parse_args()
    if args.quarter:
        measure_quarter()
        return
    results = Results(bench="bench_plan", path=RESULTS) if args.record else None
    if args.lengths is not None:
        for case, lengths, max_length in file_cases(args):
            measure(results, case, list(arms(lengths, max_length, (None, 64))), 5, lengths, max_length)
    made = [("lognormal 1 M at 4,096", 1_000_000, 4096)]
    made += [("lognormal 20 M at 8,192", 20_000_000, 8192)] if args.big else []
    for case, count, max_length in made:
        lengths = lognormal_lengths(count, max_length)
        own = list(arms(lengths, max_length, (None,)))
        own.append(("bfd, cap 128, shuffled", 128, partial(shuffled, lengths, max_length, 128)))
        measure(results, case, own, 5 if count < BIG else 1, lengths, max_length)
        if count < BIG:
            values = lengths.tolist()
            loops: list[Arm] = [
                (name, None, partial(plan_by, loop, values, max_length)) for name, loop in PEERS.items()
            ]
            with suppress(ImportError):
                from trl.data_utils import _pack_bfd

                loops.append(
                    ("TRL's own function", None, partial(plan_by_trl, _pack_bfd, lengths, max_length))
                )
            measure(results, case, loops, 1, lengths, max_length)


if __name__ == "__main__":
    main()
