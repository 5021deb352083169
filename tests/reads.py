"""Steps that would wait for a device are found on the CPU: what reads a value of a tensor is refused."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim")


class NothingIsRead(TorchDispatchMode):
    """Within it operators whose result, or its shape, hangs on values fail with AssertionError."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in _READS, name
        return function(*args, **(kwargs or {}))
