"""Megatron-core's own indexed data set reads what `export --to megatron` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

indexed = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="run by scripts/test-trainers megatron"
)

import torch  # noqa: E402
from trainer_proofs import Given, assert_same_loss, exported, packs_of_demo, places, sequences_of  # noqa: E402


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_of_demo(tmp_path_factory.mktemp("megatron"), "--train-on", "all")


@pytest.mark.parametrize("mmap", [True, False])
def test_indexed_dataset_gives_every_sequence_as_a_document(packed: Path, mmap: bool) -> None:
    prefix = str(exported(packed, "megatron") / "packed_text_document")
    assert indexed.IndexedDataset.exists(prefix)
    dataset = indexed.IndexedDataset(prefix, mmap=mmap)
    want = sequences_of(packed)
    assert len(dataset) == len(want) and dataset.document_indices.tolist() == [*range(len(want) + 1)]
    assert [dataset[number].tolist() for number in range(len(dataset))] == [ids for ids, _ in want]


def test_documents_in_a_row_with_positions_from_zero_have_the_loss_of_the_packs(packed: Path) -> None:
    """As `reset_position_ids` and `eod_mask_loss` have them: boundaries are those of the index."""
    dataset = indexed.IndexedDataset(str(exported(packed, "megatron") / "packed_text_document"))
    ids = [torch.from_numpy(dataset[number].astype("int64")) for number in range(len(dataset))]
    wanted = [torch.cat([one[1:], torch.tensor([-100])]) for one in ids]
    row = Given(
        input_ids=torch.cat(ids),
        next_labels=torch.cat(wanted),
        position_ids=places(dataset.sequence_lengths.tolist()),
    )
    assert_same_loss("megatron-core", "`--to megatron`, its `IndexedDataset`", packed, [row])
