"""Kill builds, repacks and exports at random moments, run the same command again, and compare every byte.

A trial starts the command, sends SIGKILL at a random moment (drawn over the run's usual time, or over what
it gets done: chunks, shards, the commit), starts it again, kills it again up to five times, and lets the
last run end. Signals go to the process alone, as for want of memory, or to its workers too, as when a
machine is lost. The folder must then be the uninterrupted one, file for file, with nothing else in it or
beside it. What lies on the disk at a kill tells the stage it fell into, and bounds the work to be done
again: chunks that were being tokenized, bytes of shards that were not complete, weighed by what the stages
take in an uninterrupted run.

    python scripts/stress_kills.py --input alpaca_data.json --tokenizer qwen3/ \
        --template qwen3/chatml.generation.jinja --copies 4 --kills 100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from bench_pack import repeat_records

WORKERS = 2
MOST_KILLS = 5
"""Of one folder."""
PACK = [sys.executable, "-m", "padless.packer.cli"]


@dataclass(kw_only=True)
class Case:
    """A command, all but its output, and what it gives when nothing comes between."""

    name: str
    arguments: list[str]
    before: Path | None = None
    """A folder that lies at the output at first, for `--force`."""
    files: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)
    """What the uninterrupted run printed."""
    shards: int = 0
    shard_bytes: int = 0
    chunks: int = 0

    def command(self, output: Path) -> list[str]:
        words = [*PACK, *self.arguments, "--output", str(output), "--json"]
        return words if self.arguments[0] == "export" else [*words, "--workers", str(WORKERS)]

    def place(self, output: Path) -> None:
        """Make the output what it is before the first run."""
        if output.exists():
            shutil.rmtree(output)
        if self.before is not None:
            shutil.copytree(self.before, output)


def checksums(folder: Path) -> dict[str, str]:
    """Every file below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    return found


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a session of its own, so that a signal can reach the workers too."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(command: Sequence[str]) -> tuple[dict[str, Any], float]:
    """Run to the end; what it told, and its seconds."""
    begin = time.perf_counter()
    with start(command) as child:
        out, words = child.communicate()
    if child.returncode:
        sys.exit(f"{' '.join(command)}\nended with {child.returncode}:\n{words[-4000:]}")
    told: dict[str, Any] = json.loads(out)
    return told, time.perf_counter() - begin


def kill_at(command: Sequence[str], moment: Callable[[], bool], *, everybody: bool) -> float | None:
    """Start, kill at the moment; the seconds until then, None where it had ended by itself."""
    begin = time.perf_counter()
    with start(command) as child:
        while child.poll() is None:
            if moment():
                if everybody:
                    os.killpg(child.pid, signal.SIGKILL)
                else:
                    child.kill()
                child.communicate()
                return time.perf_counter() - begin if child.returncode else None
            time.sleep(0.0005)
        _, words = child.communicate()
    if child.returncode:
        sys.exit(f"{' '.join(command)}\nended with {child.returncode} unkilled:\n{words[-4000:]}")
    return None


def moment_of(case: Case, output: Path, chance: random.Random) -> Callable[[], bool]:
    """A moment drawn over the time, or over what has been done: chunks, shards, the commit."""
    begin = time.perf_counter()
    after = chance.uniform(0.3, max(case.seconds, 0.4))
    late = chance.uniform(0.0, 0.03)
    kind = chance.choice(
        ["time", "chunks", "shards", "commit"] if case.chunks else ["time", "shards", "commit"]
    )
    chunks = chance.randint(0, case.chunks)
    shards = chance.randint(1, max(case.shards, 1))
    old = len(list(output.rglob("shard-*")))
    seen = 0.0

    def reached() -> bool:
        if case.arguments[0] == "export":
            if kind == "time":
                return time.perf_counter() - begin > after
            beside = output.parent / f".{output.name}.export"
            return beside.exists() and (kind == "shards" or len(list(beside.iterdir())) > 1)
        if kind == "chunks":
            return finished_chunks(output) >= chunks and (output / ".work" / "journal.jsonl").exists()
        if kind == "shards":
            return len(list(output.rglob("shard-*"))) - old >= shards
        if kind == "commit":
            return len(list(output.rglob("shard-*"))) - old >= case.shards
        return time.perf_counter() - begin > after

    def moment() -> bool:
        nonlocal seen
        with contextlib.suppress(FileNotFoundError):  # what is looked at may go while it is
            if not seen and reached():
                seen = time.perf_counter() + late
        return bool(seen) and time.perf_counter() >= seen

    return moment


def stage_of(case: Case, output: Path) -> str:
    """Where a killed run was, by what it left."""
    if case.arguments[0] == "export":
        beside = output.parent / f".{output.name}.export"
        return "exported" if output.exists() else "exporting" if beside.exists() else "starting"
    work = output / ".work"
    if not work.exists():
        return "done" if (output / "manifest.json").exists() else "starting"
    if case.arguments[0] == "build" and finished_chunks(output) < case.chunks:
        return "tokenizing"
    names = {path.name for path in output.rglob("*")}
    if "manifest.json" in names and case.before is None:
        return "committing"
    if "state.json" in names and case.before is None:
        return "committing"
    if any(name.startswith(("shard-", ".shard-")) for name in names) and case.before is None:
        return "writing"
    if len(list(output.rglob("*shard-*"))) > (len(list(case.before.rglob("shard-*"))) if case.before else 0):
        return "writing"
    return "planning" if case.arguments[0] == "build" else "reading"


def finished_chunks(output: Path) -> int:
    """Chunks in the journal, its head apart."""
    try:
        return max((output / ".work" / "journal.jsonl").read_bytes().count(b"\n") - 1, 0)
    except OSError:
        return 0


def unfinished_bytes(case: Case, output: Path, kept: int) -> int:
    """Bytes of shards on the disk that the next run wrote again."""
    old = sum(path.stat().st_size for path in case.before.rglob("*shard-*")) if case.before else 0
    return max(sum(path.stat().st_size for path in output.rglob("*shard-*")) - old - kept, 0)


def measure(case: Case, output: Path) -> None:
    """The uninterrupted run: its files, its time, its chunks."""
    times = []
    for _ in range(3):
        case.place(output)
        case.told, seconds = finish(case.command(output))
        times.append(seconds)
    case.seconds = statistics.median(times)
    case.files = checksums(output)
    case.chunks = case.told.get("chunks", 0)
    case.shards = len(list(output.rglob("shard-*")))
    case.shard_bytes = sum(path.stat().st_size for path in output.rglob("shard-*"))


def shares(case: Case) -> dict[str, float]:
    """What the stages take of an uninterrupted run: tokenizing, planning, writing."""
    profile = case.told.get("profile", {})
    total = sum(profile.values()) or 1.0
    late = {name: profile.get(name, 0.0) / total for name in ("plan", "write")}
    return {"tokenize": 1.0 - sum(late.values()), **late}


def trial(case: Case, output: Path, chance: random.Random) -> tuple[list[str], float, float]:
    """Some kills and the run to the end: stages, redone share (counted), redone share (wall)."""
    case.place(output)
    stages: list[str] = []
    redone = spent = 0.0
    for _ in range(chance.randint(1, MOST_KILLS)):
        moment = moment_of(case, output, chance)
        seconds = kill_at(case.command(output), moment, everybody=chance.random() < 0.5)
        if seconds is None:
            stages.append("ended before")
            break
        spent += seconds
        stage = stage_of(case, output)
        stages.append(stage)
        part = shares(case)
        if stage == "tokenizing":
            left = case.chunks - finished_chunks(output)
            redone += part["tokenize"] * min(left, WORKERS) / case.chunks
        elif stage == "planning":
            redone += part["plan"]
        elif stage == "writing":
            whole = sum(path.stat().st_size for path in output.rglob("shard-*"))
            lost = unfinished_bytes(case, output, whole)
            redone += part["plan"] + part["write"] * min(lost / case.shard_bytes, 1.0)
    _, seconds = finish(case.command(output))
    spent += seconds
    found = checksums(output)
    if found != case.files:
        other = sorted(name for name in {*found, *case.files} if found.get(name) != case.files.get(name))
        sys.exit(f"{case.name}: after {', '.join(stages)} these files differ: {other[:8]} (kept: {output})")
    beside = sorted(path.name for path in output.parent.iterdir() if path != output)
    if beside:
        sys.exit(f"{case.name}: after {', '.join(stages)} there is {beside} beside the output")
    return stages, redone, max(spent - case.seconds, 0.0) / case.seconds


def main() -> None:
    """Measure each case, then kill it again and again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, required=True, help="alpaca records: JSON or JSONL")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder")
    parser.add_argument("--template", type=Path, help="chat template")
    parser.add_argument("--copies", type=int, default=4, help="the input N times over")
    parser.add_argument("--kills", type=int, default=100, help="over all cases")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="stress-kills-"))
    source = work / f"input{options.input.suffix}"
    repeat_records(options.input, options.copies, source)
    template = ["--template", str(options.template)] if options.template else []
    build = ["build", str(source), "--tokenizer", str(options.tokenizer), *template, "--max-length", "2048"]
    build += ["--shard-size", str(max(source.stat().st_size // 20, 2**16))]
    old, packed = work / "old", work / "packed"
    finish([*PACK, *build, "--limit", "5000", "--output", str(old), "--json"])
    finish([*PACK, *build, "--output", str(packed), "--json"])
    cases = [
        Case(name="build bfd", arguments=[*build, "--strategy", "bfd"]),
        Case(name="build spread", arguments=[*build, "--strategy", "spread"]),
        Case(name="build splits", arguments=[*build, "--eval-fraction", "0.2"]),
        Case(name="build --force", arguments=[*build, "--force"], before=old),
        Case(
            name="repack", arguments=["repack", str(packed), "--max-length", "4096", "--strategy", "spread"]
        ),
        Case(name="export axolotl", arguments=["export", str(packed), "--to", "axolotl"]),
    ]
    cases = [case for case in cases if not options.only or case.name in options.only]
    chance = random.Random(options.seed)
    output = work / "run" / "out"
    output.parent.mkdir()
    for case in cases:
        measure(case, output)
        print(f"{case.name}: {case.seconds:.2f} s, {case.chunks} chunks, {shares(case)}", flush=True)
    stages: dict[str, Counter[str]] = {case.name: Counter() for case in cases}
    redone = {case.name: 0.0 for case in cases}
    wall = {case.name: 0.0 for case in cases}
    killed = {case.name: 0 for case in cases}
    kills = number = 0
    while kills < options.kills:
        case = cases[number % len(cases)]
        number += 1
        seen, counted, extra = trial(case, output, chance)
        fresh = sum(stage != "ended before" for stage in seen)
        kills += fresh
        killed[case.name] += fresh
        stages[case.name].update(seen)
        redone[case.name] += counted
        wall[case.name] += extra
        print(f"{kills:4} {case.name}: {', '.join(seen)}", flush=True)
    print(f"{kills} kills in {number} runs, every byte as in an uninterrupted run, nothing else left:")
    for case in cases:
        told = ", ".join(f"{count} {stage}" for stage, count in sorted(stages[case.name].items()))
        each = max(killed[case.name], 1)
        print(
            f"{case.name}: {told}; a kill costs {redone[case.name] / each:.1%} of the work, with the next "
            f"start {wall[case.name] / each:.0%} of the time"
        )
    builds = [case.name for case in cases if case.arguments[0] == "build"]
    share = sum(redone[name] for name in builds) / max(sum(killed[name] for name in builds), 1)
    print(f"builds: {share:.1%} of a build redone after a kill, in the mean")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
