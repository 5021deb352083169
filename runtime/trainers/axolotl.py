"""Packs in Axolotl: a plugin that gives its trainer packed folders as they lie there, and the collator.

plugins:
  - padless.runtime.trainers.axolotl.PacksPlugin
datasets:
  - path: packed/train           # or path: packed, split: train
    type:                        # nothing: Axolotl asks for the key
test_datasets:                   # if there are any
  - path: packed/validation
    type:
micro_batch_size: 4              # packs
remove_unused_columns: false

Axolotl's own way with packed rows (`position_ids` beside a mask of ones) keeps sequences apart under
FlashAttention alone, and only where no row needs padding. Here a batch is one row without a mask, with all
boundaries, under whatever attention the model has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import BasePlugin
from axolotl.utils.trainer import calculate_total_num_steps

from padless.runtime.dataset import PackedDataset
from padless.runtime.trainers.hf import PadlessCollator

_PACK_AGAIN = ("sample_packing", "eval_sample_packing", "batch_flattening", "streaming")
_PASSED_OVER = ("type", "chat_template", "name", "data_files", "shards", "preprocess_shards")
"""Of an entry of `datasets`; Axolotl fills in others itself."""


class PacksCollator(PadlessCollator):
    """PadlessCollator, made as Axolotl makes collators."""

    def __init__(self, tokenizer: Any = None, **_: Any) -> None:
        """Neither the tokenizer nor the settings for padding are needed: nothing is padded."""
        super().__init__()


class PacksPlugin(BasePlugin):  # type: ignore[misc]
    """Axolotl takes the paths of its `datasets` for packed folders."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> TrainDatasetMeta:
        """The packs of `datasets`, and of `test_datasets` where there are any.

        Raises ValueError for settings under which Axolotl would pack packs once more, cut some off for an
        evaluation or drop their boundaries, for what an entry says beside a path and a split, for folders
        with further columns (weights, images), and what opening a packed folder raises.
        """
        for name in _PACK_AGAIN:
            if cfg.get(name):
                raise ValueError(f"{name} is set, and the data are packs already: set {name}: false")
        if cfg.get("val_set_size"):
            raise ValueError(
                "val_set_size is set, and would hold out whole packs: build with --eval-fraction, and give "
                "the folder's validation as test_datasets"
            )
        if cfg.get("remove_unused_columns") is not False:
            raise ValueError(
                "remove_unused_columns would take the boundaries away: set remove_unused_columns: false"
            )
        train = _packs(cfg.datasets)
        steps = calculate_total_num_steps(cfg, train)
        return TrainDatasetMeta(
            train_dataset=train,
            eval_dataset=_packs(cfg.test_datasets) if cfg.test_datasets else None,
            total_num_steps=min(steps, cfg.max_steps) if cfg.max_steps else steps,
        )

    def get_collator_cls_and_kwargs(
        self, cfg: Any, is_eval: bool = False
    ) -> tuple[type[PacksCollator], dict[str, Any]]:
        """The collator of packs."""
        return PacksCollator, {}


def _packs(entries: Sequence[Any]) -> Any:
    """One `datasets.Dataset` of the packs of all folders."""
    from datasets import concatenate_datasets

    return concatenate_datasets([_folder(entry) for entry in entries])


def _folder(entry: Any) -> Any:
    """The packs of one folder; ValueError for what this plugin or Axolotl's models would pass over."""
    path = entry["path"]
    if others := [name for name in _PASSED_OVER if entry.get(name)]:
        raise ValueError(
            f"{path} is a packed folder, for which {', '.join(others)} would be passed over: leave that out "
            "(a packed folder is tokenized, and taken whole)"
        )
    packs = PackedDataset(path, split=entry.get("split"))
    if further := [column.name for column in packs.reader.manifest.extras]:
        raise ValueError(
            f"{path} has the further columns {', '.join(further)}, which Axolotl's training does not look "
            "at: build it from records without what gives them, or train in a loop that uses them"
        )
    return packs.to_hf()
