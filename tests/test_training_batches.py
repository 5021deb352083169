"""The batches that padded and packed training are compared on: the same sequences in both forms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from packed import Folder, count_up, write_folder

sys.path.insert(0, str(ROOT / "scripts"))

import training_batches

LENGTHS = (9, 2, 5, 3, 7, 4, 6, 8, 2, 3, 5, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batches") / "packed"
    sequences = count_up(*LENGTHS)
    write_folder(path, Folder(packs=[sequences[:4], sequences[4:8], sequences[8:]], max_length=32))
    return path


def test_sequences_are_those_of_the_packs(folder: Path) -> None:
    found = training_batches.sequences_of(folder)
    assert [ids.tolist() for ids, _ in found] == [[k + 1] * n for k, n in enumerate(LENGTHS)]
    assert all(labels[0] == -100 and (labels[1:] == ids[1:]).all() for ids, labels in found)


def test_padded_rows_are_what_transformers_collator_gives(folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sequences = training_batches.sequences_of(folder)[:4]
    batch = training_batches.padded(sequences, "cpu")

    class Tokenizer:
        padding_side = "right"

        def pad(self, rows: Any, **_: Any) -> dict[str, torch.Tensor]:
            longest = max(len(row["input_ids"]) for row in rows)
            ids = [[*row["input_ids"], *[0] * (longest - len(row["input_ids"]))] for row in rows]
            mask = [[*[1] * len(row["input_ids"]), *[0] * (longest - len(row["input_ids"]))] for row in rows]
            return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    rows = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in sequences]
    theirs = transformers.DataCollatorForSeq2Seq(Tokenizer())(rows)
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(torch.as_tensor(theirs[name]), batch.inputs[name])


def test_a_packed_row_holds_the_padded_rows_tokens(folder: Path) -> None:
    sequences = training_batches.sequences_of(folder)[2:7]
    packed, padded = training_batches.packed(sequences, "cpu"), training_batches.padded(sequences, "cpu")
    assert packed.lengths == padded.lengths == list(LENGTHS[2:7])
    assert packed.tokens == packed.computed == padded.tokens < padded.computed
    assert packed.targets == padded.targets == sum(LENGTHS[2:7]) - 5
    for name in ("input_ids", "labels"):
        real = padded.inputs["attention_mask"].bool()
        assert torch.equal(padded.inputs[name][real], packed.inputs[name][0])


def test_every_sequence_is_drawn_once_and_groups_are_of_like_length(folder: Path) -> None:
    sequences = training_batches.sequences_of(folder)
    drawn, grouped = (training_batches.drawn(sequences, 3, grouped=like) for like in (False, True))
    for batches in (drawn, grouped):
        assert sorted(int(ids[0]) for batch in batches for ids, _ in batch) == list(range(1, 13))
    computed = [
        sum(training_batches.padded(batch, "cpu").computed for batch in batches)
        for batches in (drawn, grouped)
    ]
    assert computed[1] < computed[0]


def test_the_widest_batch_computes_most(folder: Path) -> None:
    batches = training_batches.drawn(training_batches.sequences_of(folder), 3, grouped=False)
    most = training_batches.padded(training_batches.widest(batches), "cpu").computed
    assert most == max(training_batches.padded(batch, "cpu").computed for batch in batches)


def test_a_stream_has_no_end_and_every_pack_in_each_pass(folder: Path) -> None:
    stream = training_batches.streamed(folder, 1, "cpu")
    passes = [sorted(next(stream).tokens for _ in range(3)) for _ in range(2)]
    stream.close()
    assert passes[0] == passes[1] == sorted(sum(LENGTHS[at : at + 4]) for at in (0, 4, 8))


def test_batches_of_a_few_shapes_keep_what_is_filled_up_apart(folder: Path) -> None:
    """And a shape's numbers hold for each of its batches."""
    import training_graph

    shapes = training_graph.shapes_of(folder, 1)
    stream = training_graph.of_few_shapes(folder, 1, "cpu")
    batches = [next(stream) for _ in range(2)]
    stream.close()
    # Packs of 19 and 14 tokens, where one has 25, are left out: that one comes in each pass.
    assert [batch.lengths for batch in batches] == [list(LENGTHS[4:8])] * 2
    for batch in batches:
        shape, inputs = shapes[batch.shape_number], batch.inputs
        assert batch.computed == shape["tokens"] == 128 and inputs["max_length_q"] == shape["max_length"]
        assert len(inputs["cu_seq_lens_q"]) == shape["sequences"] + 1
        assert inputs["cu_seq_lens_q"].diff().max() <= shape["max_length"]
        assert batch.targets == batch.tokens - 4 <= shape["targets"]
        assert batch.tokens == sum(batch.lengths) < batch.computed
        assert (inputs["labels"][0, batch.tokens :] == -100).all()


def test_shapes_go_from_few_sequences_to_many_and_the_last_fits_all(tmp_path: Path) -> None:
    import training_graph

    sequences = [count_up(*[n] * (24 // n)) for n in (2, 3, 4, 6, 8, 12)]
    write_folder(tmp_path / "packed", Folder(packs=sequences, max_length=24))
    shapes = training_graph.shapes_of(tmp_path / "packed", 2)
    assert [shape["sequences"] for shape in shapes] == [5, 7, 9, 13, 17, 25, 25]
    assert [shape["targets"] for shape in shapes] == [44, 42, 40, 36, 32, 24, 44]
    assert {shape["tokens"] for shape in shapes} == {256}
    stream = training_graph.of_few_shapes(tmp_path / "packed", 2, "cpu")
    batches = [next(stream) for _ in range(6)]
    stream.close()
    assert all(
        batch.tokens == 48 and batch.targets <= shapes[batch.shape_number]["targets"] for batch in batches
    )
