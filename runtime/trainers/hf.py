"""transformers' Trainer on packs: `PadlessCollator`, and through it whatever is built on Trainer (PEFT, ...).

    Trainer(
        model,
        TrainingArguments(..., per_device_train_batch_size=8, remove_unused_columns=False),
        train_dataset=PackedDataset("packed"),         # or datasets.load_from_disk("packed")
        data_collator=PadlessCollator(),
    )

A batch is one row, however many packs: with two rows and position_ids alone, FlashAttention would take
each row for one sequence. There is no attention mask: of ones, it would let sequences see each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from padless.runtime.batch import Pack
from padless.runtime.collate import collate
from padless.runtime.errors import CollateError
from padless.runtime.schema import ColumnInfo


class PadlessCollator:
    """Packs to what a model's forward takes, and nothing else; may be pickled to loader workers."""

    def __init__(self, *, columns: Iterable[ColumnInfo] = ()) -> None:
        """`columns`, the manifest's, where rows of `load_from_disk` hold further ones."""
        self.columns = tuple(columns)

    def __call__(self, packs: Sequence[Pack | Mapping[str, Any]]) -> dict[str, Any]:
        """[1, T] tensors by name; see VarlenBatch.model_inputs.

        Raises CollateError for rows that are no packs: boundaries are never guessed.
        """
        for row in packs:
            if not isinstance(row, Pack) and "attention_mask" in row:
                raise CollateError(
                    "a row has an attention_mask: padded rows are no packs, and a mask of ones would let the "
                    "sequences of a pack see each other; give the rows of a packed folder as they are"
                )
        return collate(packs, columns=self.columns).model_inputs()
