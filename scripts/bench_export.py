"""Exports beside `cat` over the same bytes, on one core: what the conversion costs beyond moving them.

    python scripts/bench_export.py packed --to unpacked olmo-core --rounds 5

The files of an export are written by padless, then the same files by `cat` into one, in turns, both until
they are on the disk: an export ends no earlier, and its large files do not pass the page cache. Medians; a
share of 1 would be cat's own time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench_results import Results

from padless.packer.export import ExportConfig, export

HERE = Path(__file__).resolve().parent


def export_seconds(folder: str, to: str, output: Path) -> float:
    """One export into a new folder."""
    begin = time.perf_counter()
    export(ExportConfig(folder=folder, to=to, output=str(output)))
    return time.perf_counter() - begin


def cat_seconds(files: list[Path], output: Path) -> float:
    """`cat` of the files into one, the start of its process included."""
    begin = time.perf_counter()
    with output.open("wb") as out:
        subprocess.run(["cat", *map(str, files)], stdout=out, check=True)
        os.fsync(out.fileno())
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a packed folder")
    parser.add_argument("--to", nargs="+", default=["unpacked", "olmo-core"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "bench_export.jsonl")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = Results(bench="bench_export", path=options.results)
    for to in options.to:
        own, cat, size = [], [], 0
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=Path(options.folder).resolve().parent) as work:
                own.append(export_seconds(options.folder, to, Path(work) / "out"))
                files = sorted((Path(work) / "out").iterdir())
                size = sum(path.stat().st_size for path in files)
                for path in files:  # past the page cache is how they were written; cat reads them from there
                    path.read_bytes()
                cat.append(cat_seconds(files, Path(work) / "cat"))
        case = f"{to}, {size / 1e6:.0f} MB"
        results.add(case, "padless", "seconds", statistics.median(own), "s")
        results.add(case, "cat", "seconds", statistics.median(cat), "s")
        results.add(case, "padless", "share_of_cat", statistics.median(cat) / statistics.median(own), "share")


if __name__ == "__main__":
    main()
