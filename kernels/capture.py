"""Which CUDA graph is being captured: what was made on the device for one is in no other.

A tensor that a captured step computes holds values only where that graph is replayed. Kept for the layers of
the step, it must not be found by another capture over the same inputs, so what is kept is kept under the
capture's number, which the CUDA driver knows and torch does not tell.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


def capture_number() -> int | None:
    """The number of the capture that the current stream is part of, another for each; None outside of any.

    Raises OSError and AttributeError where the driver does not tell (`tells_captures`).
    """
    if not torch.cuda.is_current_stream_capturing():
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    failed = _ask()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if failed:
        raise OSError(f"cuStreamGetCaptureInfo_v2 failed with {failed}")
    return number.value


def tells_captures() -> bool:
    """Whether there is a driver that tells captures apart."""
    try:
        _ask()
    except (OSError, AttributeError):
        return False
    return True


@cache
def _ask() -> Any:
    """https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html, version 2 (since CUDA 11.3)."""
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
