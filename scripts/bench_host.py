"""Python's own time of a call that launches kernels, for the benchmarks of attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch


def host_us(run: Callable[[], object]) -> float:
    """Microseconds of a call, nothing waited for: the best of short runs that leave the queue room."""
    best = math.inf
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            run()
        best = min(best, (time.perf_counter() - begin) / 20 * 1e6)
    return best
