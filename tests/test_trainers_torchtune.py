"""torchtune's own collator and recipe steps on the packs of `export --to torchtune`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtune", reason="run by scripts/test-trainers torchtune")

import torch  # noqa: E402
from torchtune.data import padded_collate_packed  # noqa: E402
from trainer_proofs import Given, after, assert_same_loss, exported, packs_of_demo  # noqa: E402

from padless.runtime.reader import PackedReader  # noqa: E402
from padless.runtime.trainers.torchtune import PackedFolder  # noqa: E402


def test_its_packed_collator_and_its_recipes_shift_train_what_was_packed(tmp_path: Path) -> None:
    packed = packs_of_demo(tmp_path)
    data = PackedFolder(source=str(exported(packed, "torchtune")))
    assert len(data) == len(PackedReader(packed))
    rows = []
    for item in (data[number] for number in range(len(data))):
        batch = padded_collate_packed([item])
        mask = batch["mask"]  # of booleans where it does not use FlexAttention
        assert mask.dtype == torch.bool
        rows.append(
            Given(
                input_ids=batch["tokens"][0],
                # Recipes of this release take labels of each token and shift them by one.
                next_labels=after(batch["labels"][0]),
                position_ids=batch["input_pos"][0],
                attention_mask=torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[:, None],
            )
        )
    assert_same_loss("torchtune", "`--to torchtune`, our component, its collator", packed, rows)
