"""Which data-parallel rank this is, and whether somebody else is about to split its part again."""

from __future__ import annotations

import os
import sys
from numbers import Integral

import torch

from padless.runtime.errors import StreamError

# Both names exist in accelerate, the first in transformers as well.
_SPLITTERS = ("IterableDatasetShard", "DataLoaderDispatcher")
LOADERS = ("_MultiProcessingDataLoaderIter", "_StatefulMultiProcessingDataLoaderIter")
"""What makes workers: torch's, and torchdata's."""


def find_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: given, of torch.distributed, of the environment, or 0 of 1."""
    if (rank is None) != (world_size is None):
        raise StreamError(f"rank is {rank} and world_size is {world_size}; give both or none")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            texts = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
            try:
                rank, world_size = int(texts[0]), int(texts[1])
            except ValueError:
                raise StreamError(
                    f"RANK is {texts[0]!r} and WORLD_SIZE is {texts[1]!r}; set whole numbers, "
                    "or give rank= and world_size="
                ) from None
    if not isinstance(rank, Integral) or not isinstance(world_size, Integral) or not 0 <= rank < world_size:
        raise StreamError(f"rank {rank!r} of world_size {world_size!r}; ranks are from 0 to world_size - 1")
    return rank, world_size


def refuse_to_be_split() -> None:
    """Raise StreamError where accelerate would split the stream, which is one rank's part, again."""
    if name := is_called_by(*_SPLITTERS):
        raise StreamError(
            f"this PackedStream is read by {name}, which would split it over the ranks once more, "
            "or cut its batches apart, and part of the data would never be seen. Use "
            "PackedDataset with collate as the data collator, or keep the loader of the stream "
            "out of accelerator.prepare() and call batch.to(device) yourself"
        )


def is_accelerates_count() -> bool:
    """Whether an epoch is set, by the method that asks, because a loader of accelerate begins a pass.

    Its loaders count passes from 0 whatever a state or `set_epoch` has said, and not at all on several ranks.
    """
    setting = sys._getframe(2)
    begun = setting.f_back
    loader = setting.f_locals.get("self")
    if begun is None or begun.f_code.co_name != "__iter__" or begun.f_locals.get("self") is not loader:
        return False
    return any(one.__name__ == "DataLoaderShard" for one in type(loader).__mro__)


def has_no_exact_states() -> bool:
    """Whether a StatefulDataLoader that yields batches as they come makes its workers now, or forked this.

    Which batches were yielded is then in none of its states. Torch's own DataLoader takes no states.
    """
    return not getattr(_caller(*LOADERS[1:]), "_in_order", True)


def is_called_by(*names: str) -> str | None:
    """The class, of those named, that a method of runs while this is called; None where none does."""
    caller = _caller(*names)
    return None if caller is None else type(caller).__name__


def _caller(*names: str) -> object | None:
    """The nearest object of a class so named that a method of runs: in a forked worker its loader, too."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        found: object = frame.f_locals.get("self")
        if type(found).__name__ in names:
            return found
    return None
