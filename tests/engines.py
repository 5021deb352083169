"""What computes in tests of a kernel: its reference, or the kernel on a device or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENGINES = ("reference", "kernel")


def use(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one of ENGINES serve the tensors of `device_of(engine)`."""
    if engine != "kernel":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    elif DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def device_of(engine: str) -> str:
    """Where the tensors lie that it computes on."""
    return DEVICE if engine == "kernel" else "cpu"
