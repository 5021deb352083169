"""Whether a packed folder and a model fit: otherwise an index error, or a bad run, much later."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from padless.runtime.errors import ModelError
from padless.runtime.model_families import find_decoder
from padless.runtime.reader import PackedReader

_LOG = logging.getLogger(__name__)
_INT32 = 2**31


def check_data(model: nn.Module, data: str | Path, attention: str = "auto") -> str:
    """Hold a packed folder (one split) against a model; what was found, in words.

    - The largest id has an embedding.
    - The longest sequence lies within max_position_embeddings.
    - Where the model was loaded from a folder with its tokenizer, it is the one the data were made with.
    - FlashAttention-2's backward pass can count the packs' rows; where not, "auto" takes another backend,
      which is logged, and attention="flash" is refused.

    Raises ModelError naming value, limit and way out, and what `PackedReader` raises.
    """
    reader = PackedReader(data)
    decoder = find_decoder(model)
    config: Any = decoder.module.config
    rows = _embeddings(decoder.module)
    if reader.manifest.largest_id >= rows:
        raise ModelError(
            f"{data} holds ids up to {reader.manifest.largest_id} and {type(model).__name__} has {rows} "
            "embeddings; build with the model's own tokenizer, or model.resize_token_embeddings"
        )
    table = reader.sequence_columns("pack", "length")
    lengths, packs = table["length"][table["pack"] >= 0], table["pack"][table["pack"] >= 0]
    longest = int(lengths.max(initial=0))
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ModelError(
            f"{data} holds a sequence of {longest} tokens and {type(model).__name__} has {limit} positions "
            f"(max_position_embeddings); pack-dataset repack --max-length {limit} --overflow drop, or extend "
            "the model's RoPE"
        )
    _check_tokenizer(model, reader, data)
    _check_flash(decoder.attention[0], config, packs, lengths, attention)
    return f"ids up to {reader.manifest.largest_id} of {rows}, sequences up to {longest} of {limit} tokens"


def _embeddings(decoder: nn.Module) -> int:
    embeddings: Any = decoder.get_input_embeddings()  # type: ignore[operator]
    return int(embeddings.num_embeddings)


def _check_tokenizer(model: nn.Module, reader: PackedReader, data: str | Path) -> None:
    made_with = reader.manifest.tokenizer_fingerprint
    name = str(getattr(model, "name_or_path", "") or "")
    file = Path(name) / "tokenizer.json"
    if not name or made_with is None or not file.is_file():
        return
    content = file.read_bytes()
    if "sha256:" + hashlib.sha256(content).hexdigest() == made_with:
        return
    # Saved again by another version a tokenizer has other bytes: then its vocabulary decides.
    stored = Path(data) / "tokenizer" / "tokenizer.json"
    if stored.is_file() and _vocabulary(stored.read_bytes()) == _vocabulary(content):
        return
    raise ModelError(
        f"{data} was made with the tokenizer {made_with}, and {file} has other ids; build with "
        f"--tokenizer {name}"
    )


def _vocabulary(tokenizer: bytes) -> Any:
    spec = json.loads(tokenizer)
    added = sorted((token["id"], token["content"]) for token in spec.get("added_tokens") or ())
    return spec.get("model", {}).get("vocab"), added


def _check_flash(attention: nn.Module, config: Any, packs: Any, lengths: Any, backend: str) -> None:
    heads = int(config.num_attention_heads)
    size = getattr(attention, "head_dim", None) or config.hidden_size // heads
    rows = int(np.bincount(packs, weights=lengths.astype(np.int64) + 128).max(initial=0))
    counted = rows * heads * (-(-int(size) // 32) * 32)
    if counted < _INT32:
        return
    problem = (
        f"FlashAttention-2's backward pass counts (tokens + 128 x sequences) x heads x head size in 32 bits, "
        f"and a pack gives {counted:,}; pack-dataset repack --max-sequences-per-pack with fewer"
    )
    if backend == "flash":
        raise ModelError(problem)
    _LOG.warning("%s, or 'auto' takes a slower backend", problem)
