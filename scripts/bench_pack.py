"""padless against the TRL way, as whole processes on the same file in one run.

First the outputs are held equal record by record, then the clock runs: imports, reading,
tokenizing, packing and writing, nothing else, in interleaved pairs (A B A B), since times move by a
quarter from hour to hour and only ratios within one run hold. Memory is measured in runs of its
own, so that its sampling costs the timed ones nothing. Two peers: `trl`, as TRL's own trainer prepares
a data set, and `trl_tuned`, which spares it the pickling of the tokenizer: the peer at its best.

    python scripts/bench_pack.py --input alpaca_data.json --tokenizer qwen3/ \
        --template qwen3/chatml.generation.jinja --rounds 3 --scale 10 40
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from bench_results import Results
from peak_memory import Sampler

HERE = Path(__file__).parent
PEERS = ("trl_tuned", "trl")
"""`trl` is the way of TRL's trainer, `trl_tuned` the best of it (bench_peer_trl.py)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both arms are asked to do, but for the input."""

    tokenizer: Path
    template: Path
    max_length: int
    work: Path
    """An empty folder for outputs and caches."""

    def command(self, arm: str, source: Path, workers: int, output: Path) -> list[str]:
        """The command line of an arm, from the environment that runs this script."""
        if arm == "padless":
            command = [str(Path(sys.executable).with_name("pack-dataset")), "build", "--quiet"]
            command += ["--train-on", "assistant", "--workers", str(workers)]
        else:
            command = [sys.executable, str(HERE / "bench_peer_trl.py"), "--processes", str(workers)]
            command += ["--tuned"] if arm == "trl_tuned" else []
        command += ["--tokenizer", str(self.tokenizer), "--template", str(self.template)]
        command += ["--max-length", str(self.max_length), "--output", str(output)]
        return [*command, str(source)]

    @contextmanager
    def environment(self) -> Iterator[dict[str, str]]:
        """Variables for a child with a cache of its own, so that tokenizing is really done."""
        cache = tempfile.mkdtemp(prefix="cache-", dir=self.work)
        # Modules are compiled once, by the runs that are compared and not timed, as an installation does.
        compiled = self.work / "compiled"
        given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        try:
            yield {**given, "HF_HOME": cache, "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": str(compiled)}
        finally:
            shutil.rmtree(cache)

    def fresh(self, name: str) -> Path:
        """A path below the work folder at which nothing lies."""
        output = self.work / name
        shutil.rmtree(output, ignore_errors=True)
        return output


def timed(job: Job, command: Sequence[str], *, sampler: Sampler | None = None) -> float:
    """Run a command to its end; wall seconds. Exits with the command's words if it fails."""
    with job.environment() as environment:
        os.sync()
        started = time.perf_counter()
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if sampler:
            sampler.watch(child.pid)
        _, words = child.communicate()
        seconds = time.perf_counter() - started
    if child.returncode:
        sys.exit(f"{' '.join(command)}\nended with {child.returncode}:\n{words[-4000:]}")
    return seconds


def repeat_records(source: Path, copies: int, target: Path) -> None:
    """Write the records of a JSON array or JSONL file `copies` times, one copy in memory."""
    raw = source.read_bytes().strip()
    if raw.startswith(b"["):
        opening, body, between, closing = b"[", raw[1:-1].strip(), b",\n", b"]\n"
    else:
        opening, body, between, closing = b"", raw, b"\n", b"\n"
    with target.open("wb") as out:
        out.write(opening)
        for copy in range(copies):
            out.write(between if copy else b"")
            out.write(body)
        out.write(closing)


def compare(packed: Path, dump: Path) -> tuple[int, int]:
    """Hold every record's ids and labels in padless's folder against the peer's, before packing.

    Returns records and tokens compared; exits naming the first record that differs.
    """
    from padless.runtime.reader import PackedReader

    reader = PackedReader(packed)
    lines = reader.sequence_table(columns=["record", "status", "pack", "offset", "length"])
    peer = pq.read_table(dump)
    ids = peer["input_ids"].combine_chunks()
    labels = peer["labels"].combine_chunks()
    starts = np.asarray(ids.offsets)
    ids, labels = np.asarray(ids.values), np.asarray(labels.values)
    if lines["record"].to_pylist() != list(range(len(peer))):
        sys.exit(f"padless has {len(lines)} sequences for the peer's {len(peer)} records")
    # Visited pack by pack, so that each pack is read once.
    for row in lines.sort_by("pack").to_pylist():
        record, begin, end = row["record"], row["offset"], row["offset"] + row["length"]
        if row["status"] != "whole":
            sys.exit(f"record {record}: {row['status']} by padless; choose a longer --max-length")
        pack = reader[row["pack"]]
        theirs = slice(starts[record], starts[record + 1])
        wanted = labels[theirs].copy()
        wanted[:1] = -100  # a sequence's first token is nobody's target
        if not np.array_equal(pack.input_ids[begin:end], ids[theirs]):
            sys.exit(f"record {record}: the ids differ")
        if not np.array_equal(pack.labels[begin:end], wanted):
            sys.exit(f"record {record}: the labels differ")
    return len(peer), len(ids)


def duel(
    job: Job, source: Path, workers: int, rounds: int, each: int, peers: Sequence[str], results: Results
) -> None:
    """Interleaved whole processes: each time, medians, ratios of medians and minima.

    A round is `each` runs of padless and one of each peer: a run of two seconds is noisier than one of 20.
    """
    case = f"{source.name}, {workers} worker{'s' if workers > 1 else ''}"
    arms = ("padless", *peers)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in ("padless",) * each + tuple(peers):
            seconds[arm].append(timed(job, job.command(arm, source, workers, job.fresh(arm))))
            results.add(case, arm, "wall", seconds[arm][-1], "s")
    for arm in arms:
        results.add(case, arm, "wall_median", statistics.median(seconds[arm]), "s")
        results.add(case, arm, "wall_min", min(seconds[arm]), "s")
    for arm in peers:
        for name, middle in (("medians", statistics.median), ("minima", min)):
            ratio = middle(seconds[arm]) / middle(seconds["padless"])
            results.add(case, f"{arm} / padless", f"ratio_of_{name}", ratio, "x")


def measure_scale(job: Job, source: Path, copies: int, workers: int, results: Results) -> None:
    """padless on `copies` times the input: throughput from one run, peak memory from another."""
    case = f"{source.name} x {copies}, {workers} worker{'s' if workers > 1 else ''}"
    grown = job.work / f"grown{source.suffix}"
    repeat_records(source, copies, grown)
    output = job.fresh("padless")
    seconds = timed(job, job.command("padless", grown, workers, output))
    told = json.loads((output / "manifest.json").read_bytes())["statistics"]
    results.add(case, "padless", "wall", seconds, "s")
    results.add(case, "padless", "records_per_second", told["records"]["in"] / seconds, "records/s")
    results.add(case, "padless", "tokens_per_second", told["tokens"] / seconds, "tokens/s")
    results.add(case, "padless", "input_per_second", grown.stat().st_size / seconds / 1e6, "MB/s")
    sampler = Sampler()
    command = job.command("padless", grown, workers, job.fresh("padless"))
    timed(job, command, sampler=sampler)
    results.add(case, "padless", "peak_anonymous_pss", sampler.peak_anonymous / 1e6, "MB")
    results.add(case, "padless", "peak_pss", sampler.peak_all / 1e6, "MB")
    grown.unlink()


def main() -> None:
    """Compare, then time, then scale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, required=True, help="alpaca or sharegpt records: JSON or JSONL")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder")
    parser.add_argument("--template", type=Path, required=True, help="with generation blocks")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 1], help="one duel for each")
    parser.add_argument("--rounds", type=int, default=3, help="pairs a duel; 0: only compare")
    parser.add_argument("--each", type=int, default=3, help="runs of padless in each round")
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS, help="arms of the duels")
    parser.add_argument("--copies", type=int, default=1, help="time the duels on the input N times over")
    parser.add_argument("--scale", type=int, nargs="*", default=[], help="repeat the input N times")
    parser.add_argument("--keep", action="store_true", help="keep the work folder")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "bench_pack.jsonl")
    options = parser.parse_args()

    work = Path(tempfile.mkdtemp(prefix="bench-pack-"))
    job = Job(
        tokenizer=options.tokenizer,
        template=options.template,
        max_length=options.max_length,
        work=work,
    )
    results = Results(bench="pack", path=options.results)
    try:
        workers = options.workers[0]
        dump = work / "peer.parquet"
        timed(job, job.command("padless", options.input, workers, work / "padless"))
        peer = job.command("trl_tuned", options.input, workers, work / "trl_tuned")
        timed(job, [*peer, "--dump", str(dump)])
        records, tokens = compare(work / "padless", dump)
        print(f"equal: {records:,} records, {tokens:,} tokens, ids and labels", flush=True)
        source = options.input
        if options.copies > 1:
            source = work / f"{source.stem} x {options.copies}{source.suffix}"
            repeat_records(options.input, options.copies, source)
        for workers in options.workers if options.rounds else []:
            duel(job, source, workers, options.rounds, options.each, options.peers, results)
        for copies in options.scale:
            for workers in options.workers:
                measure_scale(job, options.input, copies, workers, results)
    finally:
        if options.keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
