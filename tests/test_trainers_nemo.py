"""Megatron-Bridge's own data sets read what `export --to nemo` wrote, configured as its README says.

Importing `megatron.bridge` imports all of its models, and through them kernels that need a GPU. So the
packages whose `__init__` does that are entered without running it; the modules below them are its own.
"""

from __future__ import annotations

import sys
import types
import typing
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

try:
    BRIDGE = distribution("megatron-bridge")
except PackageNotFoundError:
    pytest.skip("run by scripts/test-trainers nemo", allow_module_level=True)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import typing_extensions  # noqa: E402
from building import MAX_LENGTH  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from trainer_proofs import Given, assert_same_loss, exported, packs_of_demo, places  # noqa: E402

from padless.runtime.reader import PackedReader  # noqa: E402

if not hasattr(typing, "override"):  # of Python 3.12, which its wheels ask for
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
for _name in ("", ".data", ".data.builders", ".models", ".models.hf_pretrained"):
    _package = types.ModuleType(f"megatron.bridge{_name}")
    _package.__path__ = [str(BRIDGE.locate_file(f"megatron/bridge{_name.replace('.', '/')}"))]
    sys.modules[_package.__name__] = _package

from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder, GPTSFTDatasetConfig  # noqa: E402
from megatron.bridge.data.packing import PackedSequenceSpecs  # noqa: E402
from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset  # noqa: E402
from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer  # noqa: E402


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_of_demo(tmp_path_factory.mktemp("nemo"))


def training_data(packed: Path, out: Path, **more: Any) -> Any:
    """What Bridge's builder makes of the export."""
    config = GPTSFTDatasetConfig(
        seq_length=MAX_LENGTH,
        dataset_root=out,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_train_data_path=str(out),
            packed_metadata_path=str(out / "metadata.json"),
            packed_sequence_size=MAX_LENGTH,
            pad_cu_seqlens=bool(more),
        ),
        do_validation=False,
        do_test=False,
        dataset_kwargs=more or None,
    )
    tokenizer = HuggingFaceTokenizer(str(packed / "tokenizer"))
    data, *_ = GPTSFTDatasetBuilder(config, tokenizer=tokenizer).build()
    assert isinstance(data, GPTSFTPackedParquetDataset)
    return data


def given(batch: dict[str, Any]) -> list[Given]:
    """The rows of a batch of Bridge's, each up to the end of its last sequence."""
    rows = []
    for row, count in enumerate(batch["token_count"]):
        lengths = batch["cu_seqlens_q"][row].diff()
        lengths = lengths[lengths.cumsum(0) <= count]  # the rest is filled up
        positions = batch["position_ids"][row, :count]
        assert torch.equal(positions, places(lengths.tolist())) and batch["attention_mask"] is None
        assert batch["max_seqlen_q"][row] >= lengths.max()
        trained = batch["loss_mask"][row, :count] != 0
        rows.append(
            Given(
                input_ids=batch["tokens"][row, :count],
                next_labels=torch.where(trained, batch["labels"][row, :count], -100),
                position_ids=positions,
            )
        )
        assert not batch["loss_mask"][row, count:].any()
    return rows


@pytest.mark.parametrize(
    ("how", "more", "batch_size"),
    [
        ("its packed data set and collator", {}, 1),
        ("the same with `pad_cu_seqlens`, several rows", {"pad_to_max_length": True}, 4),
    ],
    ids=["plain", "static shapes"],
)
def test_its_batches_train_what_was_packed(
    packed: Path, tmp_path: Path, how: str, more: dict[str, Any], batch_size: int
) -> None:
    link = tmp_path / "packed"
    link.symlink_to(packed)
    data = training_data(packed, exported(link, "nemo"), **more)
    assert len(data) == len(PackedReader(packed))
    rows: list[Given] = []
    for batch in DataLoader(data, batch_size=batch_size, collate_fn=data.collate_fn):
        if more:
            assert batch["tokens"].shape[1] == MAX_LENGTH
        rows += given(batch)
    assert_same_loss("megatron-bridge", f"`--to nemo`, {how}", packed, rows)


def test_its_rows_hold_what_it_asks_of_them(packed: Path, tmp_path: Path) -> None:
    link = tmp_path / "packed"
    link.symlink_to(packed)
    data = training_data(packed, exported(link, "nemo"))
    for number in range(len(data)):
        row = data[number]
        starts = row["seq_boundaries"][:-1]
        data.validate_row(number, row["input_ids"], row["loss_mask"], starts)
        assert np.diff(row["seq_boundaries"]).tolist() == PackedReader(packed)[number].seq_lengths.tolist()


def test_targets_that_it_drops_are_counted_before(tmp_path: Path) -> None:
    """It trains nothing behind an end token, whatever the mask says."""
    packed = packs_of_demo(tmp_path, "--train-on", "all")
    data = training_data(packed, exported(packed, "nemo"))
    rows = [row for batch in DataLoader(data, collate_fn=data.collate_fn) for row in given(batch)]
    trained = sum(int((row.next_labels != -100).sum()) for row in rows)
    lines = (tmp_path / "nemo" / "README.md").read_text().splitlines()
    (note,) = [line for line in lines if "behind" in line]
    targets = sum(int((pack.labels != -100).sum()) for pack in PackedReader(packed))
    assert note.startswith(f"- {targets - trained:,} of {targets:,} trained tokens")
