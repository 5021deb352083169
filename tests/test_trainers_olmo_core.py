"""OLMo-core's own data sets read what `export --to olmo-core` wrote: documents, masks and boundaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("olmo_core", reason="run by scripts/test-trainers olmo-core")

import torch  # noqa: E402
from building import MAX_LENGTH, TOKENIZER, write_lines  # noqa: E402
from building import pack as run_pack  # noqa: E402
from olmo_core.data import NumpyPackedFSLDatasetConfig, TokenizerConfig  # noqa: E402
from olmo_core.data.numpy_dataset import NumpyDatasetBase  # noqa: E402
from olmo_core.data.utils import get_labels  # noqa: E402
from trainer_proofs import Given, assert_same_loss, exported, packs_of_demo, places, sequences_of  # noqa: E402


def opened(folder: Path, work: Path, length: int, **options: Any) -> NumpyDatasetBase:
    """The data set as the export's README makes it."""
    dataset = NumpyPackedFSLDatasetConfig(
        tokenizer=TokenizerConfig(vocab_size=4096, eos_token_id=0, pad_token_id=0),
        paths=[f"{folder}/token_ids_part_*.npy"],
        label_mask_paths=[f"{folder}/labels_mask_part_*.npy"],
        expand_glob=True,
        sequence_length=length,
        generate_doc_lengths=True,
        use_array_if_local=False,
        work_dir=str(work),
        **options,
    ).build()
    dataset.prepare()
    return dataset


def documents(dataset: NumpyDatasetBase) -> list[tuple[list[int], list[int]]]:
    """Ids and unshifted labels of each document; what it fills rows up with has no label."""
    found = []
    for item in (dataset[number] for number in range(len(dataset))):
        labels = torch.where(item["label_mask"], item["input_ids"], -100)
        cuts = item["doc_lens"].tolist()
        found += zip(
            (part.tolist() for part in item["input_ids"].split(cuts)),
            (part.tolist() for part in labels.split(cuts)),
            strict=True,
        )
    return [(ids, labels) for ids, labels in found if set(labels) != {-100}]


def test_it_packs_every_document_again_with_its_labels(tmp_path: Path) -> None:
    packed = packs_of_demo(tmp_path)
    dataset = opened(exported(packed, "olmo-core"), tmp_path / "work", MAX_LENGTH)
    assert sorted(documents(dataset)) == sorted(sequences_of(packed))
    rows = []
    for item in (dataset[number] for number in range(len(dataset))):
        batch = {name: value[None] for name, value in item.items() if name != "metadata"}
        rows.append(
            Given(
                input_ids=item["input_ids"],
                next_labels=get_labels(batch)[0],
                position_ids=places(item["doc_lens"].tolist()),
            )
        )
    assert_same_loss("ai2-olmo-core", "`--to olmo-core`, its packed data set and `get_labels`", packed, rows)


def test_documents_without_an_end_token_stay_apart(tmp_path: Path) -> None:
    """A cut takes the end token away; by the end token it would join such a document to the next one."""
    source = write_lines(tmp_path / "a.jsonl", [{"text": "word " * n} for n in (40, 9, 30, 7)])
    words = ("--tokenizer", TOKENIZER, "--max-length", 16, "--overflow", "truncate")
    run = run_pack("build", source, *words, "--output", tmp_path / "packed")
    assert run.code == 0, run.err
    folder = exported(tmp_path / "packed", "olmo-core")
    assert "use_array_if_local=False" in (folder / "README.md").read_text()
    found = documents(opened(folder, tmp_path / "work", 16))
    assert sorted(found) == sorted(sequences_of(tmp_path / "packed"))
