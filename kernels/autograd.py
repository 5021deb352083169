"""Autograd functions called and gone back through without the Python that torch wraps around each.

`Function.apply` looks at signatures and unwraps what functorch left behind, and `once_differentiable` opens
a context for each way back: together a third of what a small function costs the host, in every layer.
Where a transform of functorch (vmap, torch.func.grad) runs, and where gradients are to be differentiated
again, torch's own way is taken, with its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import Function, once_differentiable

Apply = Callable[..., Any]

_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def direct(function: type[Function]) -> Apply:
    """`function.apply` for eager calls of a function that has no setup_context; not for torch.compile."""
    plain: Apply = super(Function, function).apply  # type: ignore[misc]
    usual: Apply = function.apply

    def apply(*arguments: Any) -> Any:
        return usual(*arguments) if _transformed() else plain(*arguments)

    return apply


def once(backward: Apply) -> Apply:
    """`once_differentiable`, whose result cannot be differentiated again; free where nobody asks for that."""
    guarded: Apply = once_differentiable(backward)

    def run(ctx: Any, *grads: Any) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
