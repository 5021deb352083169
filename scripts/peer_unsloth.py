"""Unsloth's rotary kernels by themselves, out of a folder of unpacked wheels, to be timed as a peer.

    pip download --no-deps unsloth unsloth_zoo && for w in *.whl; do unzip -q $w -d FOLDER; done

`import unsloth` patches torch, transformers and TRL and wants a dozen packages more; its kernels want few of
them. So its packages are entered without running their `__init__`, and two modules of unsloth_zoo that do
more than the kernels ask of them are stood in for. What is gained is a peer that runs wherever Triton does;
the price is a list of its modules' names, which a later release may change: that is said then. Nothing of
Unsloth is copied or changed; parts of it are under the AGPL.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGES = ("unsloth", "unsloth.kernels", "unsloth_zoo", "unsloth_zoo.temporary_patches")
"""Entered without their __init__."""
STAND_INS: dict[str, dict[str, Any]] = {
    "unsloth_zoo.log": {"logger": logging.getLogger("unsloth")},
    "unsloth_zoo.temporary_patches.common": {"torch_compile": torch.compile},
}


@dataclass(frozen=True, kw_only=True)
class UnslothKernels:
    """What its Llama and Qwen3 models call in every layer.

    `rope(q, k, cos, sin, position_ids)`: q and k [batch, heads, tokens, head size], cos and sin a table
    [positions, head size] whose halves are equal, position_ids [batch, tokens]. New tensors, forward and
    backward. `norm_rope(q_norm, k_norm, q, k, cos, sin, position_ids)`: q and k [batch, tokens, heads, head
    size], the norms modules with `weight` and `variance_epsilon`; one kernel where both weights are frozen
    and two norms and `rope` where they are trained. Both return [batch, heads, tokens, head size].
    """

    rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def load_unsloth(folder: Path) -> UnslothKernels:
    """The kernels of the wheels in `folder`, which stays at the end of `sys.path`: rows name the version.

    Raises ImportError where the folder lacks a wheel, where `unsloth` is imported already, or where this
    release's kernels ask for what is not there.
    """
    for package in ("unsloth", "unsloth_zoo"):
        wheel = next(folder.glob(f"{package}-*.dist-info"), None)
        if wheel is None or not (folder / package).is_dir():
            raise ImportError(f"{folder} holds no unpacked wheel of {package}")
        if package in sys.modules:
            raise ImportError(
                f"{package} is imported already; its kernels are loaded before it, by themselves"
            )
    if not torch.cuda.is_available():
        os.environ["UNSLOTH_ALLOW_CPU"] = "1"  # under Triton's interpreter
    sys.path.append(str(folder))
    for name in PACKAGES:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module_from_spec(spec)
    for name, what in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(what)
    try:
        rope = importlib.import_module("unsloth.kernels.rope_embedding").fast_rope_embedding
        norm_rope = importlib.import_module("unsloth.kernels.qk_norm_rope").fast_qk_norm_rope
    except Exception as error:  # a foreign module may raise anything
        raise ImportError(f"the kernels beside {wheel}: {type(error).__name__}: {error}") from error
    return UnslothKernels(rope=rope, norm_rope=norm_rope)
