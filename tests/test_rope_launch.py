"""The short path to a launch, without a device: a second call hands over what Triton got for the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from padless.kernels.qk_norm_rope import qk_norm_rope  # noqa: E402
from padless.kernels.rope import rope_qk, rope_qk_  # noqa: E402
from padless.kernels.rope_tables import rope_tables  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device launches really")


class Recorder:
    """A kernel that notes its arguments: by Triton's binder, then past it."""

    def __init__(self, kernel: Any) -> None:
        self.names = kernel.arg_names
        self.bound: list[dict[str, Any]] = []
        self.passed: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*values: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> Any:
            named = {**dict(zip(self.names, values, strict=False)), **constants}
            assert list(named) == self.names
            self.bound.append(named | {"grid": grid})
            return SimpleNamespace(run=self.run, function=None, packed_metadata=None)

        return launch

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        named = dict(zip(self.names, rest[6:], strict=True))
        self.passed.append(named | {"grid": (x, y, z)})

    def check(self) -> None:
        """Raises AssertionError unless calls alternated between both ways, and passed the same."""
        assert len(self.bound) == len(self.passed) == 1
        for name, first in self.bound[0].items():
            if name.startswith(("new_", "partials", "grad_")) and isinstance(first, Tensor):
                continue  # made anew for each call
            assert self.passed[0][name] == (first.data_ptr() if isinstance(first, Tensor) else first), name


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Only now: what is imported before is compiled, not interpreted, for the rest of the process.
    from padless.kernels import qk_norm_rope_launch, rope_launch

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    made = {}
    for module, name in (
        (rope_launch, "rope_kernel"),
        (qk_norm_rope_launch, "norm_rope_kernel"),
        (qk_norm_rope_launch, "norm_rope_backward_kernel"),
    ):
        made[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, made[name])
        monkeypatch.setattr(module, "_LAUNCHES", {})
        # Results lie wherever the allocator puts them, which decides what was compiled.
        monkeypatch.setattr(module, "alignment", lambda *addresses: None)
    return made


@pytest.mark.parametrize("call", [rope_qk, rope_qk_])
def test_rotary_launches_repeat(recorders: dict[str, Recorder], call: Any) -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    tables = rope_tables(10, 12)
    for _ in range(2):
        call(q, k, *tables, cu_seqlens=cu_seqlens)
    recorders["rope_kernel"].check()


def test_a_launch_that_is_repeated_sees_overlaps(recorders: dict[str, Recorder]) -> None:
    """Of the same shapes and strides; those found apart before are not looked at again."""
    heads = torch.randn(5, 6, 16).split(2, 1)
    tables = rope_tables(10, 12)
    for k in (heads[1], heads[2], heads[1]):
        rope_qk_(heads[0], k, *tables)
    for q in (heads[1], heads[2]):
        with pytest.raises(ValueError, match="overlap"):
            rope_qk_(q, q, *tables)
    assert len(recorders["rope_kernel"].bound) == 1 and len(recorders["rope_kernel"].passed) == 2


def test_norm_launches_repeat_both_ways(recorders: dict[str, Recorder]) -> None:
    q, k = (torch.randn(2, 5, h, 16, requires_grad=True) for h in (4, 2))
    weights = [torch.randn(16, requires_grad=True) for _ in range(2)]
    tables, ids = rope_tables(10, 12), torch.arange(10).view(2, 5)
    for _ in range(2):
        out = qk_norm_rope(q, k, *weights, *tables, position_ids=ids, eps=1e-5)
        torch.autograd.grad(out, (q, k, *weights), [torch.ones_like(x) for x in out])
    recorders["norm_rope_kernel"].check()
    recorders["norm_rope_backward_kernel"].check()
