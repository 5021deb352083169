"""Exports beside `cat` over the same bytes, on one core: what the conversion costs beyond moving them.

    python scripts/bench_export.py packed --to unpacked olmo-core --rounds 5

The files of an export are written by padless, then the same files by `cat` into one, in turns; medians. The
figure is a share of cat's speed: at 1 an export takes as long as cat, at 0.6 five thirds of that. Arms:

`on the disk`: both until the disk has the bytes. An export ends no earlier, and its large files go past the
page cache.
`in the page cache`: both without that, the export's fsync and O_DIRECT taken away: the work of the processor
alone, which no disk hides.
`on the disk, cat's in the page cache`: the export as it is beside a cat that waits for no disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from bench_results import Results

from padless.packer import durable
from padless.packer.export import ExportConfig, export

HERE = Path(__file__).resolve().parent


def export_seconds(folder: str, to: str, output: Path, *, sync: bool) -> float:
    """One export into a new folder; without `sync` its files stay in the page cache."""
    with ExitStack() as patches:
        if not sync:
            patches.enter_context(patch("os.fsync", lambda _: None))
            patches.enter_context(patch.object(durable, "_DIRECT", 0))
        begin = time.perf_counter()
        export(ExportConfig(folder=folder, to=to, output=str(output)))
        return time.perf_counter() - begin


def cat_seconds(files: list[Path], output: Path, *, sync: bool) -> float:
    """`cat` of the files into one, the start of its process included."""
    begin = time.perf_counter()
    with output.open("wb") as out:
        subprocess.run(["cat", *map(str, files)], stdout=out, check=True)
        if sync:
            os.fsync(out.fileno())
    return time.perf_counter() - begin


def one_round(folder: str, to: str, *, sync: bool) -> tuple[float, float, int]:
    """Seconds of an export and of cat over its files, and their bytes; what was written is gone again."""
    with tempfile.TemporaryDirectory(dir=Path(folder).resolve().parent) as work:
        os.sync()  # what the last round left to the disk is not this one's
        own = export_seconds(folder, to, Path(work) / "out", sync=sync)
        files = sorted((Path(work) / "out").iterdir())
        size = sum(path.stat().st_size for path in files)
        for path in files:  # past the page cache is how they were written; cat reads them from there
            path.read_bytes()
        os.sync()
        return own, cat_seconds(files, Path(work) / "cat", sync=sync), size


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
        own: dict[bool, float] = {}
        cat: dict[bool, float] = {}
        size = 0
        for sync in (True, False):
            rounds = [one_round(options.folder, to, sync=sync) for _ in range(options.rounds)]
            own[sync], cat[sync] = (statistics.median(found[i] for found in rounds) for i in (0, 1))
            size = rounds[0][2]
        case = f"{to}, {size / 1e6:.0f} MB"
        for sync, name in ((True, "on the disk"), (False, "in the page cache")):
            results.add(f"{case}, {name}", "padless", "seconds", own[sync], "s")
            results.add(f"{case}, {name}", "cat", "seconds", cat[sync], "s")
            results.add(f"{case}, {name}", "padless", "share_of_cat", cat[sync] / own[sync], "share")
        as_it_is = f"{case}, on the disk, cat's in the page cache"
        results.add(as_it_is, "padless", "share_of_cat", cat[False] / own[True], "share")


if __name__ == "__main__":
    main()
