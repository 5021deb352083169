"""Memory that was freed is used again, not given back and asked for anew.

A page that the kernel hands out is cleared first, and on a virtual machine often fetched from the host before
that: for arrays that are filled once and read once it takes longer than the work. glibc gives large blocks
back as soon as they are free; told not to, a repack takes a tenth less time. Arrow's own pool would take more
for each thread, and in large pages, the slowest to come, so it allocates as everybody else does. The price is
that memory which was used stays the process's until it ends, so this is for commands that end soon after.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of glibc's malloc.h."""
_LARGEST = 32 * 2**20
"""What glibc allows a threshold for maps to be."""


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, where it is the C library, for Arrow too, unless it is loaded."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, 2**30)
    mallopt(_TOP_PAD, _LARGEST)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
