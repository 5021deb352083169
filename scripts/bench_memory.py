"""Peak memory and throughput of a build at several sizes of input: neither may depend on the size.

The input is one file of alpaca records again and again up to each size, in every copy with other letters
changed for each other, so that no cache of words has seen them all. Time is processor time of the whole tree,
which a busy machine changes little. Beside the sizes it runs what strains a builder in other ways: one record
of 200 MB, and 10,000 files.

    python scripts/bench_memory.py --input alpaca_data.json --sizes 0.5e9 5e9 --tokenizer qwen3/ \
        --template qwen3/chatml.generation.jinja
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
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


def build(arguments: Sequence[str], output: Path) -> tuple[float, float, Sampler, dict[str, int]]:
    """Wall and processor seconds, memory and statistics of one build; exits with its words if it fails."""
    command = [sys.executable, "-m", "padless.packer.cli", "build", *arguments, "--output", str(output)]
    begin = time.perf_counter()
    before = sum(os.times()[2:4])  # of children that have ended
    child = subprocess.Popen(
        [*command, "--workers", str(WORKERS), "--quiet"], stderr=subprocess.PIPE, text=True
    )
    sampler = Sampler()
    sampler.watch(child.pid)
    _, words = child.communicate()
    if child.returncode:
        sys.exit(f"{' '.join(command)}\nended with {child.returncode}:\n{words[-4000:]}")
    seconds = time.perf_counter() - begin
    used = sum(os.times()[2:4]) - before
    facts = json.loads((output / "manifest.json").read_bytes())["statistics"]
    shutil.rmtree(output)
    return seconds, used, sampler, facts


def measure(case: str, source: Path, options: Sequence[str], work: Path, results: Results) -> None:
    """One build of a folder of files, into the results."""
    size = sum(path.stat().st_size for path in source.iterdir())
    seconds, used, sampler, facts = build([str(source), *options], work / "out")
    results.add(case, "padless", "input", size / 1e6, "MB")
    results.add(case, "padless", "sequences", facts["sequences"], "sequences")
    results.add(case, "padless", "wall", seconds, "s")
    results.add(case, "padless", "processor", used, "s")
    results.add(case, "padless", "input_per_processor_second", size / used / 1e6, "MB/s")
    results.add(case, "padless", "peak_anonymous_pss", sampler.peak_anonymous / 1e6, "MB")
    results.add(case, "padless", "peak_pss", sampler.peak_all / 1e6, "MB")


def grow(source: Path, size: int, folder: Path) -> Path:
    """A JSONL file of so many bytes, of the records of `source` with other letters in every copy."""
    folder.mkdir()
    rows = json.loads(source.read_bytes())
    keys = sorted({f'"{key}":'.encode() for row in rows for key in row})
    copy = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
    left = size
    with (folder / "grown.jsonl").open("wb") as out:
        for number in itertools.count():
            # None of them is part of an escape, so it stays JSON.
            a, b, c, d = random.Random(number).sample(b"ghijklmopqsvwxyz", 4)
            table = bytes.maketrans(bytes([a, b, c, d]), bytes([b, a, d, c]))
            changed = copy.translate(table)
            for key in keys:
                changed = changed.replace(key.translate(table), key)
            if len(changed) > left:
                out.write(changed[: changed.rfind(b"\n", 0, left) + 1])
                return folder
            out.write(changed)
            left -= len(changed)
    raise AssertionError("it has no end")


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
    parser.add_argument("--input", type=Path, required=True, help="alpaca records, a JSON array")
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.5e9, 5e9], help="bytes of input")
    parser.add_argument("--work", type=Path, help="where inputs and outputs lie for the time of the run")
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
    with tempfile.TemporaryDirectory(prefix="bench-memory-", dir=options.work) as name:
        work = Path(name)
        if options.long:
            source = long_record(work / "long", options.long)
            measure(f"one record of {options.long / 1e6:.0f} MB", source, texts, work, results)
        if options.files:
            source = many_files(work / "files", options.files)
            measure(f"{options.files:,} files", source, texts, work, results)
        for size in options.sizes:
            source = grow(options.input, int(size), work / f"grown{size:.0f}")
            measure(f"{size / 1e9:g} GB of {options.input.name}, changed", source, chats, work, results)
            shutil.rmtree(source)


if __name__ == "__main__":
    main()
