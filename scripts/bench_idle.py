"""How long ranks would wait for one another, with packs in random order and with balanced steps.

    python scripts/bench_idle.py packed-documents --results scripts/results/idle.jsonl

The lengths are those of a packed folder's sequences, repeated with up to 10 % of change, planned
anew and dealt to 8 ranks of one pack each. No clock is involved: cost is 24,576 L + L^2 summed
over a pack's sequences, and a step takes as long as its costliest pack.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from bench_results import Results

from padless.packer.strategies import STRATEGIES
from padless.runtime.order import WINDOW, Position, StepOrder, attention_costs, idle_share
from padless.runtime.reader import PackedReader


def main() -> None:
    """Print the idle share of both orders, over some seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-length", type=int, default=32_768)
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--strategy", choices=sorted(STRATEGIES), default="bfd")
    parser.add_argument("--results", type=Path, default=Path("scripts/results/idle.jsonl"))
    args = parser.parse_args()
    columns = PackedReader(args.folder).sequence_columns("length", "pack")
    once = columns["length"][columns["pack"] >= 0].astype(np.int64)
    changes = np.random.default_rng(0).uniform(0.9, 1.1, (args.repeat, len(once)))
    lengths = np.clip((once * changes).round().astype(np.int64), 1, args.max_length).reshape(-1)
    plan = STRATEGIES[args.strategy](lengths, args.max_length)
    planned = lengths[plan.order]
    tokens = np.add.reduceat(planned, plan.offsets[:-1])
    costs = attention_costs(tokens, np.add.reduceat(planned**2, plan.offsets[:-1]))
    results = Results(bench="idle", path=args.results)
    case = f"{len(costs)} packs of {args.max_length}"
    arms = {"random": None, f"balanced in {WINDOW}": costs}
    for arm, used in arms.items():
        shares = []
        for seed in range(5):
            order = StepOrder(
                num_packs=len(costs), group=args.world_size, seed=seed, shuffle=True, costs=used
            )
            steps = order.whole_steps(Position(epoch=0))
            shares.append(idle_share(costs, args.world_size, steps))
        results.add(case, arm, f"idle of {args.world_size} ranks", float(np.median(shares)), "share")


if __name__ == "__main__":
    main()
