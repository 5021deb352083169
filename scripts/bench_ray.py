"""`pack-dataset build --engine ray` beside the local engine, on the cores of this machine.

Whole processes, each arm into a fresh folder; the folders must be the same to the byte. The cluster (one
node) is started before the clock, and its start is a row of its own; joining it, its workers' start and the
tokenizer's load in each of them are in the arm's seconds.

    python scripts/bench_ray.py --source x40.json --tokenizer qwen3/ --template chatml --work /tmp/bench
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from bench_results import Results
from ray.cluster_utils import Cluster


def built(command: list[str]) -> tuple[float, float, dict[str, Any]]:
    """Seconds of a build's whole process, those of the processor (its children's too), and its summary."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, processor, json.loads(run.stdout)


def digest(folder: Path) -> str:
    """One hash over the names and bytes of all files."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--template")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, required=True, help="A folder for the packed folders.")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    results = Results(bench="ray", path=Path(__file__).parent / "results" / "bench_ray.jsonl")
    size = arguments.source.stat().st_size
    case = f"{arguments.source.stem}, {size / 1e6:.0f} MB, {arguments.workers} cores, ray {ray.__version__}"
    build = [sys.executable, "-m", "padless.packer.cli", "build", str(arguments.source), "--json", "--quiet"]
    build += ["--tokenizer", arguments.tokenizer, "--max-length", str(arguments.max_length)]
    build += ["--template", arguments.template] if arguments.template else []
    start = time.perf_counter()
    node = {"num_cpus": arguments.workers, "include_dashboard": False, "object_store_memory": 2**30}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    results.add(case, "ray", "cluster start", time.perf_counter() - start, "s")
    arms = {
        "local": ["--workers", str(arguments.workers)],
        "ray": ["--engine", "ray", "--ray-address", cluster.address],
    }
    try:
        for _ in range(arguments.rounds):
            hashes, took = {}, {}
            for arm, options in arms.items():
                output = arguments.work / arm
                shutil.rmtree(output, ignore_errors=True)
                took[arm], processor, facts = built([*build, *options, "--output", str(output)])
                results.add(case, arm, "seconds", took[arm], "s")
                # Of the ray arm that is the driver alone, whose share bounds how many workers it can feed.
                results.add(case, arm, "processor", processor, "s")
                results.add(case, arm, "tokenize", facts["profile"]["tokenize"], "s")
                results.add(case, arm, "write", facts["profile"]["write"], "s")
                results.add(case, arm, "speed", facts["tokens"] / took[arm] / 1e6, "M tokens/s")
                hashes[arm] = digest(output)
                shutil.rmtree(output)
            if len(set(hashes.values())) != 1:
                raise SystemExit("the two engines gave different bytes")
            results.add(case, "ray", "seconds to local's", took["ray"] / took["local"], "times")
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
