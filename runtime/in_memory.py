"""Sequences that were just made, such as rollouts, to batches without padding: no files, no tokenizer.

    rollouts [{"prompt_ids", "response_ids", "old_logprobs", ...}, ...]    the same on every rank
      -> plan of all (runtime/balance.py)  ->  this rank's micro-batches, as many as on every other rank

What a value stands for is told by the first sequence: arrays go by token, numbers and strings by sequence.
A rank's share is gathered at once and its micro-batches are views of it, so a column is one call of numpy,
and the memory of a share is free when all of its batches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from padless.runtime.arrays import Array
from padless.runtime.assemble import assemble
from padless.runtime.balance import plan_micro_batches
from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.images import IMAGES
from padless.runtime.in_memory_checks import (
    refuse_further,
    refuse_ids,
    refuse_labels,
    refuse_mask,
    refuse_not_finite,
    refuse_padding,
)
from padless.runtime.in_memory_columns import (
    blanks_of,
    by_sequence,
    by_token,
    column,
    ids_of,
    interleaved,
    lengths_of,
    rows_of,
    token_counts,
)
from padless.runtime.in_memory_images import NAMES as OF_IMAGES
from padless.runtime.in_memory_images import add_images, refuse_unseen
from padless.runtime.ranks import find_ranks
from padless.runtime.schema import NONE_IS
from padless.runtime.varlen_batch import MODEL_INPUTS, VarlenBatch

_OWN = ("input_ids", "prompt_ids", "response_ids", "labels", "response_mask")
"""What becomes the tokens and labels of a batch; the rest are columns."""
_MADE = ("sequence_ids", "num_targets", *(name for name in MODEL_INPUTS if name not in _OWN))
"""What a batch has by these names is made here."""
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_NOT_BOTH = (
    ("input_ids", "prompt_ids"),
    ("input_ids", "response_ids"),
    ("labels", "response_mask"),
    ("labels", "response_ids"),
)


def pack_sequences(
    sequences: Iterable[Mapping[str, Any]],
    *,
    max_tokens: int,
    rank: int | None = None,
    world_size: int | None = None,
    image_token_id: int | None = None,
) -> list[VarlenBatch]:
    """This rank's micro-batches of at most `max_tokens` tokens; every rank calls it with the same sequences.

    A sequence has `input_ids` [L], with `labels` [L] (unshifted, -100 where not trained) or `response_mask`
    [L] (default: all is trained), or else `prompt_ids` [P] and `response_ids` [R], of which the response is
    trained, where `response_mask` [R] (0 and 1) says so. Further arrays are columns by token: as long as the
    ids, or as the response (the prompt then gets zeros); row t of an array belongs to token t, never to the
    one before. Tensors, lists and tuples are taken for arrays; arrays are read fastest.
    Numbers and strings are columns by sequence. Python's floats become float32, and true and false in
    `label` and `is_chosen` 1 and 0. A batch's `sequence_ids` are places in `sequences`.

    With `image_token_id`, the placeholder of a vision-language model, a sequence may have images:
    `image_grid_thw` [I, 3] as the model's processor gives it, and `pixel_values` [patches, values] or
    `images`, I references for `with_pixels`. Its ids have all placeholders, as the processor repeats them;
    they are never trained. Batches are then those of a folder with images.

    Rank and world size as for PackedStream. A rank that no sequence is left for gets an untrained one with
    `sequence_ids` -1 and zeros in its columns (pair_id, is_chosen, label, group_id: -1), so that all ranks
    compute as often. Raises CollateError for arrays of other lengths, naming the sequence, for NaN at a
    trained token, for padding, for labels that are not the tokens, for names that say the same or that are
    made here, for placeholders that do not fit the images, and for a sequence of more than `max_tokens`
    tokens.
    """
    rank, world_size = find_ranks(rank, world_size)
    sequences = rows_of(sequences)
    first = sequences[0]
    _refuse_names(first)
    names = ("input_ids",) if "input_ids" in first else ("prompt_ids", "response_ids")
    lengths = token_counts(names[0], column(sequences, names[0]))
    for name in names[1:]:
        lengths += token_counts(name, column(sequences, name))
    has_images = image_token_id is not None or IMAGES in first
    refuse_unseen(sequences if has_images else sequences[:1], image_token_id)
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, world_size=world_size)
    share = plan[rank::world_size]
    taken = [numbers or [int(lengths.argmin())] for numbers in share]
    flat = [number for numbers in taken for number in numbers]
    mine = [sequences[number] for number in flat]
    refuse_further(mine, first, but=OF_IMAGES if image_token_id is not None else (), numbers=flat)
    batches = _cut(_gathered(mine, flat, first), taken)
    for batch, numbers, seen in zip(batches, share, taken, strict=True):
        if not numbers:
            _untrain(batch)
        if image_token_id is not None:
            add_images(batch, [sequences[number] for number in seen], seen, image_token_id)
    return batches


def _refuse_names(first: Mapping[str, Any]) -> None:
    for one, other in _NOT_BOTH:
        if one in first and other in first:
            raise CollateError(f"the sequences have {one} and {other}, and only one of them would count")
    if made := [name for name in _MADE if name in first]:
        raise CollateError(f"the sequences have {made[0]}, which is made here for each batch: leave it out")


def _gathered(
    sequences: list[Mapping[str, Any]], numbers: list[int], first: Mapping[str, Any]
) -> VarlenBatch:
    """All of a rank's sequences as one batch; `numbers` are what they are called, `first` is like all."""
    apart = "input_ids" not in first
    answers = ids_of(sequences, "response_ids" if apart else "input_ids", numbers)
    sizes = lengths_of(answers)
    prompts = ids_of(sequences, "prompt_ids", numbers) if apart else []
    before = lengths_of(prompts) if apart else np.zeros_like(sizes)
    blanks = blanks_of(before) if apart else None

    each = sizes.tolist()

    def of_tokens(name: str) -> Array:
        """A column by token, zeros for each prompt."""
        per = "response_ids" if apart else "input_ids"
        return by_token(name, column(sequences, name), each, before=blanks, numbers=numbers, per=per)

    lengths = before + sizes
    batch = assemble(
        ids=interleaved(prompts, answers) if apart else answers,
        labels=[],
        lengths=lengths,
        sequence_ids=[np.asarray(numbers)],
        longest=int(lengths.max()),
        num_targets=0,
    )
    ids, labels = batch["input_ids"].numpy()[0], batch["labels"].numpy()[0]
    refuse_ids(ids, lengths, numbers)
    if "labels" in first:
        given = of_tokens("labels")
        refuse_labels(given, ids, lengths, numbers)
        labels[:] = given
        labels[np.cumsum(lengths) - lengths] = IGNORE_INDEX  # nothing predicts a sequence's first token
    elif "response_mask" in first:
        mask = of_tokens("response_mask")
        refuse_mask("response_mask", mask, lengths, numbers)
        np.copyto(labels, IGNORE_INDEX, where=mask == 0)
    elif apart:
        in_turn = np.arange(2 * len(sizes)) % 2 == 0
        np.copyto(labels, IGNORE_INDEX, where=in_turn.repeat(np.array([before, sizes]).T.reshape(-1)))
    for name, value in first.items():
        if name in _OWN or name in OF_IMAGES:
            continue
        if name == "attention_mask":
            refuse_padding(column(sequences, name), numbers)
        elif _is_array(value):
            values = of_tokens(name)
            refuse_not_finite(name, values, labels, lengths, numbers)
            batch[name] = torch.from_numpy(values[None])
        else:
            found = by_sequence(name, column(sequences, name))
            if isinstance(found, np.ndarray):
                refuse_not_finite(name, found, labels, lengths, numbers)
            batch[name] = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
    return batch


def _is_array(value: Any) -> bool:
    """Whether it goes by token: anything with dimensions, lists and tuples."""
    return bool(value.ndim) if hasattr(value, "ndim") else isinstance(value, list | tuple)


def _cut(batch: VarlenBatch, taken: list[list[int]]) -> list[VarlenBatch]:
    """The batch in parts of as many sequences: its memory, with boundaries of their own."""
    rows, ends = list(map(len, taken)), batch["cu_seq_lens_q"].numpy()
    firsts = [0, *accumulate(rows)]
    tokens = np.diff(ends[firsts]).tolist()
    longest = np.maximum.reduceat(np.diff(ends), firsts[:-1]).tolist()
    trained, seq_idx = batch["labels"].numpy()[0] != IGNORE_INDEX, batch["seq_idx"].numpy()[0]
    parts: dict[str, Sequence[Any]] = {}
    for name, value in batch.items():
        if isinstance(value, list):
            parts[name] = [value[first:last] for first, last in pairwise(firsts)]
        elif isinstance(value, torch.Tensor) and name not in _BOUNDS:
            # Not the safe one: its parts refuse to be changed in place by what has a gradient.
            by_token = value.ndim > 1
            parts[name] = value.unsafe_split_with_sizes(tokens if by_token else rows, int(by_token))
    found = []
    for place, (first, last) in enumerate(pairwise(firsts)):
        part = VarlenBatch({name: each[place] for name, each in parts.items()})
        mine = slice(ends[first], ends[last])
        seq_idx[mine] -= (
            first  # which the part has in the same memory, and torch takes five times as long for
        )
        part["cu_seq_lens_q"] = part["cu_seq_lens_k"] = torch.from_numpy(ends[first : last + 1] - ends[first])
        part["max_length_q"] = part["max_length_k"] = longest[place]
        part["num_targets"] = int(np.count_nonzero(trained[mine]))
        found.append(part)
    return found


def _untrain(batch: VarlenBatch) -> None:
    """Make it what a rank computes where no sequence is left for it: these tokens, and zeros."""
    for name, values in batch.items():
        if name == "labels":
            values.fill_(IGNORE_INDEX)
        elif name == "sequence_ids":
            values.fill_(-1)
        elif name not in (*MODEL_INPUTS, "num_targets"):
            if isinstance(values, torch.Tensor):
                none = NONE_IS.get(name, 0) if values.ndim == 1 and values.dtype.is_signed else 0
                batch[name] = torch.full_like(values, none)
            else:
                batch[name] = [""] * len(values)
    batch["num_targets"] = 0
