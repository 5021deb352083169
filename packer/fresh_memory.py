"""Memory that was freed is used again, not given back and asked for anew.

A page that the kernel hands out is cleared first, and on a virtual machine often fetched from the host before
that: for arrays that are filled once and read once it takes longer than the work. glibc gives large blocks
back as soon as they are free; told not to, a repack takes a tenth less time. The price is that memory which
was used stays the process's until it ends, so this is for commands that end soon after.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of glibc's malloc.h."""
_LARGEST = 32 * 2**20
"""What glibc allows a threshold for maps to be."""


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, where it is the C library, and Arrow's pool, unless it is loaded."""
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")  # the pool gives back what was free for 10 ms
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, 2**30)
    mallopt(_TOP_PAD, _LARGEST)
