"""Tokens per second and peak memory of packing plain text for pretraining, by how documents are cut.

The input is text files again and again up to a size, in every copy with other letters changed for each other,
so that no cache of words has seen them all. Documents are paragraphs (`--text-by blank`); `wrapped` cuts them
wherever a pack ends, `bfd-split` only those that are longer than a pack, `fim` rearranges half of the latter.
Processor time is of the whole tree, which a busy machine changes little.

    python scripts/bench_pretraining.py --input a.txt b.txt --size 2e9 --tokenizer qwen3/
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from pathlib import Path

from bench_memory import WORKERS, build
from bench_results import Results

HERE = Path(__file__).parent
CASES = {
    "wrapped": ("--strategy", "wrapped"),
    "bfd-split": ("--strategy", "bfd"),
    "bfd-split, fim 0.5": ("--strategy", "bfd", "--fim-rate", "0.5"),
}


def grow(sources: list[Path], size: int, path: Path) -> None:
    """A text file of about so many bytes."""
    copy = b"\n\n".join(source.read_bytes().strip() for source in sources) + b"\n\n"
    with path.open("wb") as out:
        for number in itertools.count():
            if out.tell() >= size:
                return
            a, b, c, d = random.Random(number).sample(b"abcdefghijklmnopqrstuvwxyz", 4)
            out.write(copy.translate(bytes.maketrans(bytes([a, b, c, d]), bytes([b, a, d, c]))))


def main() -> None:
    """Each case once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="text files")
    parser.add_argument("--size", type=float, default=2e9, help="bytes of input")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens per pack")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--work", type=Path, help="where inputs and outputs lie for the time of the run")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "bench_pretraining.jsonl")
    options = parser.parse_args()
    results = Results(bench="pretraining", path=options.results)
    with tempfile.TemporaryDirectory(prefix="bench-pretraining-", dir=options.work) as name:
        source = Path(name) / "text.txt"
        grow(options.input, int(options.size), source)
        size = source.stat().st_size
        for case in options.cases:
            arguments = [str(source), "--tokenizer", str(options.tokenizer), "--text-by", "blank"]
            arguments += ["--max-length", str(options.max_length), "--overflow", "split", *CASES[case]]
            seconds, used, sampler, facts = build(arguments, Path(name) / "out")
            about = f"{case}, {size / 1e9:.2g} GB of text at {options.max_length:,}, {WORKERS} workers"
            results.add(about, "padless", "input", size / 1e6, "MB")
            results.add(about, "padless", "tokens", facts["tokens"], "tokens")
            results.add(about, "padless", "wall", seconds, "s")
            results.add(about, "padless", "processor", used, "s")
            results.add(about, "padless", "tokens_per_second", facts["tokens"] / seconds, "tokens/s")
            results.add(about, "padless", "tokens_per_processor_second", facts["tokens"] / used, "tokens/s")
            results.add(about, "padless", "peak_anonymous_pss", sampler.peak_anonymous / 1e6, "MB")
            results.add(about, "padless", "peak_pss", sampler.peak_all / 1e6, "MB")


if __name__ == "__main__":
    main()
