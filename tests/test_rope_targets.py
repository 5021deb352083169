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
from padless.kernels.rope_triton import rope_kernel

capability, dtype = int(sys.argv[1]), sys.argv[2]
for source, interleaved, long_indexing in ((0, False, False), (2, True, True), (3, False, True)):
    constants = dict(
        Q_HEADS=14, K_HEADS=2, HALF=32, HEAD_DIM=80, SOURCE=source, AXES=False, INTERLEAVED=interleaved,
        INVERSE=False, IN_PLACE=False, LONG_INDEXING=long_indexing,
        BLOCK_T=4, BLOCK_H=8, BLOCK_HALF=32, BLOCK_REST=16,
    )
    pointers = {
        **dict.fromkeys(("q", "k", "new_q", "new_k"), f"*{dtype}"),
        **dict.fromkeys(("cos", "sin"), "*fp32"),
        **dict.fromkeys(("positions", "axes"), "*i32"),
    }
    signature = {name: pointers.get(name, "i32") for name in rope_kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=rope_kernel, signature=signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert kernel.asm["cubin"]
"""


@pytest.mark.parametrize(
    ("capability", "dtype"), [(75, "fp16"), (80, "bf16"), (90, "bf16"), (100, "bf16"), (120, "bf16")]
)
def test_the_kernel_compiles_for(capability: int, dtype: str) -> None:
    """T4 and RTX 2080 (float16: no bfloat16 there), A100, H100 and H200, B200, RTX 50."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), dtype],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
