"""Peak memory and throughput of a build at several sizes of input: neither may depend on the size.

The input is some files, each named N times (hard links, so that no disk is needed for copies).
Beside the sizes it runs what strains a builder in other ways: one record of 200 MB, and 10,000 files.

    python scripts/bench_memory.py --input alpaca.jsonl --times 2 20 --tokenizer qwen3/ \
        --template qwen3/chatml.generation.jinja
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench_results import Results
from peak_memory import Sampler

HERE = Path(__file__).parent
WORKERS = 2


def build(arguments: Sequence[str], output: Path) -> tuple[float, Sampler, dict[str, int]]:
    """Seconds, memory and the statistics of one build, sampled; exits with its words if it fails."""
    command = [sys.executable, "-m", "padless.packer.cli", "build", *arguments, "--output", str(output)]
    begin = time.perf_counter()
    child = subprocess.Popen(
        [*command, "--workers", str(WORKERS), "--quiet"], stderr=subprocess.PIPE, text=True
    )
    sampler = Sampler()
    sampler.watch(child.pid)
    _, words = child.communicate()
    if child.returncode:
        sys.exit(f"{' '.join(command)}\nended with {child.returncode}:\n{words[-4000:]}")
    seconds = time.perf_counter() - begin
    facts = json.loads((output / "manifest.json").read_bytes())["statistics"]
    shutil.rmtree(output)
    return seconds, sampler, facts


def measure(case: str, source: Path, options: Sequence[str], work: Path, results: Results) -> None:
    """One build of a folder of files, into the results."""
    size = sum(path.stat().st_size for path in source.iterdir())
    seconds, sampler, facts = build([str(source), *options], work / "out")
    results.add(case, "padless", "input", size / 1e6, "MB")
    results.add(case, "padless", "sequences", facts["sequences"], "sequences")
    results.add(case, "padless", "wall", seconds, "s")
    results.add(case, "padless", "input_per_second", size / seconds / 1e6, "MB/s")
    results.add(case, "padless", "peak_anonymous_pss", sampler.peak_anonymous / 1e6, "MB")
    results.add(case, "padless", "peak_pss", sampler.peak_all / 1e6, "MB")


def link(source: Path, times: int, folder: Path) -> Path:
    """A folder with so many names of one file."""
    folder.mkdir()
    for number in range(times):
        os.link(source, folder / f"{number:05d}{source.suffix}")
    return folder


def long_record(folder: Path, size: int) -> Path:
    """A text of so many bytes, as one record among small ones."""
    folder.mkdir()
    words = " ".join(f"word{number % 9973} and" for number in range(1000)) + ". "
    with (folder / "long.jsonl").open("w") as out:
        out.write('{"text": "a short one"}\n{"text": "' + words * (size // len(words)) + '"}\n')
        out.write('{"text": "another short one"}\n' * 100)
    return folder


def many_files(folder: Path, count: int) -> Path:
    """Files of ten short texts each."""
    folder.mkdir()
    for number in range(count):
        rows = [json.dumps({"text": f"file {number}, text {row}, and some words"}) for row in range(10)]
        (folder / f"{number:05d}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def main() -> None:
    """The sizes, then the shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, required=True, help="alpaca records: JSON or JSONL")
    parser.add_argument("--times", type=int, nargs="*", default=[2, 20], help="the input N times over")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder")
    parser.add_argument("--template", type=Path, required=True, help="chat template")
    parser.add_argument("--long", type=int, default=200_000_000, help="bytes of the long record; 0: none")
    parser.add_argument("--files", type=int, default=10_000, help="number of small files; 0: none")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "bench_memory.jsonl")
    options = parser.parse_args()
    results = Results(bench="memory", path=options.results)
    common = ["--tokenizer", str(options.tokenizer), "--max-length", "2048"]
    chats = [*common, "--template", str(options.template)]
    texts = [*common, "--format", "text", "--overflow", "split"]
    # Beside the input, where hard links can be made.
    with tempfile.TemporaryDirectory(prefix="bench-memory-", dir=options.input.parent) as name:
        work = Path(name)
        if options.long:
            source = long_record(work / "long", options.long)
            measure(f"one record of {options.long / 1e6:.0f} MB", source, texts, work, results)
        if options.files:
            source = many_files(work / "files", options.files)
            measure(f"{options.files:,} files", source, texts, work, results)
        for times in options.times:
            source = link(options.input, times, work / f"times{times}")
            measure(f"{options.input.name} x {times}", source, chats, work, results)


if __name__ == "__main__":
    main()
