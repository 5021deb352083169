"""Times `pack-dataset report` as a whole process, with its peak memory: of folders, and of made-up ones.

    python scripts/bench_report.py packed-alpaca --packs 1000000
    python scripts/bench_report.py --estimate large.jsonl --tokenizer qwen3/

Every case three times, each some rows of results/bench_report.jsonl. With --estimate also `pack-dataset
estimate` of these sources, whose time should not go with their size. A made-up folder has a real sequence
table and a manifest over an empty shard of the right size: the report reads the tokens only to look for
duplicates, which it leaves out for so many.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench_results import Results

from padless.runtime.format import checksum_file

RESULTS = Path(__file__).parent / "results" / "bench_report.jsonl"
TIMES = 3
SEQUENCES_A_PACK = 10
MAX_LENGTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--packs", type=int, help="also a made-up folder of so many packs")
    parser.add_argument("--estimate", nargs="*", type=Path, default=[], help="sources to estimate")
    parser.add_argument("--tokenizer", type=Path, help="for --estimate")
    parser.add_argument(
        "--busy", action="store_true", help="others work on the machine too, so the clock says nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = Results(bench="report", path=args.out)
    with tempfile.TemporaryDirectory() as scratch:
        folders = list(args.folders)
        if args.packs:  # in a process of its own: a child's peak begins with what its parent holds
            folders.append(Path(scratch) / f"made-up, {args.packs:,} packs")
            maker = multiprocessing.Process(target=make_folder, args=(folders[-1], args.packs))
            maker.start()
            maker.join()
        cases = [
            (folder.name, f"report {' '.join(more[:1])}".strip(), ["report", str(folder), *more])
            for folder in folders
            for more in ([], ["--json"], ["--html", f"{scratch}/report.html"])
        ]
        for source in args.estimate:
            size = f"{source.name}, {source.stat().st_size / 1e6:,.0f} MB"
            cases.append((size, "estimate", ["estimate", str(source), "--tokenizer", str(args.tokenizer)]))
        for case, arm, words in cases:
            for _ in range(TIMES):
                seconds, processor, peak = measured(words)
                if not args.busy:
                    results.add(case, arm, "seconds", seconds, "s")
                results.add(case, arm, "processor time", processor, "s")
                results.add(case, arm, "peak memory", peak / 2**20, "MiB")


def measured(arguments: list[str]) -> tuple[float, float, int]:
    """Seconds of the process by the clock and on processors, and the bytes it held at its peak."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "padless.packer.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {arguments}")
    unit = 1 if sys.platform == "darwin" else 1024
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit


def make_folder(folder: Path, packs: int) -> None:
    """A folder of so many packs, ten sequences each, in an order that has nothing to do with the table's."""
    (folder / "tokenizer").mkdir(parents=True)
    generator = np.random.default_rng(0)
    count = packs * SEQUENCES_A_PACK
    lengths = generator.integers(10, 2 * MAX_LENGTH // SEQUENCES_A_PACK - 10, count, dtype=np.int32)
    numbers = np.arange(count, dtype=np.int64)
    columns = {
        "record": numbers,
        "source": np.zeros(count, np.int32),
        "row": numbers,
        "part": np.zeros(count, np.int32),
        "status": pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["whole"]).cast(pa.string()),
        "reason": pa.nulls(count, pa.string()),
        "start": np.zeros(count, np.int64),
        "length": lengths,
        "num_targets": lengths // 2,
        "cut": np.zeros(count, np.int64),
        "pack": generator.permutation(np.repeat(np.arange(packs), SEQUENCES_A_PACK)),
        "offset": np.zeros(count, np.int32),
    }
    table = folder / "sequences.parquet"
    pq.write_table(pa.table(columns), table, row_group_size=2**16)
    tokens = int(lengths.sum())
    with (folder / "shard-00000-00000000.arrow").open("wb") as shard:
        shard.truncate(4 * tokens)
    kinds = [
        ("input_ids", "token", "list<int32>"),
        ("labels", "token", "list<int32>"),
        ("seq_lengths", "sequence", "list<int32>"),
        ("sequence_ids", "sequence", "list<int64>"),
        ("num_tokens", "pack", "int32"),
        ("num_targets", "pack", "int32"),
        ("max_seqlen", "pack", "int32"),
        ("attention_cost", "pack", "int64"),
    ]
    nothing = "xxh3:" + 32 * "0"
    trained = int((lengths // 2).sum())
    manifest = {
        "format": "padless",
        "version": 1,
        "kind": "packs",
        "shards": [
            {"file": "shard-00000-00000000.arrow", "packs": packs, "sequences": count, "tokens": tokens}
            | {"bytes": 4 * tokens, "checksum": nothing, "batches": [[1000, packs]]}
        ],
        "sequence_tables": [
            {"file": "sequences.parquet", "lines": count, "checksum": checksum_file(table)}
            | {"bytes": table.stat().st_size}
        ],
        "tokenizer": {"files": [], "fingerprint": None, "vocab_size": 100_000, "largest_id": 99_999},
        "chat_template": {"checksum": None},
        "columns": [{"name": name, "level": level, "type": kind} for name, level, kind in kinds],
        "options": {"max_length": MAX_LENGTH, "strategy": "bfd"},
        "sources": [{"path": "made-up.jsonl", "bytes": 1, "checksum": nothing, "records": count}],
        "seed": 0,
        "plan_hash": nothing,
        "statistics": {"max_length": MAX_LENGTH, "sequences": count, "packs": packs, "tokens": tokens}
        | {"bound_packs": -(-tokens // MAX_LENGTH), "trained_tokens": trained, "cut_tokens": 0}
        | {"masked_tokens": tokens - trained, "empty_replies": 0}
        | {"records": {"in": count, "whole": count, "truncated": 0, "split": 0, "dropped": 0}}
        | {"dropped_by_reason": {}, "cut_by_reason": {}},
        "padless": "0.1.0",
        "pyarrow": pa.__version__,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    main()
