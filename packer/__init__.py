"""Offline side of padless: data sets in, packed folders out.

from padless.packer import PackConfig, pack_dataset
pack_dataset(PackConfig(sources=("data.jsonl",), tokenizer="qwen3", max_length=2048, output="packed"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.packer.config import PackConfig
    from padless.packer.pipeline import pack_dataset
    from padless.packer.quick import pack

__all__ = ["PackConfig", "pack", "pack_dataset"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: the command line begins to load the tokenizer before anything else.
    if name == "PackConfig":
        from padless.packer.config import PackConfig

        return PackConfig
    if name == "pack_dataset":
        from padless.packer.pipeline import pack_dataset

        return pack_dataset
    if name == "pack":
        from padless.packer.quick import pack

        return pack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
