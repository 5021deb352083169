"""Whether a packed folder and a model fit: otherwise an index error, or a bad run, much later."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from padless.runtime.errors import MissingFileError, ModelError
from padless.runtime.model_families import find_decoder
from padless.runtime.reader import PackedReader

_LOG = logging.getLogger(__name__)
_INT32 = 2**31


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What data are held against."""

    name: str
    embeddings: int
    """Ids are below this."""
    positions: int | None
    """max_position_embeddings: tokens that a sequence may have."""
    heads_times_size: int
    """Query heads x head size, as FlashAttention-2 pads it."""
    folder: str
    """Where it was loaded from; empty where from nowhere."""

    @classmethod
    def of_config(cls, config: Any, *, name: str, folder: str, embeddings: int | None = None) -> ModelFacts:
        """From a text model's configuration, and its embeddings where they were made longer."""
        heads = int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(
            name=name,
            embeddings=config.vocab_size if embeddings is None else embeddings,
            positions=getattr(config, "max_position_embeddings", None),
            heads_times_size=heads * (-(-size // 32) * 32),
            folder=folder,
        )

    @classmethod
    def of_model(cls, model: nn.Module) -> ModelFacts:
        """Raises ModelError where there is no decoder (see `find_decoder`)."""
        decoder: Any = find_decoder(model).module
        return cls.of_config(
            decoder.config,
            name=type(model).__name__,
            folder=str(getattr(model, "name_or_path", "") or ""),
            embeddings=decoder.get_input_embeddings().num_embeddings,
        )


def check_data(model: ModelFacts, data: str | Path, attention: str = "auto") -> str:
    """Hold a packed folder (one split) against a model; what was found, in words.

    - The largest id has an embedding.
    - The longest sequence lies within max_position_embeddings.
    - Where the model was loaded from a folder with its tokenizer, it is the one the data were made with.
    - FlashAttention-2's backward pass can count the packs' rows; where not, "auto" takes another backend,
      which is logged, and attention="flash" is refused.

    Raises ModelError naming value, limit and way out, and what `PackedReader` raises.
    """
    reader = PackedReader(data)
    largest = reader.manifest.largest_id
    if largest >= model.embeddings:
        raise ModelError(
            f"{data} holds ids up to {largest} and {model.name} has {model.embeddings} embeddings; build "
            "with the model's own tokenizer, or model.resize_token_embeddings"
        )
    table = reader.sequence_columns("pack", "length")
    lengths, packs = table["length"][table["pack"] >= 0], table["pack"][table["pack"] >= 0]
    longest = int(lengths.max(initial=0))
    if model.positions is not None and longest > model.positions:
        raise ModelError(
            f"{data} holds a sequence of {longest} tokens and {model.name} has {model.positions} positions "
            f"(max_position_embeddings); pack-dataset repack --max-length {model.positions} --overflow drop, "
            "or extend the model's RoPE"
        )
    _check_tokenizer(model, reader, data)
    _check_flash(model, packs, lengths, attention)
    return f"ids up to {largest} of {model.embeddings}, sequences up to {longest} of {model.positions} tokens"


def _check_tokenizer(model: ModelFacts, reader: PackedReader, data: str | Path) -> None:
    made_with = reader.manifest.tokenizer_fingerprint
    file = Path(model.folder) / "tokenizer.json"
    if not model.folder or made_with is None or not file.is_file():
        return
    content = file.read_bytes()
    if "sha256:" + hashlib.sha256(content).hexdigest() == made_with:
        return
    # Saved again by another version a tokenizer has other bytes: then its vocabulary decides.
    stored = _stored_tokenizer(reader)
    if stored is not None and _vocabulary(stored) == _vocabulary(content):
        return
    raise ModelError(
        f"{data} was made with the tokenizer {made_with}, and {file} has other ids; build with "
        f"--tokenizer {model.folder}"
    )


def _stored_tokenizer(reader: PackedReader) -> bytes | None:
    """The tokenizer that lies beside the packs, here or behind their URL."""
    name = "tokenizer/tokenizer.json"
    try:
        return (
            (reader.path / name).read_bytes() if reader.remote is None else reader.remote.storage.read(name)
        )
    except (FileNotFoundError, MissingFileError):
        return None


def _vocabulary(tokenizer: bytes) -> Any:
    spec = json.loads(tokenizer)
    added = sorted((token["id"], token["content"]) for token in spec.get("added_tokens") or ())
    return spec.get("model", {}).get("vocab"), added


def _check_flash(model: ModelFacts, packs: Any, lengths: Any, backend: str) -> None:
    rows = int(np.bincount(packs, weights=lengths.astype(np.int64) + 128).max(initial=0))
    if rows * model.heads_times_size < _INT32:
        return
    problem = (
        "FlashAttention-2's backward pass counts (tokens + 128 x sequences) x heads x head size in 32 bits, "
        f"and a pack gives {rows * model.heads_times_size:,}; pack-dataset repack with fewer "
        "--max-sequences-per-pack"
    )
    if backend == "flash":
        raise ModelError(problem)
    _LOG.warning("%s, or 'auto' takes a slower backend", problem)
