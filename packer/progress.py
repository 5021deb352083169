"""What long work tells while it runs: bars in a terminal, else a line of a log every half a minute.

Work calls `report(stage, counts)` as often as it likes. Counts are `done` and `total` in units of the stage's
own, or what a build counts (bytes, records and tokens). Nothing is started for it, no thread and no timer, so
short work tells nothing to a log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Report = Callable[[str, Mapping[str, float]], None]
LOG_SECONDS = 30.0
_REFRESH_SECONDS = 0.1
_STEADY_SECONDS = 1.0
"""Of a stage, before which its speed says nothing."""
clock = time.monotonic


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Report | None]:
    """What to report to, on stderr; None where nobody wants to know."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _log()


def part_of(report: Report | None, stage: str, total: float) -> Callable[[float], None]:
    """Counts what is done of `total`, and reports it: call it with what came to it."""
    counts = {"done": 0.0, "total": float(total)}

    def more(count: float) -> None:
        if report is not None:
            counts["done"] += count
            report(stage, counts)

    return more


def _amounts(stage: str, counts: Mapping[str, float], elapsed: float) -> tuple[float, float, str]:
    """What is done, of how much, and in words."""
    if "done" in counts:
        done, total = counts["done"], counts["total"]
        return done, total, f"{done:,.0f} of {total:,.0f}"
    note = f"{counts['tokens'] / 1e6:,.1f} M tokens"
    if elapsed >= _STEADY_SECONDS:
        note += f", {counts['tokens'] / elapsed / 1e6:,.2f} M/s"
    if stage == "tokenize":
        speed = f"{counts['bytes'] / elapsed / 1e6:,.0f} MB/s, " if elapsed >= _STEADY_SECONDS else ""
        note = f"{counts['records']:,.0f} records, {speed}{note}"
        return counts["bytes"], counts["total_bytes"], note
    return counts["tokens"], counts["total_tokens"], note


def _log() -> Report:
    """A line for a stage at most every LOG_SECONDS, the first after as long."""
    begun: dict[str, float] = {}
    reached: dict[str, float] = {}
    told = last = clock()

    def report(stage: str, counts: Mapping[str, float]) -> None:
        nonlocal told, last
        now = clock()
        at = counts["done"] if "done" in counts else counts["tokens"]
        if at < reached.get(stage, at):  # the stage of the next folder or split
            del begun[stage]
        reached[stage] = at
        elapsed = now - begun.setdefault(stage, last)  # it began where the one before it was last heard of
        last = now
        if now - told < LOG_SECONDS:
            return
        told = now
        done, total, note = _amounts(stage, counts, elapsed)
        share = min(1.0, done / total) if total else 1.0
        left = f", about {elapsed * (1 - share) / share:,.0f} s left" if share else ""
        print(f"{stage}: {share:.0%}, {note}{left}", file=sys.stderr, flush=True)

    return report


@contextmanager
def _bars() -> Iterator[Report]:
    """A bar for each stage, gone at the end."""
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from padless.packer.terminal import console

    bars = Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(compact=True),
        console=console(stderr=True),
        transient=True,
        auto_refresh=False,  # a thread of its own would have to be forked around
    )
    tasks: dict[str, Any] = {}
    shown = 0.0

    def report(stage: str, counts: Mapping[str, float]) -> None:
        nonlocal shown
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=None, note="")
        task = bars.tasks[bars.task_ids.index(tasks[stage])]
        now = bars.get_time()
        done, total, note = _amounts(stage, counts, task.elapsed or 0.0)
        if now - shown < _REFRESH_SECONDS and done < total:
            return
        shown = now
        bars.update(tasks[stage], total=total, completed=min(done, total), note=note)
        bars.refresh()

    with bars:
        yield report
