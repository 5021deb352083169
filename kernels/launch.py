"""A compiled Triton kernel launched again, at little more than the price of the driver's own call.

Triton's launcher looks at every argument of every call. Where a kernel and its shapes are known, all but
some pointers and numbers stay the same: those are written into the arguments of the call before, and the
driver is called with them. That the driver sees the arguments as they are laid out here is asked of the
driver itself (`cuFuncGetParamInfo`); where it does not answer, or differs, Triton's launcher is used, past
its binder. The price: Triton's launch hooks (profilers of Triton's, not torch's) see first launches only.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock
from typing import Any

Again = Callable[..., None]
"""(stream, *changing, programs=...): the kernel once more, with other pointers and numbers in front.

`programs`: the grid's first axis, where it is another than before.
"""


def keep(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], changing: int) -> Again:
    """What launches `kernel` (a triton CompiledKernel) again on this grid.

    `arguments` are what it was launched with, in the order of its signature, constants last; the first
    `changing` of them are given anew in each call, pointers as addresses.
    """
    try:
        return _by_driver(kernel, grid, arguments, changing)
    except (_Unlike, AttributeError):  # AttributeError: a Triton that names things otherwise
        return _by_triton(kernel, grid, arguments[changing:])


def _by_triton(kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...]) -> Again:
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    known, *others = grid

    def again(stream: int, *changing: float, programs: int = known) -> None:
        run(programs, *others, stream, function, metadata, None, None, None, *changing, *rest)

    return again


class _Unlike(Exception):
    """The kernel is not of the plain kind that the driver can be handed directly."""


class Driver:
    """The two calls of the CUDA driver that are needed."""

    def __init__(self, library: Any) -> None:
        self.launch = library.cuLaunchKernelEx
        self._info = library.cuFuncGetParamInfo

    def sizes(self, function: int) -> list[int]:
        """Bytes of each parameter that a kernel takes."""
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while self._info(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)),
                         ctypes.byref(offset), ctypes.byref(size)) == 0:  # fmt: skip
            sizes.append(size.value)
        return sizes


@cache
def driver() -> Driver:
    """The driver of this machine; AttributeError where there is none that can say what a kernel takes."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise AttributeError(str(error)) from error


_CONFIG = struct.Struct("<7I4xQQI4x")
"""CUlaunchConfig in cuda.h: grid, block, bytes of shared memory, stream, attributes and how many."""
_STREAM = 32
"""Where the stream lies in it."""

_EARLY = struct.pack("<i4xi60x", 6, 1)
"""CUlaunchAttribute: programmatic stream serialization, allowed; the kernel waits (rope_tiles.begin)."""

_SIZES = {"i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8}
"""Bytes of the numbers that our kernels take; pointers have eight."""


def _taken(signature: Mapping[str, str], arguments: tuple[Any, ...]) -> list[tuple[int, str, Any]]:
    """(place, type, value) of each argument that reaches the device: constants were compiled in."""
    if len(signature) != len(arguments):
        raise _Unlike
    taken = [
        (place, kind, value)
        for place, (kind, value) in enumerate(zip(signature.values(), arguments, strict=True))
        if kind != "constexpr"
    ]
    if not all(kind.startswith("*") or kind in _SIZES for _, kind, _ in taken):
        raise _Unlike
    return taken


def _by_driver(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], changing: int) -> Again:
    metadata = kernel.metadata
    if (
        metadata.target.backend != "cuda"
        or metadata.num_ctas != 1
        or metadata.launch_cooperative_grid
        or metadata.global_scratch_size
        or metadata.profile_scratch_size
    ):
        raise _Unlike
    taken = _taken(kernel.src.signature, arguments)
    if [place for place, _, _ in taken[:changing]] != list(range(changing)):
        raise _Unlike  # one of those that change was compiled in
    # Triton appends two pointers to scratch memory, which are null here.
    sizes = [_SIZES.get(kind, 8) for _, kind, _ in taken] + [8, 8]
    if driver().sizes(kernel.function) != sizes:
        raise _Unlike
    # In one buffer, so that one call writes it: how to launch, then the arguments, eight bytes each whatever
    # the type: the driver takes as many as it needs from the lower end. The attribute comes last.
    block = ctypes.create_string_buffer(bytes(_CONFIG.size + 8 * len(sizes)) + _EARLY)
    _CONFIG.pack_into(block, 0, *grid, 32 * metadata.num_warps, 1, 1, metadata.shared, 0, 0, 0)
    for at, (_, kind, value) in enumerate(taken[changing:], start=changing):
        struct.pack_into("<f4x" if kind == "fp32" else "<q", block, _CONFIG.size + 8 * at, value)
    base = ctypes.addressof(block)
    first = base + _CONFIG.size
    places = (ctypes.c_void_p * len(sizes))(*range(first, first + 8 * len(sizes), 8))
    attributes, count = (first + 8 * len(sizes), 1) if metadata.launch_pdl else (0, 0)
    # From the stream on: attributes lie between it and the arguments.
    front = struct.Struct("<QQI4x" + "".join(
        "Q" if kind.startswith("*") else "f4x" if kind == "fp32" else "q" for _, kind, _ in taken[:changing]
    ))  # fmt: skip
    write, launch, lock = front.pack_into, driver().launch, Lock()
    config, function = ctypes.c_void_p(base), ctypes.c_void_p(kernel.function)
    width, known = ctypes.c_uint.from_buffer(block), grid[0]
    triton_again = _by_triton(kernel, grid, arguments[changing:])

    def again(stream: int, *values: float, programs: int = known) -> None:
        with lock:  # the driver reads the block before it returns
            width.value = programs
            write(block, _STREAM, stream, attributes, count, *values)
            failed = launch(config, function, places, None)
        if failed:  # a thread without a context, say: Triton's launcher makes one, or names the error
            triton_again(stream, *values, programs=programs)

    return again
