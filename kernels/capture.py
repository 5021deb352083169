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
    if failed := _ask()(stream, ctypes.byref(status), ctypes.byref(number)):
        raise OSError(f"cuStreamGetCaptureInfo failed with {failed}")
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
    """The first version (CUDA 10.1), by its name in the library: those after it also give the nodes that
    are waited for, and refuse to where one was launched before its forerunner ended (CUDA_ERROR_LOSSY_QUERY).

    https://docs.nvidia.com/cuda/archive/10.2/cuda-driver-api/group__CUDA__STREAM.html
    """
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
