"""Autograd functions called with less of Python do, and refuse, what they do by torch's own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from padless.kernels.autograd import direct, once  # noqa: E402
from padless.kernels.qk_norm_rope import qk_norm_rope  # noqa: E402
from padless.kernels.rope import rope_qk, rope_qk_  # noqa: E402
from padless.kernels.rope_tables import rope_tables  # noqa: E402
from padless.kernels.short_attention import short_attention, tiles_for  # noqa: E402
from padless.kernels.short_attention_work import work_list  # noqa: E402


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        return x * times

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def test_gradients_come_and_only_once() -> None:
    x = torch.randn(3, requires_grad=True)
    apply = direct(_Double)
    assert torch.equal(torch.autograd.grad(apply(x, 2).sum(), x)[0], torch.full((3,), 2.0))
    weight = torch.randn(3, requires_grad=True)
    (first,) = torch.autograd.grad((apply(x, 2) * weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def attended(q: Tensor) -> Tensor:
    work = work_list([0, 2, 5], tiles_for(2, 1, 8))
    return short_attention(q, q[:, :1], q[:, :1], work)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rope": lambda q: rope_qk(q, q, *rope_tables(5, 8))[0],
    "norm and rope": lambda q: qk_norm_rope(q, q, torch.ones(8), torch.ones(8), *rope_tables(5, 8))[0],
    "short attention": attended,
}


@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_functions_are_refused_as_torch_refuses_them(name: str) -> None:
    """Past the check they would give gradients of nothing."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda q: CALLS[name](q).square().sum())(torch.randn(5, 2, 8))


@pytest.mark.parametrize("views", [False, True])
def test_what_was_turned_in_place_may_be_changed_in_place_again(views: bool) -> None:
    tables = rope_tables(5, 8)
    leaves = [torch.randn(5, heads, 8, requires_grad=True) for heads in (2, 1)]
    sent = [torch.randn_like(x) for x in leaves]

    def projected(x: Tensor) -> Tensor:
        return (x * 3).transpose(0, 1).transpose(0, 1) if views else x * 3

    want = [x * 2 for x in rope_qk(*map(projected, leaves), *tables)]
    turned = rope_qk_(*map(projected, leaves), *tables)
    got = [x.mul_(2) for x in turned]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    grads = [torch.autograd.grad(out, leaves, sent) for out in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_handle_that_was_turned_and_the_one_returned_watch_one_memory() -> None:
    """Who saved what was returned is told where the old handle is changed."""
    tables = rope_tables(5, 8)
    x = torch.randn(5, 2, 8, requires_grad=True)
    q, k = (x * 1).view(5, 2, 8), (x * 2).view(5, 2, 8)
    new_q, new_k = rope_qk_(q, k, *tables)
    loss = new_q.square().sum() + new_k.square().sum()
    with torch.no_grad():
        q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
