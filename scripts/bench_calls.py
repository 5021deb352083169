"""Python's own time of calls on a GPU, beside a bare autograd function around the same operator.

    python scripts/bench_calls.py [--output FILE]

Attention of 256 tokens in four sequences, so that the GPU is never waited for; rotation, and rotation with
norms, of 2,048 tokens with 32 and 8 heads of 128. Half a minute. A processor that is busy, or slow, shows in
`flash's operator`, which is PyTorch's own: what ours adds is the difference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_cases import Case
from bench_host import host_us
from bench_results import Results

from padless.kernels.qk_norm_rope import qk_norm_rope
from padless.kernels.rope import rope_qk, rope_qk_
from padless.kernels.rope_tables import rope_tables

TOKENS, HEADS, SIZE = 2_048, (32, 8), 128
Call = Callable[[], object]


def attention_calls() -> dict[str, Call]:
    """Of one small row."""
    small, operator = Case([64] * 4), torch.ops.aten._flash_attention_forward.default
    q, k, v = small.leaves
    bounds = small.bounds

    def aten(q: Any, k: Any, v: Any) -> Any:
        return operator(q, k, v, bounds, bounds, 64, 64, 0.0, True, False, scale=0.1)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out, *rest = aten(q, k, v)
            ctx.save_for_backward(q, k, v, out, *rest[:3])
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad, None, None

    both = {f"{name}, both ways": partial(small.both, name) for name in ("flash", "short", "fused")}
    return {
        "flash's operator": lambda: aten(q, k, v),
        "bare autograd function": lambda: Bare.apply(q, k, v),  # type: ignore[no-untyped-call]
        **{name: partial(small.forward, name) for name in ("flash", "short", "fused")},
        **both,
    }


def rotary_calls() -> dict[str, Call]:
    """By each source of positions, in place and into new tensors, and with norms."""
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (torch.randn(1, TOKENS, heads, SIZE, **like) for heads in HEADS)
    cos, sin = rope_tables(8_192, SIZE, device="cuda")
    ids = (torch.arange(TOKENS, device="cuda") % 777)[None]
    bounds = torch.tensor([*range(0, TOKENS, 777), TOKENS], dtype=torch.int32, device="cuda")
    rows = [table[ids].repeat(1, 1, 2).bfloat16() for table in (cos, sin)]
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    trained = [torch.randn(SIZE, requires_grad=True, **like) for _ in range(2)]
    weights = [x.detach() for x in trained]
    return {
        "rope_qk_, cu_seqlens": lambda: rope_qk_(q, k, cos, sin, cu_seqlens=bounds),
        "rope_qk_, position_ids": lambda: rope_qk_(q, k, cos, sin, position_ids=ids),
        "rope_qk_, gathered": lambda: rope_qk_(q, k, *rows),
        "rope_qk": lambda: rope_qk(q, k, cos, sin, cu_seqlens=bounds),
        "rope_qk, with gradients": lambda: rope_qk(*leaves, cos, sin, cu_seqlens=bounds),
        "qk_norm_rope": lambda: qk_norm_rope(q, k, *weights, *rows),
        "qk_norm_rope, with gradients": lambda: qk_norm_rope(*leaves, *trained, *rows),
    }


def main() -> None:
    """Time each call; what fails is said, and the rest goes on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "bench_calls.jsonl"
    )
    results = Results(bench="bench_calls", path=parser.parse_args().output)
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device")
    failed = []
    for case, calls in (("attention, T=256", attention_calls()), ("rotation, T=2,048", rotary_calls())):
        for name, call in calls.items():
            try:
                for _ in range(5):
                    call()
                results.add(case, name, "host", host_us(call, 0.8), "us")
            except Exception as problem:
                failed.append(f"{name}: {type(problem).__name__}: {problem}")
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
