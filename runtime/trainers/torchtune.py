"""Packs as a torchtune dataset component: `pack-dataset export --to torchtune` writes its rows.

dataset:
  _component_: padless.runtime.trainers.torchtune.PackedFolder
  source: exported
  packed: True

Exported labels are those of the next token. The recipes up to 0.6 shift labels themselves, later ones leave
that to the data set; which of the two is installed is seen from torchtune's own data sets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from padless.runtime.format import IGNORE_INDEX


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
        self._shifted_by_recipe = _recipes_shift()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = {name: torch.tensor(values) for name, values in self._rows[index].items()}
        if self._shifted_by_recipe:  # a sequence's last label is -100, so none comes to the next one's start
            item["labels"] = torch.cat([torch.tensor([IGNORE_INDEX]), item["labels"][:-1]])
        return item


def _recipes_shift() -> bool:
    """Whether torchtune's own data sets leave labels where their tokens are; False without torchtune."""
    try:
        import torchtune  # noqa: F401
    except ImportError:
        return False
    from torchtune.datasets._sft import SFTTransform

    seen = SFTTransform(model_transform=lambda sample: {"tokens": [1, 2], "mask": [False, False]})({})
    return [int(label) for label in seen["labels"]] == [1, 2]
