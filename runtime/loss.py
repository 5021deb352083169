"""What a step's loss is divided by, so that packing changes nothing about training.

    targets = step_targets(batches)                        # all of the step, over accumulation and ranks
    for batch in batches:
        loss = model(**batch.model_inputs(), num_items_in_batch=targets).loss * world_size
        loss.backward()                                    # DDP averages over ranks, hence the factor

Token mean: each trained token of the step weighs the same, as in padding-based training with
`num_items_in_batch`. The mean of each batch's own mean does not give that: batches differ in their
targets. Sequence mean (`sequence_weights`): each sequence weighs the same, however long.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from padless.runtime.format import IGNORE_INDEX
from padless.runtime.varlen_batch import VarlenBatch


def step_targets(
    batches: Iterable[VarlenBatch], *, group: torch.distributed.ProcessGroup | None = None
) -> int:
    """The trained tokens of this rank's batches of a step, summed over the data-parallel ranks.

    Every rank of `group` (all, by default) calls it once a step; one process needs no torch.distributed.
    At least 1, so that a step of nothing but untrained batches divides by no zero.
    """
    device, count = torch.device("cpu"), 0
    for batch in batches:
        device, count = batch["labels"].device, count + batch.num_targets
    return step_total(count, device=device, group=group)


def step_total(
    count: int,
    *,
    device: torch.device | str | int = "cpu",
    group: torch.distributed.ProcessGroup | None = None,
) -> int:
    """What this rank counted for a step (pairs, answers, sequences), summed over the data-parallel ranks.

    For losses that are not by token. `device` is one that the ranks' backend sums on. Otherwise as
    `step_targets`.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        total = torch.tensor(count, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(total, group=group)
        count = int(total)
    return max(count, 1)


def sequence_weights(batch: VarlenBatch) -> torch.Tensor:
    """What each label's loss is multiplied by for the sum of the sequences' means: [1, T] float32.

    1 over the targets of its own sequence at trained labels, 0 elsewhere; aligned with `labels`
    (unshifted). Divide the sum by the step's number of sequences that have targets.
    """
    trained = (batch["labels"] != IGNORE_INDEX)[0]
    sequence = batch["seq_idx"][0].long()
    sequences = len(batch["cu_seq_lens_q"]) - 1
    counts = torch.zeros(sequences, dtype=torch.float32, device=trained.device)
    counts.index_add_(0, sequence, trained.float())
    weights: torch.Tensor = trained / counts.clamp(min=1)[sequence]
    return weights[None]
