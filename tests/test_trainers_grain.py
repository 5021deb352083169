"""grain reads the export made for it as a random-access source."""

from __future__ import annotations

from pathlib import Path

import pytest

grain = pytest.importorskip("grain", reason="run by scripts/test-trainers grain")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from datasets import load_from_disk  # noqa: E402
from trainer_proofs import Given, assert_same_loss, exported, packs_of_demo  # noqa: E402

from padless.runtime.reader import PackedReader  # noqa: E402


def test_batches_of_grain_train_what_was_packed(tmp_path: Path) -> None:
    packed = packs_of_demo(tmp_path)
    source = load_from_disk(str(exported(packed, "torchtitan"))).with_format("numpy")
    batches = list(grain.MapDataset.source(source).shuffle(seed=0).batch(2, drop_remainder=False))
    assert sum(len(batch["input_ids"]) for batch in batches) == len(PackedReader(packed))
    rows = []
    for batch in batches:
        for ids, labels, positions, segments in zip(
            *(batch[name] for name in ("input_ids", "labels", "positions", "segment_ids")), strict=True
        ):
            starts = positions == 0
            assert np.array_equal(np.diff(segments) != 0, starts[1:])
            rows.append(Given(
                input_ids=torch.tensor(ids), next_labels=torch.tensor(labels),
                position_ids=torch.tensor(positions),
            ))  # fmt: skip
    assert_same_loss("grain", "`--to torchtitan`, its `MapDataset`, shuffled, in batches", packed, rows)
