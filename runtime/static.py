"""Batches of one shape, so that a step is compiled once, or captured in a CUDA graph.

    T = 6, N = 3 -> tokens=8, sequences=5

    input_ids     [a a a b c c | 0 0]    labels  [_ a a _ _ c | _ _]    _ is -100
    position_ids  [0 1 2 0 0 1 | 0 1]    seq_idx [0 0 0 1 2 2 | 3 3]
    cu_seq_lens   [0 3 4 6 8 8]          max_length 4: the next power of two

The tokens behind the last one are a sequence of their own, so that no other attends to them, and the
boundaries behind it are of sequences without tokens. The price is the computation on what is filled
up: ask for the packs' own length, and little is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.schema import NONE_IS, ColumnInfo
from padless.runtime.targets import count_targets
from padless.runtime.varlen_batch import MAX_TARGETS, MODEL_INPUTS, VarlenBatch


def pad_batch(
    batch: VarlenBatch,
    *,
    tokens: int,
    sequences: int,
    max_length: int | None = None,
    targets: int | None = None,
    columns: Iterable[ColumnInfo] = (),
) -> VarlenBatch:
    """The batch with `tokens` tokens and `sequences` sequences, whatever it had: on the CPU.

    What is added is trained nowhere; `sequence_ids` there are -1, further columns zeros (pair_id,
    is_chosen, label and group_id -1, as of sequences that have none), at the level that `columns` (the
    manifest's) says. `max_length_q` and `max_length_k` are `max_length`; unless given the longest sequence's
    length, at most `tokens`, rounded up to a power of two: a compiled step then sees few of them. A CUDA
    graph needs one, so give it there. `targets` says how many labels are trained at most: the fused loss of a
    captured step then goes over so many tokens, otherwise over all.
    Raises CollateError where the batch does not fit, for further columns of unknown level, and for batches of
    a folder with images, whose pixels are of no one shape.
    """
    if "num_images" in batch:
        raise CollateError(
            "the batch is of a folder with images, whose pixels have another shape in each batch: leave "
            "pad_batch out, and compile the layers of the language model alone"
        )
    had_tokens, had_sequences = batch["input_ids"].shape[1], len(batch["cu_seq_lens_q"]) - 1
    more_tokens = tokens - had_tokens
    more_sequences = sequences - had_sequences
    if more_tokens < 0 or more_sequences < (more_tokens > 0):
        raise CollateError(
            f"a batch of {had_tokens} tokens in {had_sequences} sequences does not fit tokens={tokens}, "
            f"sequences={sequences}, of which one is for the tokens that are filled up; give more of them, "
            "or fewer packs a batch"
        )
    longest = max(batch["max_length_q"], more_tokens)
    if max_length is None:
        max_length = min(1 << (longest - 1).bit_length(), tokens)
    elif longest > max_length:
        raise CollateError(
            f"max_length={max_length} and the batch has a sequence of {longest} tokens"
            + (", which is what is filled up" if longest == more_tokens else "")
            + "; give a larger one, at most the number of tokens"
        )
    if targets is not None and (found := count_targets(batch["labels"])) > targets:
        raise CollateError(f"targets={targets} and the batch has {found} trained labels; give more of them")
    levels = {column.name: column.level for column in columns}
    padded = VarlenBatch(batch)
    for key in batch:
        if key in ("input_ids", "labels", "position_ids", "seq_idx"):
            padded[key] = _longer(batch[key], 1, more_tokens)
        elif key not in (*MODEL_INPUTS, "num_targets", MAX_TARGETS):
            level = "sequence" if key == "sequence_ids" else levels.get(key)
            if level not in ("token", "sequence", "pack"):
                raise CollateError(
                    f"nothing says whether {key} is per token, sequence or pack; "
                    "give columns=read_manifest(folder).columns"
                )
            if level != "pack":
                at, more = (1, more_tokens) if level == "token" else (0, more_sequences)
                none = NONE_IS.get(key, 0) if level == "sequence" else 0
                padded[key] = _longer(batch[key], at, more, none)
    padded["labels"][0, had_tokens:] = IGNORE_INDEX
    padded["position_ids"][0, had_tokens:] = torch.arange(more_tokens)
    padded["seq_idx"][0, had_tokens:] = had_sequences
    padded["sequence_ids"][had_sequences:] = -1
    boundaries = _longer(batch["cu_seq_lens_q"], 0, more_sequences)
    boundaries[had_sequences + 1 :] = tokens
    padded["cu_seq_lens_q"] = padded["cu_seq_lens_k"] = boundaries
    padded["max_length_q"] = padded["max_length_k"] = max_length
    if targets is not None:
        padded[MAX_TARGETS] = targets
    return padded


def _longer(values: Any, dimension: int, more: int, none: int = 0) -> Any:
    """A copy with `none` so many times behind, along a dimension; strings, in lists, with empty ones."""
    if isinstance(values, list):
        empty = [""] * more
        return [[*values[0], *empty]] if dimension else [*values, *empty]
    shape = list(values.shape)
    shape[dimension] = more
    return torch.cat([values, values.new_full(shape, none if values.dtype.is_signed else 0)], dimension)
