"""The kernels compile for every generation of cards that is supported, without having one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

# Compiling is apart from running: no device is asked for. In a process of its own, since a process that
# interprets kernels cannot compile them.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from padless.kernels.qk_norm_rope_backward import norm_rope_backward_kernel
from padless.kernels.qk_norm_rope_triton import norm_rope_kernel
from padless.kernels.rope_triton import rope_kernel

capability, dtype = int(sys.argv[1]), sys.argv[2]
early = capability >= 90  # launched before the last kernel has ended
variants = (0, False, False), (2, True, True), (3, False, True)
for kernel, own, some in (
    (rope_kernel, dict(INVERSE=False, IN_PLACE=False, EARLY=early), variants),
    (norm_rope_kernel, dict(PLUS_ONE=False, ROUNDED=True), variants[1:2]),
    (
        norm_rope_backward_kernel, dict(PLUS_ONE=True, WEIGHTS=True, STAGES=3, GROUP=64, EARLY=early),
        variants[1:],
    ),
):
    for source, interleaved, long_indexing in some:
        constants = dict(
            Q_HEADS=14, K_HEADS=2, HALF=32, HEAD_DIM=80, SOURCE=source, AXES=False, INTERLEAVED=interleaved,
            LONG_INDEXING=long_indexing, ONE_ROW=not interleaved, BLOCK_T=4, BLOCK_H=8, BLOCK_HALF=32,
            BLOCK_REST=16, **own,
        )
        pointers = {
            **dict.fromkeys(("q", "k", "new_q", "new_k", "grad_q", "grad_k"), f"*{dtype}"),
            **dict.fromkeys(("q_weight", "k_weight"), f"*{dtype}"),
            **dict.fromkeys(("cos", "sin", "partials"), "*fp32"),
            **dict.fromkeys(("positions", "axes"), "*i32"),
            "eps": "fp32",
        }
        signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"num_warps": 4, "launch_pdl": early}
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert done.asm["cubin"]
"""


@pytest.mark.parametrize(
    ("capability", "dtype"), [(75, "fp16"), (80, "bf16"), (90, "bf16"), (100, "bf16"), (120, "bf16")]
)
def test_the_kernels_compile_for(capability: int, dtype: str) -> None:
    """T4 and RTX 2080 (float16: no bfloat16 there), A100, H100 and H200, B200, RTX 50."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), dtype],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
