"""The short path to a launch, without a device: a second call hands over what Triton got for the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from padless.kernels.rope_tables import rope_tables  # noqa: E402
from padless.kernels.short_attention import short_attention, tiles_for  # noqa: E402
from padless.kernels.short_attention_work import WorkList, work_list  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device launches really")
KERNELS = ("turn_keys", "attention_forward", "attention_backward_queries", "attention_backward_keys")
MADE = ("out", "lse", "q_kept", "delta", "grad", "grad_q", "grad_k", "grad_v")
"""Pointers to what each call makes anew; where q and k turn also the turned ones."""


class Recorder:
    """A kernel that notes its arguments: by Triton's binder, then past it."""

    def __init__(self, kernel: Any) -> None:
        self.names = kernel.arg_names
        self.bound: list[dict[str, Any]] = []
        self.passed: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(
            *values: Any, num_warps: int, num_stages: int, enable_fp_fusion: bool, **constants: Any
        ) -> Any:
            named = {**dict(zip(self.names, values, strict=False)), **constants}
            assert list(named) == self.names
            self.bound.append(named | {"grid": grid})
            return SimpleNamespace(run=self.run, function=None, packed_metadata=None)

        return launch

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        named = dict(zip(self.names, rest[6:], strict=True))
        self.passed.append(named | {"grid": (x, y, z)})


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Only now: what is imported before is compiled, not interpreted, for the rest of the process.
    from padless.kernels import short_attention_launch

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(short_attention_launch, "_LAUNCHES", {})
    # Results lie wherever the allocator puts them, which decides what was compiled.
    monkeypatch.setattr(short_attention_launch, "alignment", lambda *addresses: None)
    made = {name: Recorder(getattr(short_attention_launch, name)) for name in KERNELS}
    for name, recorder in made.items():
        monkeypatch.setattr(short_attention_launch, name, recorder)
    return made


def listed(lengths: list[int]) -> WorkList:
    return work_list(torch.tensor([0, *lengths]).cumsum(0), tiles_for(4, 2, 32))


def call(leaves: list[Tensor], work: WorkList, **options: Any) -> None:
    out = short_attention(*leaves, work, **options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 2.0, "scale": 0.3}], ids=str)
def test_launches_repeat(recorders: dict[str, Recorder], options: dict[str, Any], rope: bool) -> None:
    qkv = torch.randn(9, 8, 32, dtype=torch.float16)
    leaves = [x.requires_grad_() for x in qkv.split((4, 2, 2), 1)]
    work = listed([4, 5])
    if rope:
        cos, sin = rope_tables(5, 32)
        options = options | {"cos": cos, "sin": sin}
    for _ in range(2):
        call(leaves, work, **options)
    for name, recorder in recorders.items():
        assert len(recorder.bound) == len(recorder.passed) == (0 if name == "turn_keys" and not rope else 1)
        turned = {"turn_keys": (), "attention_forward": ("k",)}.get(name, ("q", "k"))
        made = {*MADE, *turned} if rope else {*MADE} - {"q_kept"}
        for argument, first in recorder.bound[0].items() if recorder.bound else ():
            passed = recorder.passed[0][argument]
            if argument in made:
                assert isinstance(first, Tensor) and isinstance(passed, int)
            else:
                assert passed == (first.data_ptr() if isinstance(first, Tensor) else first), (name, argument)


def test_rows_of_other_lengths_launch_the_same_kernels_over_other_grids(
    recorders: dict[str, Recorder],
) -> None:
    cos, sin = rope_tables(300, 32)
    grids = []
    for lengths in ([300], [40, 60, 7]):
        leaves = [torch.randn(sum(lengths), h, 32, dtype=torch.float16).requires_grad_() for h in (4, 2, 2)]
        work = listed(lengths)
        call(leaves, work, cos=cos, sin=sin)
        grids.append([(work.query_tiles * 2, 1, 1), (work.key_tiles * 2, 1, 1)])
    for name, tiles in (("attention_forward", 0), ("attention_backward_keys", 1)):
        recorder = recorders[name]
        assert [recorder.bound[0]["grid"], recorder.passed[0]["grid"]] == [grid[tiles] for grid in grids]
    assert recorders["turn_keys"].passed[0]["tokens"] == 107


def test_what_triton_compiles_apart_is_kept_apart(recorders: dict[str, Recorder]) -> None:
    qkv = torch.randn(9, 8, 32, dtype=torch.float16)
    work = listed([4, 5])
    with torch.no_grad():
        q, k, v = qkv.split((4, 2, 2), 1)
        for _ in range(2):
            short_attention(q, k, v, work)
            short_attention(q.contiguous(), k, v, work)
            short_attention(q, k, v, work, window=2)
            short_attention(q, k, v, work, window=3)
            short_attention(q, k, v, work, softcap=2.0)
    forward = recorders["attention_forward"]
    assert len(forward.bound) == len(forward.passed) == 5
