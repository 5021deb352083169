"""How long workers idle at the end of a build whose longest record comes last, looking ahead and not.

The input is texts of some hundred bytes and, behind them, one record of 50 MB, which is a chunk of its own.
In one arm chunks go out in the order of the sources, in the other as `packer/ahead.py` hands them out. Every
worker's processor time by task is written down: who has least of it waits for who has most, and that share of
all workers' time is what idles. Processor time, because a busy machine changes it little.

    python scripts/bench_stealing.py --tokenizer qwen3/ --work /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_results import Results

from padless.packer import PackConfig, ahead, pack_dataset, processes

HERE = Path(__file__).parent


def write_input(path: Path, megabytes: int, last: int) -> None:
    """Texts of so many MB, and one of `last` bytes behind them."""
    words = [f"word{number % 9973} and" for number in range(20_000)]
    with path.open("w") as out:
        for number in range(megabytes * 1_000_000 // 170):
            at = number * 7 % 19_000
            out.write(json.dumps({"text": " ".join(words[at : at + 12])}) + "\n")
        long = " ".join(words) + ". "
        out.write(json.dumps({"text": long * (last // len(long))}) + "\n")


def busy(config: PackConfig, folder: Path) -> list[float]:
    """Processor seconds of each worker's tasks in one build."""
    complete = processes.complete

    def timed(*given: Any) -> Any:
        begin = time.process_time()
        try:
            return complete(*given)
        finally:
            with (folder / str(os.getpid())).open("a") as out:
                out.write(f"{time.process_time() - begin}\n")

    folder.mkdir()
    processes.complete = timed
    try:
        pack_dataset(config)
    finally:
        processes.complete = complete
    return [sum(map(float, path.read_text().split())) for path in folder.iterdir()]


def main() -> None:
    """Both arms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--megabytes", type=int, default=200, help="of short texts")
    parser.add_argument("--last", type=int, default=50_000_000, help="bytes of the last record")
    parser.add_argument("--work", type=Path, help="where input and output lie for the time of the run")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "bench_stealing.jsonl")
    options = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("workers are processes on Linux alone")
    results = Results(bench="stealing", path=options.results)
    case = (
        f"{options.megabytes} MB of texts, then one of {options.last / 1e6:.0f} MB, {options.workers} workers"
    )
    large = ahead.LARGE
    with tempfile.TemporaryDirectory(prefix="bench-stealing-", dir=options.work) as name:
        work = Path(name)
        write_input(work / "texts.jsonl", options.megabytes, options.last)
        for arm, limit in (("in order", 2**62), ("large ones ahead", large)):
            ahead.LARGE = limit
            config = PackConfig(
                sources=(str(work / "texts.jsonl"),),
                tokenizer=options.tokenizer,
                max_length=4096,
                format="text",
                overflow="split",
                workers=options.workers,
                output=str(work / arm),
            )
            found = busy(config, work / f"busy {arm}")
            found += [0.0] * (options.workers - len(found))
            results.add(case, arm, "busiest worker", max(found), "processor s")
            results.add(case, arm, "least busy worker", min(found), "processor s")
            results.add(case, arm, "idle", 1 - sum(found) / len(found) / max(found), "share of the workers")


if __name__ == "__main__":
    main()
