"""A model's head and its loss in one, a chunk of rows at a time: `linear_cross_entropy`.

With a vocabulary of 150,000 the logits of 16,384 tokens take 5 GB, their gradient as much again. Here a chunk
of them is made, turned into its gradient where it lies, multiplied out into the gradients of what the head
was given and of its weight, and forgotten: the forward pass computes all, the way back multiplies by a number
(the order of Liger's fused linear cross-entropy, Hsu et al. 2024, https://arxiv.org/abs/2410.10989). Nothing
is read from the device, so a step does not wait for it, and can be captured in a CUDA graph. The price:
gradients are there from the forward pass on, are changed in place by the way back, which runs once, and
cannot be differentiated.

Where there is no Triton kernel to run, PyTorch computes a chunk's losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rope import runs_kernel

LOGITS = 5 * 2**26
"""Bytes that a chunk of logits may take: 1,088 tokens of Qwen's vocabulary. Each reads the head's weight and
reads and writes its gradient: 0.9 GB with 1,024 hidden dimensions, as much as its logits are moved."""
_MULTIPLE = 64
"""Rows of a chunk are a multiple of this, which matrix products like."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """The sum over rows of the cross-entropy of `x @ weight.T + bias`: float32 [], differentiable, once.

    - x [n, H], weight [V, H], bias [V], of one type, or of any where autocast says which to compute in.
    - targets [n] int64: a row's class, or `ignore_index`, whose loss and gradients are 0, as is the sum where
      no row has another. Another one outside of 0 to V - 1 makes the loss NaN on a GPU, and is an error
      elsewhere.

    Gradients are those of logits rounded to the type that is computed in; weight's are summed in its own.
    Raises ValueError, naming shapes, and TypeError, naming types.
    """
    if (
        x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not len(weight)
        or targets.shape != x.shape[:1] or (bias is not None and bias.shape != weight.shape[:1])
    ):  # fmt: skip
        raise ValueError(
            f"x must be [n, H], weight [V, H], targets [n] and bias [V]: x {list(x.shape)}, "
            f"weight {list(weight.shape)}, targets {list(targets.shape)}"
            + ("" if bias is None else f", bias {list(bias.shape)}")
        )
    kind = x.device.type
    # As autocast has it of a linear layer: float64 stays what it is.
    cast = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
    dtype = torch.get_autocast_dtype(kind) if cast else x.dtype
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    if not all(one.is_floating_point() and (cast or one.dtype == x.dtype) for one in given.values()):
        types = ", ".join(f"{name} {one.dtype}" for name, one in given.items())
        raise TypeError(
            f"{types}: they must be one floating type, as for a linear layer, or of any under "
            "torch.autocast, which leaves x of float64 as it is"
        )
    if not all(one.device == x.device for one in (*given.values(), targets)):
        places = ", ".join(f"{name} {one.device}" for name, one in (given | {"targets": targets}).items())
        raise ValueError(f"{places}: they must be on one device")
    wanted = torch.is_grad_enabled()
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, bias, targets, ignore_index, dtype, wanted)  # type: ignore[no-untyped-call]
    return loss


def rows_of_a_chunk(rows: int, vocabulary: int, size: int) -> int:
    """Rows whose logits are made at a time: chunks of about one size, within LOGITS bytes where that is 64.

    `size`: bytes of a logit.
    """
    at_once = max(1, LOGITS // (vocabulary * size * _MULTIPLE)) * _MULTIPLE
    even = -(-rows // -(-rows // at_once))
    return min(rows, -(-even // _MULTIPLE) * _MULTIPLE)


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps the gradients for a loss that counts once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
        wanted: bool,
    ) -> Tensor:
        for_x, for_weight, for_bias = (wanted and needed for needed in ctx.needs_input_grad[:3])
        grad_x = torch.empty_like(x) if for_x else None
        grad_weight = torch.zeros_like(weight) if for_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and for_bias else None
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        with torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            given = [x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), targets]
            _chunks(given, losses, (grad_x, grad_weight, grad_bias), ignore_index)
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable refuses only where `grad` is trained: of a loss it is not, and gradients of
        # gradients would be zero and nobody told.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative, which create_graph=True asks for; for that, "
                "make the logits and take torch's cross_entropy (prepare_model(..., liger=False))"
            )
        # As a tensor of one dimension, so that it is not rounded to the gradients' type beforehand.
        scale = grad.reshape(1)
        found = tuple(None if x is None else x.mul_(scale) for x in ctx.saved_tensors)
        return (*found, None, None, None, None)


def _chunks(given: list[Any], losses: Tensor, grads: tuple[Tensor | None, ...], ignore_index: int) -> None:
    """Fill `losses` [n] and the gradients of x, weight and bias, those that are wanted."""
    x, weight, bias, targets = given
    if not len(x):
        return
    grad_x, grad_weight, grad_bias = grads
    wanted = any(grad is not None for grad in grads)
    size = rows_of_a_chunk(len(x), len(weight), x.element_size())
    buffer = torch.empty((size, len(weight)), dtype=x.dtype, device=x.device)
    for first in range(0, len(x), size):
        part = slice(first, first + size)
        rows = x[part]
        logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
        if bias is not None:
            logits += bias
        _losses_in_place(logits, targets[part], losses[part], ignore_index, wanted)
        if grad_x is not None:
            grad_x[part] = logits @ weight
        if grad_weight is not None:
            if grad_weight.dtype == logits.dtype:
                grad_weight.addmm_(logits.t(), rows)
            else:
                grad_weight += logits.t() @ rows
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=grad_bias.dtype)


def _losses_in_place(
    logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, gradients: bool
) -> None:
    """Write each row's loss, and the gradients of the logits over them where they are wanted."""
    if runs_kernel(logits):
        from .linear_cross_entropy_triton import losses_in_place

        losses_in_place(logits, targets, losses, ignore_index, gradients)
        return
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    live = targets != ignore_index
    column = targets.where(live, 0)[:, None]
    log_shares = wide.log_softmax(-1)
    losses.copy_((-log_shares.gather(1, column).squeeze(1)).where(live, 0))
    if gradients:
        shares = log_shares.exp_()
        shares.scatter_add_(1, column, shares.new_full((1, 1), -1.0).expand_as(column))
        logits.copy_(shares.masked_fill_(~live[:, None], 0))
