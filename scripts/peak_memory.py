"""Peak memory of a process tree: the sum of PSS, sampled, with mapped files apart from the rest.

PSS counts a page shared by n processes as 1/n in each, so forked workers sum up rightly where RSS
counts their pages many times. Anonymous pages are what a machine must have; mapped files can be
dropped by the kernel at any time. A sample walks the page tables of each process (about 1 ms for
100 MB), so a run that is sampled is not the run to time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

SAMPLE_SECONDS = 0.05


class Sampler:
    """Peak over time of a process tree's memory in bytes, anonymous PSS and all PSS apart.

    Shared pages count once over the tree. The two peaks may be of different moments.
    """

    def __init__(self) -> None:
        self.peak_anonymous = 0
        self.peak_all = 0

    def watch(self, pid: int) -> None:
        """Sample the tree below `pid` on a thread until that process ends."""
        threading.Thread(target=self._loop, args=(pid,), daemon=True).start()

    def _loop(self, pid: int) -> None:
        while usage := [found for member in process_tree(pid) if (found := pss(member))]:
            self.peak_anonymous = max(self.peak_anonymous, sum(anonymous for anonymous, _ in usage))
            self.peak_all = max(self.peak_all, sum(everything for _, everything in usage))
            time.sleep(SAMPLE_SECONDS)


def process_tree(pid: int) -> Iterator[int]:
    """`pid` and all below it; a child belongs to the thread that forked it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # the thread has ended since
            continue
        for child in found:
            yield from process_tree(int(child))


def pss(pid: int) -> tuple[int, int] | None:
    """Anonymous and whole PSS of a process in bytes; None once it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if " kB" in line}
    return (kib["Pss_Anon"] * 1024, kib["Pss"] * 1024) if "Pss" in kib else None
