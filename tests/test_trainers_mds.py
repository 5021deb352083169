"""MosaicML streaming's own reader gives back what `export --to mds` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# streaming imports torchvision for data sets of pictures. PyPI has it for GPUs alone; its operators do not
# load beside a torch for CPUs, and its import fails at those that it misses.
_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

streaming = pytest.importorskip("streaming", reason="run by scripts/test-trainers mds")

import numpy as np  # noqa: E402
from building import pack  # noqa: E402
from test_export import weighted  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from trainer_proofs import Given, after, assert_same_loss, exported, packs_of_demo  # noqa: E402

from padless.packer.export import check_export  # noqa: E402
from padless.runtime.collate import collate  # noqa: E402
from padless.runtime.reader import PackedReader  # noqa: E402


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_of_demo(tmp_path_factory.mktemp("mds"))


@pytest.mark.parametrize("shard_size", [2**30, 2**14])
def test_streaming_dataset_gives_the_packs_in_their_order(
    packed: Path, tmp_path: Path, shard_size: int
) -> None:
    link = tmp_path / "packed"
    link.symlink_to(packed)
    out = exported(link, "mds", "--shard-size", shard_size)
    assert check_export(str(out)) == []
    dataset = streaming.StreamingDataset(local=str(out), shuffle=False, batch_size=1)
    assert (len(list(out.glob("shard.*.mds"))) > 1) is (shard_size < 2**20)
    reader = PackedReader(packed)
    assert dataset.size == len(reader)
    for sample, row in zip((dataset[n] for n in range(dataset.size)), reader, strict=True):
        for name in ("input_ids", "labels", "seq_lengths", "sequence_ids"):
            assert np.array_equal(sample[name], getattr(row, name)), name


def test_its_loader_and_our_collate_train_what_was_packed(packed: Path) -> None:
    dataset = streaming.StreamingDataset(local=str(exported(packed, "mds")), shuffle=True, batch_size=1)
    batches = list(DataLoader(dataset, batch_size=1, collate_fn=collate))
    assert len(batches) == len(PackedReader(packed))
    rows = [
        Given(
            input_ids=batch["input_ids"][0],
            next_labels=after(batch["labels"][0]),
            position_ids=batch["position_ids"][0],
        )
        for batch in batches
    ]
    assert_same_loss("mosaicml-streaming", "`--to mds`, its `StreamingDataset` in a DataLoader", packed, rows)


def test_weights_that_labels_cannot_say_are_refused(tmp_path: Path) -> None:
    folder = weighted(tmp_path / "packed", [[0, 1, 1], [0, 1, 0.5]])
    run = pack("export", folder, "--to", "mds", "--output", tmp_path / "out")
    assert run.code == 2 and "weighs 0.5" in run.err
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_leftovers_of_a_killed_run_are_no_matter(packed: Path, tmp_path: Path) -> None:
    left = tmp_path / ".out.export" / "mds"
    left.mkdir(parents=True)
    (left / "shard.00000.mds").write_bytes(b"half")
    assert pack("export", packed, "--to", "mds", "--output", tmp_path / "out").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(path.is_file() for path in (tmp_path / "out").iterdir())
