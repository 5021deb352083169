"""A packed folder in the forms that other trainers take: one file a target, one line here.

A target writes files through its Job, and says in words how its trainer is pointed at them. Modules are
imported when asked for: the command line lists the names and needs no Arrow for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from padless.packer.exports.target import Target

EXPORTS = {
    "unpacked": "unpacked",
    "axolotl": "axolotl",
    "nemo": "nemo",
    "automodel": "automodel",
    "llamafactory": "llamafactory",
    "torchtune": "torchtune",
    "torchtitan": "torchtitan",
    "olmo-core": "olmo_core",
    "mds": "mds",
    "megatron": "megatron",
    "parquet": "parquet",
}
"""The name of a form -> the module here that has it as TARGET."""


def target_of(name: str) -> Target:
    """The target of that name, a key of EXPORTS."""
    found: Target = import_module(f"{__name__}.{EXPORTS[name]}").TARGET
    return found
