"""Rollouts packed in memory for 8 ranks: time, micro-batches and balance, beside two other ways to plan.

    python scripts/bench_rollouts.py [--record]

Lengths are drawn: prompts of 40 to 200 tokens, responses log-normal up to 4,096. The peers are written again
from the descriptions of their algorithms: Karmarkar and Karp's differencing, first over the ranks, then over
each rank's micro-batches, as verl does it; and TRL's greedy, longest first to the row with the least sum of
squares that has room. Work is 24,576 L + L^2; a step takes as long as its busiest rank. "pack" is all of
`pack_sequences` on one rank: lengths, plan, and the tensors of that rank's share, of rollouts whose ids,
log-probabilities and advantages are arrays, tensors or lists; beside lists stands what numpy takes to read
those of the share, one after the other. Times are of the processor, on one thread, so that neighbours on the
machine count little; the least is what it takes where they leave the caches alone.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_results import Results

from padless.runtime.balance import MicroBatches, plan_micro_batches
from padless.runtime.in_memory import pack_sequences
from padless.runtime.order import attention_costs

WORLD = 8
MAX_TOKENS = 16_384
Lengths = Any
Ranks = list[MicroBatches]
"""The micro-batches of each rank."""


def differencing(costs: list[int], parts: int) -> MicroBatches:
    """Karmarkar and Karp: of all partial partitions, again and again join the two of the largest spread."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, cost in enumerate(costs):
        sets: list[tuple[int, list[int]]] = [(cost, [number])] + [(0, []) for _ in range(parts - 1)]
        heap.append((-cost, number, sets))
    heapq.heapify(heap)
    ticket = len(costs)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # The largest sum of one goes with the smallest of the other.
        joined = [(a + b, some + more) for (a, some), (b, more) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda one: -one[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], ticket, joined))
        ticket += 1
    return [numbers for _, numbers in heap[0][2]]


def by_differencing(lengths: Lengths) -> Ranks:
    """Sequences to ranks, then each rank's to as many micro-batches as the fullest rank needs."""
    costs = attention_costs(lengths, lengths**2).tolist()
    sizes = lengths.tolist()
    ranks = differencing(costs, WORLD)
    count = max(-(-sum(sizes[number] for number in numbers) // MAX_TOKENS) for numbers in ranks)
    while True:
        found = []
        for numbers in ranks:
            parts = differencing([costs[number] for number in numbers], count)
            found.append([[numbers[place] for place in part] for part in parts])
        if all(sum(sizes[number] for number in part) <= MAX_TOKENS for parts in found for part in parts):
            return found
        count += 1  # verl lets them be larger than asked; here nobody may


def by_greedy(lengths: Lengths) -> Ranks:
    """Longest first to the row with the least sum of squares and room; rows come in rounds of all ranks."""
    rows: list[list[Any]] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[number])
        fitting = [row for row in rows if row[1] + size <= MAX_TOKENS]
        if not fitting:
            fitting = [[0, 0, []] for _ in range(WORLD)]
            rows += fitting
        row = min(fitting, key=lambda one: one[0])
        row[0] += size * size
        row[1] += size
        row[2].append(number)
    return [[row[2] for row in rows[rank::WORLD]] for rank in range(WORLD)]


def by_padless(lengths: Lengths) -> Ranks:
    plan = plan_micro_batches(lengths, max_tokens=MAX_TOKENS, world_size=WORLD)
    return [plan[rank::WORLD] for rank in range(WORLD)]


WAYS: dict[str, Callable[[Lengths], Ranks]] = {
    "padless": by_padless,
    "verl's Karmarkar-Karp": by_differencing,
    "TRL's greedy": by_greedy,
}


def rollouts(count: int) -> list[dict[str, Any]]:
    """Rollouts of random tokens, the same for the same count."""
    made = np.random.default_rng(count)
    found = []
    for number in range(count):
        prompt, response = int(made.integers(40, 200)), int(min(made.lognormal(5.5, 0.8) + 5, 4096))
        found.append(
            {
                "prompt_ids": made.integers(0, 30_000, prompt, dtype=np.int32),
                "response_ids": made.integers(0, 30_000, response, dtype=np.int32),
                "old_logprobs": made.random(response, dtype=np.float32),
                "advantages": made.random(response, dtype=np.float32),
                "reward": 1.0,
                "group_id": number // 8,
            }
        )
    return found


def times_ms(work: Callable[..., Any], *given: Any) -> Lengths:
    """Milliseconds of processor time of a call, of as many as take two seconds, at least three."""
    times: list[float] = []
    end = time.thread_time() + 2
    while len(times) < 3 or time.thread_time() < end:
        start = time.thread_time()
        work(*given)
        times.append(time.thread_time() - start)
    return 1e3 * np.array(times)


def in_form(sequences: list[dict[str, Any]], form: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The same rollouts with their arrays in another form."""
    return [
        {name: form(value) if isinstance(value, np.ndarray) else value for name, value in one.items()}
        for one in sequences
    ]


def read_by_numpy(sequences: list[dict[str, Any]]) -> None:
    """Every list of theirs as an array: the least that numpy can do with lists."""
    for one in sequences:
        for value in one.values():
            if isinstance(value, list):
                np.array(value)


def my_share(sequences: list[dict[str, Any]]) -> Any:
    """What one rank does."""
    return pack_sequences(sequences, max_tokens=MAX_TOKENS, rank=0, world_size=WORLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true", help="keep the rows in scripts/results")
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 8_000])
    args = parser.parse_args()
    kept = Path(__file__).parent / "results" / "bench_rollouts.jsonl"
    path = kept if args.record else Path(tempfile.mkdtemp()) / kept.name
    results = Results(bench="rollouts", path=path)
    for count in args.counts:
        sequences = rollouts(count)
        lengths = np.array([len(one["prompt_ids"]) + len(one["response_ids"]) for one in sequences])
        costs = attention_costs(lengths, lengths**2)
        case, per_1000 = f"{count:,} rollouts", 1e3 / count
        results.add(case, "all", "tokens a rollout", lengths.mean(), "")
        for arm, way in WAYS.items():
            ranks = way(lengths)
            work = np.array([[costs[part].sum() for part in parts] for parts in ranks])  # [ranks, steps]
            in_step = 1 - work.sum() / (WORLD * work.max(axis=0).sum())
            results.add(case, arm, "plan of 1,000", np.median(times_ms(way, lengths)) * per_1000, "ms")
            results.add(case, arm, "micro-batches", work.size, "")
            results.add(
                case, arm, "idle over a step", 100 * (1 - work.sum(1).mean() / work.sum(1).max()), "%"
            )
            results.add(case, arm, "idle by micro-batch", 100 * in_step, "%")
        lists = in_form(sequences, np.ndarray.tolist)
        share = [lists[number] for numbers in by_padless(lengths)[0] for number in numbers]
        for arm, work_of, given in (
            ("padless, arrays", my_share, sequences),
            ("padless, tensors", my_share, in_form(sequences, torch.from_numpy)),
            ("padless, lists", my_share, lists),
            ("numpy's reading of lists", read_by_numpy, share),
        ):
            times = times_ms(work_of, given) * per_1000
            results.add(case, arm, "pack of 1,000", np.median(times), "ms")
            results.add(case, arm, "pack of 1,000, least", times.min(), "ms")


if __name__ == "__main__":
    main()
