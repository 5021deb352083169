"""What an attention backend is: a reason why it cannot do a call, and the call.

A backend is a value, `Backend`, in a file of its own. `unavailable` looks at a `Request`, which holds
shapes, types and features and no tensors, so that its answer can be kept from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from padless.runtime.attention.boundaries import Boundaries

INT32 = 2**31
GRID = 65_535
"""The largest second or third axis of a CUDA grid; backends lay sequences and heads along them."""


class Options(NamedTuple):
    """How a token attends: what `varlen_attention` is told beside the tensors, resolved."""

    causal: bool
    scale: float
    window: int | None
    """A token sees itself and the window - 1 before it."""
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None
    """[Hq]: a logit for each head that takes its share of the softmax and has no value."""
    deterministic: bool


class Request(NamedTuple):
    """A call without its tensors: all that decides who can do it, and who is fastest."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    q_heads: int
    k_heads: int
    tokens: int
    sequences: int
    max_seqlen: int
    mean_length: float | None
    """Tokens of the sequence that a token lies in, on average; None where only the device knows."""
    causal: bool
    window: bool
    softcap: bool
    sinks: bool
    deterministic: bool
    backward: bool
    """Whether gradients will be asked for."""


Captured = Literal["alike", "anew", "never"]
Forward = Callable[[Tensor, Tensor, Tensor, Boundaries, Options], Tensor]
"""q [T, Hq, D], k, v [T, Hk, D] -> [T, Hq, D], differentiable."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute varlen attention."""

    unavailable: Callable[[Request], str | None]
    """Why it cannot do a call; None where it can."""
    forward: Forward
    """Only called where it is available."""
    prepare: Callable[[Tensor, Tensor, Boundaries, Options], Forward] | None = None
    """Works out once, from q and k, what all calls alike share; gives what does them. They get these very
    boundaries, and other options only in the sinks' values."""
    traceable: bool = True
    """Whether torch.compile can look inside; where not, a compiled program holds it as one operator."""
    captured: Captured = "alike"
    """How a CUDA graph holds it, which may be replayed over other boundaries: as any call, prepared anew for
    each graph, or not at all, where it depends on what the host makes of the boundaries' values."""

    def prepared(self, q: Tensor, k: Tensor, boundaries: Boundaries, options: Options) -> Forward:
        """What does a call and those like it, on these boundaries."""
        return self.forward if self.prepare is None else self.prepare(q, k, boundaries, options)


FEATURES = ("window", "softcap", "sinks", "deterministic")


def lacks(request: Request, *features: str) -> str | None:
    """The reason where a call asks for one of these features, which the backend has not."""
    for feature in features:
        if getattr(request, feature):
            return f"it has no {feature}"
    return None


def cuda_refusal(
    request: Request,
    *,
    capability: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    head_dim: int,
) -> str | None:
    """What CUDA kernels refuse alike: the device and its age, types, head sizes, the grid's axes."""
    if request.device.type != "cuda":
        return f"it runs on CUDA devices and q is on {request.device}"
    if request.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes {names} and q is {str(request.dtype).removeprefix('torch.')}"
    if request.head_dim > head_dim or request.head_dim % 8:
        return f"it takes heads of at most {head_dim} in multiples of 8 and q's have {request.head_dim}"
    if request.sequences > GRID or request.q_heads > GRID:
        return f"its grid takes at most {GRID:,} sequences, and there are {request.sequences:,}"
    found = capability_of(request.device)
    if found < capability:
        have, want = (".".join(map(str, x)) for x in (found, capability))
        return f"it needs compute capability {want} and the device has {have}"
    return None


def is_captured(device: torch.device) -> bool:
    """Whether calls on this device go into a CUDA graph, which may be replayed over other boundaries."""
    if torch.compiler.is_compiling() or device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing()


def capture_of(device: torch.device) -> int | None:
    """The number of the CUDA graph that calls on this device go into; None outside of any.

    0 in all of them where the driver does not tell them apart.
    """
    if not is_captured(device):
        return None
    from padless.kernels.capture import capture_number, tells_captures

    return capture_number() if tells_captures() else 0


def element_overflow(request: Request) -> str | None:
    """The reason of kernels that count q's elements in 32 bits."""
    size = request.tokens * request.q_heads * request.head_dim
    if size < INT32:
        return None
    return f"it counts elements in 32 bits, and q has {size:,}; make the row shorter"


def last_contiguous(x: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous: kernels take any other strides."""
    return x if x.stride()[-1] == 1 else x.contiguous()


@cache
def _import_refusal(module: str, package: str) -> str | None:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module + ".").startswith(error.name + "."):
            return f"{package} is not installed"
        return f"{package} does not import: {error}"
    except Exception as error:  # a library built for another torch fails in many ways
        return f"{package} does not import: {error}"
    return None


def _find_import_refusal(module: str, package: str) -> str | None:
    return _import_refusal(module, package)


def _find_capability(device: torch.device) -> tuple[int, int]:
    return _capability(device)


_capability = cache(torch.cuda.get_device_capability)

import_refusal: Callable[[str, str], str | None]
import_refusal = torch.compiler.assume_constant_result(_find_import_refusal)  # type: ignore[no-untyped-call]
"""(module, package) -> why the library cannot be used, not installed or not importable; None where it can."""
capability_of: Callable[[torch.device], tuple[int, int]]
capability_of = torch.compiler.assume_constant_result(_find_capability)  # type: ignore[no-untyped-call]
"""The compute capability of a CUDA device. (Neither is looked into by torch.compile.)"""
