"""Launching a compiled kernel again: the driver gets every argument at its place, or Triton's launcher."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
from padless.kernels import launch  # noqa: E402

SIGNATURE = {"x": "*bf16", "y": "*fp32", "tokens": "i32", "eps": "fp32", "step": "i64", "one": "constexpr"}
SIZES = [8, 8, 4, 4, 8, 8, 8]
FIRST = (16, 32, 5, 1e-6, 7, 1)


class Config(ctypes.Structure):
    """CUlaunchConfig as cuda.h has it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class StandIn:
    """A driver that reads what it is handed, as a device would."""

    def __init__(self, sizes: list[int], result: int = 0) -> None:
        self._sizes, self.result = sizes, result
        self.calls: list[tuple[Any, ...]] = []
        self.attributes: list[bytes | None] = []

    def sizes(self, function: int) -> list[int]:
        return self._sizes

    def launch(self, config: Any, function: Any, places: Any, extra: None) -> int:
        how = Config.from_address(config.value)
        assert extra is None
        self.attributes.append(ctypes.string_at(how.attributes, 72) if how.count else how.attributes)
        raw = [ctypes.string_at(places[i], size) for i, size in enumerate(self._sizes)]
        self.calls.append((function.value, [*how.grid, *how.block, how.shared], how.stream, raw))
        return self.result


def compiled(**metadata: Any) -> Any:
    """As triton.compile gives it, so far as it is looked at; what Triton's launcher gets is kept in `ran`."""
    ran: list[tuple[Any, ...]] = []
    plain = {
        "target": SimpleNamespace(backend="cuda"), "num_ctas": 1, "num_warps": 2, "shared": 96,
        "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    return SimpleNamespace(
        src=SimpleNamespace(signature=SIGNATURE), metadata=SimpleNamespace(**plain | metadata),
        function=99, packed_metadata=(2, 1, 96), run=lambda *a: ran.append(a), ran=ran,
    )  # fmt: skip


def cut(raw: bytes) -> tuple[bytes, ...]:
    """Packed arguments, one by one."""
    return struct.unpack("8s8s4s4s8s8s8s", raw)


def use(monkeypatch: pytest.MonkeyPatch, driver: StandIn) -> StandIn:
    monkeypatch.setattr(launch, "driver", lambda: driver)
    return driver


def test_the_driver_gets_every_argument_in_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, kernel = use(monkeypatch, StandIn(SIZES)), compiled()
    again = launch.keep(kernel, (10, 2, 1), FIRST, 4)
    again(77, 2**40, 48, 6, 0.5)
    again(0, 64, 80, 2**31 - 1, -0.25)
    shape = [10, 2, 1, 64, 1, 1, 96]
    want = [
        (99, shape, 77, cut(struct.pack("<QQifqQQ", 2**40, 48, 6, 0.5, 7, 0, 0))),
        (99, shape, None, cut(struct.pack("<QQifqQQ", 64, 80, 2**31 - 1, -0.25, 7, 0, 0))),
    ]
    assert [(f, s, stream, tuple(raw)) for f, s, stream, raw in driver.calls] == want
    assert kernel.ran == []


@pytest.mark.parametrize("early", [False, True])
def test_kernels_that_wait_may_be_launched_before_the_last_has_ended(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    driver, kernel = use(monkeypatch, StandIn(SIZES)), compiled(launch_pdl=early)
    again = launch.keep(kernel, (10, 1, 1), FIRST, 4)
    for _ in range(2):
        again(77, 48, 64, 6, 0.5)
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
    assert driver.attributes == [struct.pack("<i4xi60x", 6, 1) if early else None] * 2


@pytest.mark.parametrize(
    "metadata",
    [
        {"target": SimpleNamespace(backend="hip")}, {"num_ctas": 2},
        {"launch_cooperative_grid": True}, {"global_scratch_size": 8}, {"profile_scratch_size": 8},
    ],
)  # fmt: skip
def test_kernels_of_another_kind_go_by_triton(
    monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any]
) -> None:
    driver, kernel = use(monkeypatch, StandIn(SIZES)), compiled(**metadata)
    launch.keep(kernel, (10, 1, 1), FIRST, 4)(77, 48, 64, 6, 0.5)
    assert driver.calls == []
    assert kernel.ran == [(10, 1, 1, 77, 99, (2, 1, 96), None, None, None, 48, 64, 6, 0.5, 7, 1)]


@pytest.mark.parametrize("sizes", [[], SIZES[:-1], [8, 8, 8, 4, 8, 8, 8]])
def test_a_driver_that_sees_other_arguments_is_not_used(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    driver, kernel = use(monkeypatch, StandIn(sizes)), compiled()
    launch.keep(kernel, (10, 1, 1), FIRST, 4)(77, 48, 64, 6, 0.5)
    assert driver.calls == [] and len(kernel.ran) == 1


def test_arguments_that_change_but_were_compiled_in_go_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, kernel = use(monkeypatch, StandIn(SIZES)), compiled()
    launch.keep(kernel, (10, 1, 1), FIRST, 6)(77, *FIRST)
    assert driver.calls == [] and len(kernel.ran) == 1


def test_a_machine_without_a_driver_goes_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise AttributeError("no driver")

    monkeypatch.setattr(launch, "driver", missing)
    kernel = compiled()
    launch.keep(kernel, (10, 1, 1), FIRST, 4)(77, 48, 64, 6, 0.5)
    assert len(kernel.ran) == 1


def test_what_the_driver_refuses_triton_tries_and_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, kernel = use(monkeypatch, StandIn(SIZES, result=201)), compiled()
    launch.keep(kernel, (10, 1, 1), FIRST, 4)(77, 48, 64, 6, 0.5)
    assert len(driver.calls) == len(kernel.ran) == 1


@pytest.mark.parametrize("result", [0, 201])
def test_a_kernel_is_launched_again_over_another_grid(monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    driver, kernel = use(monkeypatch, StandIn(SIZES, result)), compiled()
    again = launch.keep(kernel, (10, 2, 1), FIRST, 4)
    again(77, 48, 64, 6, 0.5, programs=30)
    again(77, 48, 64, 6, 0.5)
    assert [shape[:3] for _, shape, _, _ in driver.calls] == [[30, 2, 1], [10, 2, 1]]
    assert [ran[:3] for ran in kernel.ran] == ([(30, 2, 1), (10, 2, 1)] if result else [])
