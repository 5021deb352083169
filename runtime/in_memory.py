"""Sequences that were just made, such as rollouts, to batches without padding: no files, no tokenizer.

    rollouts [{"prompt_ids", "response_ids", "old_logprobs", ...}, ...]    the same on every rank
      -> plan of all (runtime/balance.py)  ->  this rank's micro-batches, as many as on every other rank

What a value stands for is told by the first sequence: arrays go by token, numbers and strings by sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.assemble import assemble
from padless.runtime.balance import plan_micro_batches
from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.ranks import find_ranks
from padless.runtime.varlen_batch import MODEL_INPUTS, VarlenBatch

_OWN = ("input_ids", "prompt_ids", "response_ids", "labels", "response_mask")
"""What becomes the tokens and labels of a batch; the rest are columns."""


def pack_sequences(
    sequences: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int,
    rank: int | None = None,
    world_size: int | None = None,
) -> list[VarlenBatch]:
    """This rank's micro-batches of at most `max_tokens` tokens; every rank calls it with the same sequences.

    A sequence has `input_ids` [L], with `labels` [L] (unshifted, -100 where not trained) or `response_mask`
    [L] (default: all is trained), or else `prompt_ids` [P] and `response_ids` [R], of which the response is
    trained, where `response_mask` [R] says so. Further arrays are columns by token: as long as the ids, or as
    the response (the prompt then gets zeros); row t of an array belongs to token t, never to the one before.
    Numbers and strings are columns by sequence. A batch's `sequence_ids` are places in `sequences`.

    Rank and world size as for PackedStream. A rank that no sequence is left for gets an untrained one with
    `sequence_ids` -1 and zeros in its columns, so that all ranks compute as often. Raises CollateError for
    arrays of other lengths, naming the sequence, and for a sequence of more than `max_tokens` tokens.
    """
    rank, world_size = find_ranks(rank, world_size)
    if not sequences:
        raise CollateError("there are no sequences to pack; give at least one")
    apart = "input_ids" not in sequences[0]
    names = ("prompt_ids", "response_ids") if apart else ("input_ids",)
    lengths = np.sum([_lengths(_column(sequences, name)) for name in names], axis=0)
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, world_size=world_size)
    shortest = int(lengths.argmin())
    return [
        _batch([sequences[number] for number in numbers], numbers)
        if numbers
        else _without_targets(_batch([sequences[shortest]], [-1]))
        for numbers in plan[rank::world_size]
    ]


def _batch(sequences: list[Mapping[str, Any]], numbers: list[int]) -> VarlenBatch:
    """One micro-batch; `numbers` are what its sequences are called."""
    first = sequences[0]
    apart = "input_ids" not in first
    answers = _arrays(sequences, "response_ids" if apart else "input_ids")
    sizes = _lengths(answers)
    prompts = _arrays(sequences, "prompt_ids") if apart else []
    before = _lengths(prompts) if apart else np.zeros_like(sizes)

    def arrays_of(name: str) -> list[Array]:
        """A column by token as arrays that lie behind each other, zeros for each prompt."""
        arrays = _arrays(sequences, name)
        if (wrong := np.flatnonzero(_lengths(arrays) != sizes)).size:
            at = int(wrong[0])
            raise CollateError(
                f"{name} of sequence {numbers[at]} has {len(arrays[at])} entries for {sizes[at]} "
                f"{'response_ids' if apart else 'input_ids'}: one for each token, unshifted"
            )
        if not apart:
            return arrays
        zeros = np.zeros((int(before.max()), *arrays[0].shape[1:]), dtype=arrays[0].dtype)
        return _interleaved([zeros[:size] for size in before.tolist()], arrays)

    lengths = before + sizes
    batch = assemble(
        ids=_interleaved(prompts, answers) if apart else answers,
        labels=[],
        lengths=lengths,
        sequence_ids=[np.asarray(numbers)],
        longest=int(lengths.max()),
        num_targets=0,
    )
    labels = batch["labels"].numpy()[0]
    if "labels" in first:
        np.concatenate(arrays_of("labels"), out=labels, casting="unsafe")
    elif "response_mask" in first:
        np.copyto(labels, IGNORE_INDEX, where=np.concatenate(arrays_of("response_mask")) == 0)
    elif apart:
        edges = np.stack([before, sizes], axis=1).reshape(-1)
        np.copyto(labels, IGNORE_INDEX, where=np.tile([True, False], len(sizes)).repeat(edges))
    labels[np.cumsum(lengths) - lengths] = IGNORE_INDEX  # nothing predicts a sequence's first token
    batch["num_targets"] = int(np.count_nonzero(labels != IGNORE_INDEX))
    for name, value in first.items():
        if name in _OWN:
            continue
        if np.ndim(value):
            batch[name] = torch.from_numpy(np.concatenate(arrays_of(name))[None])
        else:
            values = _column(sequences, name)
            batch[name] = values if isinstance(value, str) else torch.from_numpy(np.asarray(values))
    return batch


def _without_targets(batch: VarlenBatch) -> VarlenBatch:
    """What a rank computes where no sequence is left for it: these tokens, untrained, and zeros."""
    for name, values in batch.items():
        if name == "labels":
            values.fill_(IGNORE_INDEX)
        elif name not in (*MODEL_INPUTS, "sequence_ids", "num_targets"):
            batch[name] = torch.zeros_like(values) if isinstance(values, torch.Tensor) else [""] * len(values)
    batch["num_targets"] = 0
    return batch


def _interleaved(some: list[Array], others: list[Array]) -> list[Array]:
    return [part for pair in zip(some, others, strict=True) for part in pair]


def _column(sequences: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    try:
        return [one[name] for one in sequences]
    except KeyError:
        at = next(place for place, one in enumerate(sequences) if name not in one)
        raise CollateError(
            f"a sequence has no {name}, and all have the same names; it has {', '.join(sequences[at])}"
        ) from None


def _arrays(sequences: Sequence[Mapping[str, Any]], name: str) -> list[Array]:
    return [np.asarray(value) for value in _column(sequences, name)]


def _lengths(arrays: list[Any]) -> Array:
    return np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
