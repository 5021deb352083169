"""NeMo Automodel's own collater for prepacked rows on `export --to automodel`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nemo_automodel", reason="run by scripts/test-trainers automodel")

import torch  # noqa: E402
from datasets import load_from_disk  # noqa: E402
from nemo_automodel.components.datasets.utils import packed_sequence_thd_collater  # noqa: E402
from trainer_proofs import Given, assert_same_loss, exported, packs_of_demo, places  # noqa: E402


def test_its_thd_collater_gives_what_was_packed(tmp_path: Path) -> None:
    packed = packs_of_demo(tmp_path)
    data = load_from_disk(str(exported(packed, "automodel")))
    batch = packed_sequence_thd_collater(list(data))
    assert batch["qkv_format"] == "thd" and len(batch["input_ids"]) == len(data)
    rows = []
    for row in range(len(data)):
        lengths, padded = (batch[name][row] for name in ("seq_lens", "seq_lens_padded"))
        lengths, padded = lengths[lengths > 0], padded[padded > 0]  # the rest is -1000
        assert int(padded.sum()) == batch["input_ids"].shape[1]
        used = int(lengths.sum())
        assert torch.equal(batch["position_ids"][row, :used], places(lengths.tolist()))
        rows.append(
            Given(
                input_ids=batch["input_ids"][row, :used],
                next_labels=batch["labels"][row, :used],
                position_ids=batch["position_ids"][row, :used],
            )
        )
    assert_same_loss("nemo-automodel", "`--to automodel`, its THD collater", packed, rows)
