"""Packs as a torchtune dataset component: `pack-dataset export --to torchtune` writes its rows.

dataset:
  _component_: padless.runtime.trainers.torchtune.PackedFolder
  source: exported
  packed: True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class PackedFolder(Dataset[dict[str, Tensor]]):
    """Items as torchtune's packed collator takes them: int64 tensors by name."""

    def __init__(self, tokenizer: Any = None, *, source: str, packed: bool = True) -> None:
        """`source`, the exported folder. The recipe passes its tokenizer, and reads `packed` as well.

        Raises ValueError where `packed` is False: the rows are packs, and another collator would let
        their sequences see each other.
        """
        from datasets import load_from_disk

        if not packed:
            raise ValueError("packed is False and these rows are packs: set packed: True")
        self._rows = load_from_disk(source)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.tensor(values) for name, values in self._rows[index].items()}
