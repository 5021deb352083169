"""How fast packed folders become ready batches, against TRL's loader and the flattening collator.

    python scripts/bench_stream.py packed-2048 packed-8192 --results scripts/results/stream.jsonl
    python scripts/bench_stream.py packed-10gb --packs-per-batch          # the first batch and memory alone

One process, no workers, packs in random order, whole batches on the CPU. `numpy` is padless where
numba is not installed, `trl` is `load_from_disk` with TRL's padding-free collator, `flattening` the
same rows cut into sequences with transformers' collator, `memcpy` a copy of as many bytes as a batch
has. The first batches of all arms are compared before anything is timed. Values are the best of some
passes, taken in turns: on a shared machine everything else measures the neighbours. The first batch is
timed from the end of the imports in new processes (the median of some; the files are in the page cache
by then), and there also how much memory that no file backs (anonymous) has grown from the first
thousand batches to the last ones.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from bench_results import Results
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from padless.runtime import gather
from padless.runtime.gather import NUMPY_BATCHES
from padless.runtime.stream import PackedStream

PASSES = 5
NEW_PROCESS = """
import sys, time
import torch
from padless.runtime.stream import PackedStream

def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

torch.set_num_threads(1)
begin = time.perf_counter()
batches = iter(PackedStream(sys.argv[1], rank=0, world_size=1))
next(batches)
first = time.perf_counter() - begin
grown = 0.0
if sys.argv[2] == "memory":
    for number, _ in enumerate(batches):
        if number == 1000:
            grown = -anonymous()
    grown += anonymous() if grown else 0
print(first * 1000, grown)
"""
TOKENS_A_PASS = {
    "padless": 60_000_000,
    "numpy": 60_000_000,
    "memcpy": 40_000_000,
    "trl": 1_000_000,
    "flattening": 1_000_000,
}


class Sequences(torch.utils.data.Dataset[list[dict[str, list[int]]]]):
    """The sequences of each row of a data set, as the flattening collator wants them."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[dict[str, list[int]]]:
        row = self.rows[index]
        labels = row.get("labels", row["input_ids"])
        ends = np.cumsum(row["seq_lengths"]).tolist()
        return [
            {"input_ids": row["input_ids"][start:end], "labels": labels[start:end]}
            for start, end in zip([0, *ends], ends, strict=False)
        ]


def order_of(stream: PackedStream, packs: int) -> list[int]:
    """The packs of a stream's first epoch, by the sequence ids they begin with."""
    firsts = {int(stream.reader[number].sequence_ids[0]): number for number in range(packs)}
    return [firsts[int(batch["sequence_ids"][0])] for batch in stream]


def batches_of(arm: str, folder: Path, packs_per_batch: int, order: list[int]) -> Iterable[Any]:
    """An epoch of one arm, its packs in the given order."""
    if arm in ("padless", "numpy"):
        # Asked with every batch until there were so many.
        gather.NUMPY_BATCHES = NUMPY_BATCHES if arm == "padless" else sys.maxsize
        return PackedStream(folder, packs_per_batch=packs_per_batch, rank=0, world_size=1)
    if arm == "memcpy":
        return copies(folder, packs_per_batch)
    rows = datasets.load_from_disk(str(folder))
    common: dict[str, Any] = {"batch_size": packs_per_batch, "sampler": order, "drop_last": True}
    if arm == "trl":
        rows = rows.remove_columns([name for name in rows.column_names if name not in TRL_COLUMNS])
        collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        return DataLoader(rows, collate_fn=collator, **common)
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return DataLoader(
        Sequences(rows), collate_fn=lambda packs: flatten([one for pack in packs for one in pack]), **common
    )


TRL_COLUMNS = ("input_ids", "labels", "seq_lengths")


def copies(folder: Path, packs_per_batch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Fresh copies of an array with the 28 bytes a token of a batch, for ever."""
    batch = next(iter(PackedStream(folder, packs_per_batch=packs_per_batch, rank=0, world_size=1)))
    tokens = batch["input_ids"].shape[1]
    source = np.ones(28 * tokens, dtype=np.uint8)
    while True:
        source.copy()
        yield {"input_ids": batch["input_ids"]}


def check_equal(folder: Path, packs_per_batch: int, order: list[int]) -> None:
    """See that the arms' first batches hold the same packs with the same boundaries."""
    ours = next(iter(batches_of("padless", folder, packs_per_batch, order)))
    for arm in ("numpy", "trl", "flattening"):
        theirs = next(iter(batches_of(arm, folder, packs_per_batch, order)))
        for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "seq_idx"):
            if not torch.equal(ours[key], theirs[key].to(ours[key].dtype)):
                raise SystemExit(f"{arm} gives other {key} than padless; nothing is timed")


def tokens_per_second(arm: str, folder: Path, packs_per_batch: int, order: list[int]) -> float:
    """One pass over some batches of an arm."""
    tokens = 0
    source = batches_of(arm, folder, packs_per_batch, order)
    batches = chain.from_iterable(iter(source) for _ in count())
    next(batches)
    begin = time.perf_counter()
    for batch in batches:
        tokens += batch["input_ids"].shape[1]
        if tokens >= TOKENS_A_PASS[arm]:
            break
    return tokens / (time.perf_counter() - begin)


def in_a_new_process(folder: Path, what: str) -> tuple[float, float]:
    """Milliseconds to the first batch, and MiB that an epoch's memory has grown (`what` is memory)."""
    command = [sys.executable, "-c", NEW_PROCESS, str(folder), what]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(told[0]), float(told[1])


def main() -> None:
    """Measure every folder with 1 and with 8 packs a batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--packs-per-batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--results", type=Path, default=Path("scripts/results/stream.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(bench="stream", path=args.results)
    for folder in args.folders:
        stream = PackedStream(folder, rank=0, world_size=1)
        length = stream.reader.manifest.statistics["max_length"]
        size = sum(shard.bytes for shard in stream.reader.manifest.shards) / 1e9
        case = f"packs of {length}, {size:.1f} GB"
        firsts = [in_a_new_process(folder, "time")[0] for _ in range(PASSES)]
        results.add(case, "padless", "first batch", statistics.median(firsts), "ms")
        results.add(case, "padless", "memory grown", in_a_new_process(folder, "memory")[1], "MiB")
        if not args.packs_per_batch:
            continue
        order = order_of(stream, len(stream))
        for packs in args.packs_per_batch:
            case = f"{packs} x {length}"
            check_equal(folder, packs, order)
            best: dict[str, float] = dict.fromkeys(TOKENS_A_PASS, 0.0)
            for _ in range(PASSES):
                for arm in TOKENS_A_PASS:
                    best[arm] = max(best[arm], tokens_per_second(arm, folder, packs, order))
            for arm, value in best.items():
                results.add(case, arm, "tokens per second", value, "tokens/s")
            for arm in ("padless", "numpy"):
                results.add(case, arm, "times trl", best[arm] / best["trl"], "x")


if __name__ == "__main__":
    main()
