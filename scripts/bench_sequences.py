"""What a build holds for each sequence: its stages behind tokenizing, over a store of as many as one likes.

The store is made up: lengths drawn, tokens and lines of the form that workers write, chunk after chunk. From
there on it is the build's own code, stage by stage, in one process: lengths and account, plan, elements, the
buckets of a large store, places and sequence table, and, where asked, the shards. A stage's peak is of all
that is held then, less what the process held before the first.

    python scripts/bench_sequences.py --sequences 1e8 --work /tmp
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench_results import Results
from peak_memory import Sampler, pss

from padless.packer import commit
from padless.packer.chunk import ChunkResult
from padless.packer.elements import gather_of, lay_elements
from padless.packer.gather import Gather
from padless.packer.lines import LINE
from padless.packer.plan import PackPlan, plan_hash
from padless.packer.strategies import STRATEGIES
from padless.packer.table_writer import Places, pieces_of, write_table
from padless.packer.tables import SplitLines, collect
from padless.packer.token_store import ChunkStore, Counter, Reserved
from padless.packer.tokenizing import give_memory_back
from padless.packer.write import Layout, cut_shards, write_shard
from padless.runtime.format import WORK_FOLDER

HERE = Path(__file__).parent
CHUNK = 20_000
"""Sequences of a chunk: some 512 KiB of tiny records."""
CAP = 1024
"""Sequences in a pack, as `build` has it."""


def make_store(folder: str, sequences: int, mean: int) -> ChunkStore:
    """A finished store of sequences of 2 to 2 x `mean` - 2 tokens, all but the first trained."""
    store = ChunkStore(folder, "made up")
    ends = Reserved((Counter(0), Counter(0)))
    for number, first in enumerate(range(0, sequences, CHUNK)):
        count = min(CHUNK, sequences - first)
        draw = np.random.Generator(np.random.PCG64(number))
        lines = np.zeros(count, dtype=LINE)
        lines["record"] = np.arange(count)
        lines["length"] = draw.integers(2, 2 * mean - 1, count)
        lines["targets"] = lines["length"] - 1
        ends_of = np.cumsum(lines["length"])
        values = -1 - draw.integers(0, 50_000, int(ends_of[-1]), dtype=np.int32)
        starts = ends_of - lines["length"]
        values[starts] = -1 - values[starts]
        result = ChunkResult(lines, values, count, [], 0)
        store.commit(store.write(number, 0, 4 * len(values), result, ends))
    return store


class Stages:
    """Peaks over what the process held at the start, stage by stage, told per sequence."""

    def __init__(self, results: Results, case: str, sequences: int) -> None:
        self._results, self._case, self._sequences = results, case, sequences
        self._sampler = Sampler()
        before = pss(os.getpid())
        assert before is not None
        self._before = before[0]
        self._sampler.watch(os.getpid())
        self._since = time.perf_counter()

    def done(self, stage: str) -> None:
        """Enter the stage that has just ended."""
        peak, self._sampler.peak_anonymous = self._sampler.peak_anonymous - self._before, 0
        now = time.perf_counter()
        add = self._results.add
        add(self._case, stage, "wall", now - self._since, "s")
        add(self._case, stage, "peak_anonymous_pss", peak / 1e6, "MB")
        add(self._case, stage, "peak_by_sequence", peak / self._sequences, "bytes")
        self._since = now


def pack(store: ChunkStore, output: str, stages: Stages, options: argparse.Namespace) -> None:
    """The stages, as `packer/pipeline.py` has them."""
    lines: SplitLines = collect(store, 1, 1)[0]
    stages.done("lengths")
    plan: PackPlan = STRATEGIES[options.strategy](
        lines.lengths, options.max_length, max_sequences_per_pack=CAP, seed=0, shuffle=True
    )
    stages.done("plan")
    binary, _ = lay_elements(store)
    gather: Gather = gather_of(binary, None, lines, store.let_go)
    del binary
    lines.elements = lines.elements[:0].copy()
    layout = Layout(id_type="uint16", labels=False, compression=None, shard_bytes=512 * 2**20)
    cuts = cut_shards(plan, lines.lengths, layout)
    stages.done("elements")
    if lines.tokens >= commit.BUCKETS_FROM or options.buckets:
        from padless.packer.buckets import near

        gather = near(gather, plan, [batch for shard in cuts for batch in shard], output)
        stages.done("buckets")

    def table() -> None:
        write_table(output, pieces_of(store, 0, 1, lines), lines.lines, Places(plan, lines.lengths))

    with ThreadPoolExecutor(1) as other:
        beside = other.submit(table)
        if options.shards:
            with ThreadPoolExecutor(3) as pool:
                ask = [
                    pool.submit(write_shard, output, n, batches, plan, gather, layout, lambda tokens: None)
                    for n, batches in enumerate(cuts)
                ]
                for future in ask:
                    future.result()
        beside.result()
    stages.done("table and shards" if options.shards else "table")
    plan_hash(plan, lines.lengths, options.max_length)
    stages.done("hash")


def main() -> None:
    """Make the store, run the stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=float, default=1e8)
    parser.add_argument("--mean", type=int, default=4, help="tokens of a sequence")
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--strategy", default="bfd", choices=sorted(STRATEGIES))
    parser.add_argument("--buckets", action="store_true", help="also where the store is not large")
    parser.add_argument("--shards", action="store_true", help="write them too")
    parser.add_argument("--work", type=Path, help="where the store lies for the time of the run")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "bench_sequences.jsonl")
    options = parser.parse_args()
    sequences = int(options.sequences)
    case = f"{sequences:,} sequences of {options.mean} tokens, {options.strategy}"
    with tempfile.TemporaryDirectory(prefix="bench-sequences-", dir=options.work) as output:
        work = os.path.join(output, WORK_FOLDER)
        os.mkdir(work)
        store = make_store(work, sequences, options.mean)
        import pyarrow.parquet  # noqa: F401 (what every build loads)

        give_memory_back()
        pack(
            store, output, Stages(Results(bench="sequences", path=options.results), case, sequences), options
        )
        store.close()


if __name__ == "__main__":
    main()
