"""`pack-dataset repack` of a folder to another length, beside what copying the folder takes.

`moved` is what no repack goes below: a process that does nothing but compare the shards with their checksums
and write the same bytes in their order, hashed anew, past the page cache and onto the disk as repack does.
`start` is Python and what the command imports. Beside them stand the parts of a repack as `--profile` tells
them, and the seconds that a gigabyte a second would be.

Whole processes, in interleaved pairs, since a disk's speed moves from minute to minute. `cp` is timed with
and without waiting for the disk: repack's files are on the disk when it ends, cp's are not. A machine that
gives freed memory back to its host pays for touching it again, so each arm begins after `--rest` seconds; the
seconds of the processor move least.

Modules are imported from byte code, as they are where padless is installed, whatever
PYTHONDONTWRITEBYTECODE says here.

    python scripts/bench_repack.py --folder packed --max-length 4096 --workers 2 --work /tmp/bench
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from bench_results import Results

from padless.packer.durable import BLOCK, DurableFile
from padless.runtime.format import read_manifest

IMPORTED = [f"padless.packer.{name}" for name in ("commands", "commands_repack", "repack", "progress")]
"""What the command imports before it does anything."""
PART = re.compile(r"^ *(\d+\.\d+) s  (read|plan|write)\b", re.MULTILINE)
"""A line of `--profile`."""


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float, dict[str, float]]:
    """Seconds of a command's whole process, those of the processor, and those of the parts that it tells."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    run = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    parts = {name: float(value) for value, name in PART.findall(run.stdout + run.stderr)}
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, parts


def move(folder: Path, output: Path, workers: int) -> None:
    """Write the shards of a folder again as they are; both their old and their new bytes are hashed."""
    output.mkdir()

    def one(name: str) -> None:
        data = np.memmap(folder / name, dtype=np.uint8, mode="r")
        digest = xxhash.xxh3_128()
        with DurableFile(str(output), name, direct=True) as file:
            for start in range(0, len(data), BLOCK):
                digest.update(data[start : start + BLOCK])
                file.write(data[start : start + BLOCK])
            info = file.commit(lambda checksum: name)
        assert info.checksum == f"xxh3:{digest.hexdigest()}"

    with ThreadPoolExecutor(workers + 1) as pool:  # as many as repack has
        list(pool.map(one, [shard.file for shard in read_manifest(folder).shards]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, required=True, help="An empty folder on the same disk.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=5.0, help="Seconds before each arm.")
    parser.add_argument("--move", action="store_true", help="Only move the shards, into WORK/output.")
    arguments = parser.parse_args()
    if arguments.move:
        move(arguments.folder, arguments.work / "output", arguments.workers)
        return
    here = Path(__file__).parent
    results = Results(bench="repack", path=here / "results" / "bench_repack.jsonl")
    manifest = read_manifest(arguments.folder)
    size = sum(shard.bytes for shard in manifest.shards)
    case = f"{manifest.statistics['tokens'] / 1e6:.0f} M tokens, {size / 1e9:.2f} GB"
    output = arguments.work / "output"
    command = [sys.executable, "-m", "padless.packer.cli", "repack"]
    repack = [*command, str(arguments.folder), "--quiet", "--profile"]
    repack += ["--max-length", str(arguments.max_length), "--workers", str(arguments.workers)]
    copy = ["cp", "-r", str(arguments.folder), str(output)]
    arms = {
        "repack": [*repack, "--output", str(output)],
        "start": [sys.executable, "-c", f"import {', '.join(IMPORTED)}"],
        "moved": [sys.executable, __file__, *sys.argv[1:], "--move"],
        "cp": copy,
        "cp, on the disk": ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', *copy[2:]],
    }
    for shard in manifest.shards:  # into the page cache
        (arguments.folder / shard.file).read_bytes()
    bytecode = arguments.work / "bytecode"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for arm in ("repack", "moved"):  # their byte code
        timed(arms[arm], environment)
        shutil.rmtree(output)
    print(f"{case} at 1 GB/s: {size / 1e9:.2f} s; at 0.6 GB/s: {size / 0.6e9:.2f} s")
    for _ in range(arguments.rounds):
        for arm, command in arms.items():
            time.sleep(arguments.rest)
            seconds, processor, parts = timed(command, environment)
            results.add(case, arm, "seconds", seconds, "s")
            results.add(case, arm, "processor", processor, "s")
            if arm != "start":
                shutil.rmtree(output)
                results.add(case, arm, "shards", size / seconds / 1e9, "GB/s")
            for part, value in parts.items():
                results.add(case, arm, part, value, "s")
    shutil.rmtree(bytecode)


if __name__ == "__main__":
    main()
