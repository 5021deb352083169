"""Tokens that others wrote: an export is read back to the token, and files that do not fit are told."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import TOKENIZER, build, pack, sequence_table, sequences_of, write_lines
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from packed import Folder, Seq, write_folder
from test_export import folders

from padless.packer import PackConfig, pack_dataset
from padless.packer.export import ExportConfig, export

Documents = list[list[int]]
SOME = [[1, 2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("to", ["unpacked", "axolotl", "nemo", "olmo-core"])
def test_what_is_exported_and_packed_again_is_the_same(
    to: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @given(folders(masked=True), st.sampled_from(["uint16", "int32"]), st.sampled_from([1, 2**20]))
    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(folder: Folder, id_type: str, shard_size: int) -> None:
        root = tmp_path_factory.mktemp("again")
        write_folder(root / "packed", replace(folder, id_type=id_type))
        export(
            ExportConfig(folder=str(root / "packed"), to=to, output=str(root / "out"), shard_size=shard_size)
        )
        trained = {
            number: (seq.tokens, seq.labels())
            for number, seq in enumerate(seq for row in folder.packs for seq in row)
            if set(seq.labels()) != {-100}  # others are left out of a build, and counted
        }
        assume(trained)
        pack_dataset(
            PackConfig(
                sources=(str(root / "out"),), tokenizer=str(TOKENIZER), max_length=16, max_drop_share=1,
                output=str(root / "again"),
            )
        )  # fmt: skip
        assert sequences_of(root / "again") == trained

    check()


def write_ds(
    folder: Path, documents: Documents, *, dtype: str = "<u2", loss: list[int] | None = None
) -> Path:
    """As datatrove's TokenizedFile: tokens, ends as 64-bit numbers, a byte a token."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "00000_shuffled.ds"
    np.array(sum(documents, []), dtype=dtype).tofile(path)
    np.cumsum([len(document) for document in documents]).astype("<u8").tofile(f"{path}.index")
    if loss is not None:
        np.array(loss, dtype=np.uint8).tofile(f"{path}.loss")
    return path


def write_npy(folder: Path, documents: Documents) -> Path:
    """As OLMo-core's tools: bare tokens, and lines of start and end with what else there is to say."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "token_ids_part_0000.npy"
    np.array(sum(documents, []), dtype="<u4").tofile(path)
    ends = np.cumsum([len(document) for document in documents]).tolist()
    lines = [f"{end - len(d)},{end},id-{end},x\n" for end, d in zip(ends, documents, strict=True)]
    (folder / "token_ids_part_0000.csv.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return path


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_datatroves_files_are_documents_with_their_masks(dtype: str, tmp_path: Path) -> None:
    path = write_ds(tmp_path, SOME, dtype=dtype, loss=[1, 1, 0, 1, 1, 0, 1])
    assert build(path, tmp_path / "out").code == 0
    assert sequences_of(tmp_path / "out") == {
        0: ([1, 2, 3], [-100, 2, -100]), 1: ([4, 5], [-100, 5]), 2: ([6, 7], [-100, 7])
    }  # fmt: skip


def test_olmos_files_without_a_mask_are_trained_whole(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "data", SOME)
    assert build(path, tmp_path / "out").code == 0
    assert sequences_of(tmp_path / "out")[0] == ([1, 2, 3], [-100, 2, 3])


def test_a_folder_of_token_files_is_read_without_what_lies_beside(tmp_path: Path) -> None:
    """Boundaries and masks are of the tokens, and arrays of somebody else's are nobody's tokens."""
    write_npy(tmp_path / "data", SOME)
    np.save(tmp_path / "data" / "embeddings.npy", np.zeros(3))
    np.ones(7, dtype=np.bool_).tofile(tmp_path / "data" / "labels_mask_part_0000.npy")
    assert build(tmp_path / "data", tmp_path / "out").code == 0
    assert len(sequences_of(tmp_path / "out")) == 3


def test_many_documents_are_cut_into_chunks_in_their_order(tmp_path: Path) -> None:
    documents = [[1 + n % 2000] * (2 + n % 7) for n in range(10_000)]
    path = write_ds(tmp_path, documents)
    assert build(path, tmp_path / "out", "--workers", 2).code == 0
    assert sequence_table(tmp_path / "out")["length"] == [len(document) for document in documents]
    assert [ids for _, (ids, _) in sorted(sequences_of(tmp_path / "out").items())] == documents


def test_another_mask_is_another_source(tmp_path: Path) -> None:
    path = write_ds(tmp_path, SOME, loss=[1] * 7)
    assert build(path, tmp_path / "out").code == 0
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    assert build(path, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    write_ds(tmp_path, SOME, loss=[1, 1, 0, 1, 1, 1, 1])
    run = build(path, tmp_path / "out")
    assert run.code == 2 and "has changed" in run.err


def no_bounds(path: Path) -> None:
    Path(f"{path}.index").unlink()


def short_tokens(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def short_mask(path: Path) -> None:
    Path(f"{path}.loss").write_bytes(b"\1")


def falling(path: Path) -> None:
    np.array([5, 3, 7], dtype="<u8").tofile(f"{path}.index")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (no_bounds, "does not guess them"),
        (short_tokens, "neither 2 nor 4 each"),
        (short_mask, "one byte a token"),
        (falling, "do not go up"),
    ],
)
def test_files_that_do_not_fit_are_told(harm: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    path = write_ds(tmp_path, SOME)
    harm(path)
    run = build(path, tmp_path / "out")
    assert run.code == 2 and words in run.err and not (tmp_path / "out").exists()


def test_a_numpy_header_is_not_taken_for_tokens(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "data", SOME)
    np.save(path, np.array([1, 2, 3, 4, 5, 6, 7], dtype=np.uint16))
    run = build(path, tmp_path / "out")
    assert run.code == 2 and "tofile" in run.err


@pytest.mark.parametrize("lines", ["start,end\n0,3\n", "0,3\n4,7\n", "words\n"])
def test_boundaries_that_are_none_are_told(lines: str, tmp_path: Path) -> None:
    path = write_npy(tmp_path / "data", SOME)
    (tmp_path / "data" / "token_ids_part_0000.csv.gz").write_bytes(gzip.compress(lines.encode()))
    run = build(path, tmp_path / "out")
    assert run.code == 2 and "token_ids_part_0000.csv.gz" in run.err


def test_ids_that_the_tokenizer_has_not_are_told(tmp_path: Path) -> None:
    run = build(write_ds(tmp_path, [[70_000, 1]], dtype="<u4"), tmp_path / "out")
    assert run.code == 2 and "70000" in run.err


def write_nemo(
    path: Path, starts: list[list[int]], mask: list[list[int]] | None = None, kind: pa.DataType | None = None
) -> Path:
    rows = [[1, 2, 3, 4, 7], [5, 6]]
    table = {
        "input_ids": pa.array(rows, pa.list_(pa.int32())),
        "loss_mask": pa.array(mask or [[1] * 5, [1] * 2]).cast(pa.list_(kind or pa.int8())),
        "seq_start_id": pa.array(starts, pa.list_(pa.int32())),
    }
    pq.write_table(pa.table(table), path)
    return path


@pytest.mark.parametrize("kind", [pa.int8(), pa.bool_(), pa.float32()], ids=str)
def test_nemos_mask_goes_back_to_the_token_that_is_predicted(kind: pa.DataType, tmp_path: Path) -> None:
    path = write_nemo(tmp_path / "a.parquet", [[0, 2], [0]], [[1, 0, 0, 1, 0], [1, 0]], kind)
    assert build(path, tmp_path / "out").code == 0
    assert sequences_of(tmp_path / "out") == {
        0: ([1, 2], [-100, 2]), 1: ([3, 4, 7], [-100, -100, 7]), 2: ([5, 6], [-100, 6])
    }  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "mask"),
    [
        ([[1], [0]], None),
        ([[0, 5], [0]], None),
        ([[0, 3, 2], [0]], None),
        ([[], [0]], None),
        ([[0], [0]], [[1] * 3, [1] * 3]),
    ],
    ids=["no start", "at the end", "falling", "no segment", "short mask"],
)
def test_packs_of_nemo_that_contradict_themselves_are_told(
    starts: list[list[int]], mask: list[list[int]] | None, tmp_path: Path
) -> None:
    run = build(write_nemo(tmp_path / "a.parquet", starts, mask), tmp_path / "out")
    assert run.code == 2 and "a.parquet: a pack's" in run.err


@pytest.mark.parametrize("kind", [pa.int8(), pa.bool_()], ids=str)
def test_a_mask_of_nemo_with_nulls_is_told(kind: pa.DataType, tmp_path: Path) -> None:
    mask: Any = [[1, None, 0, 1, 0], [1, 0]]
    run = build(write_nemo(tmp_path / "a.parquet", [[0], [0]], mask, kind), tmp_path / "out")
    assert run.code == 2 and "loss_mask has nulls" in run.err


def test_packs_from_elsewhere_are_still_no_records(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}]
    run = pack(
        *("build", write_lines(tmp_path / "a.jsonl", rows), "--tokenizer", TOKENIZER),
        *("--max-length", 8, "--output", tmp_path / "out"),
    )
    assert run.code == 2 and "repack" in run.err


@pytest.mark.parametrize("to", ["llamafactory", "automodel", "torchtitan", "torchtune", "parquet"])
def test_exports_whose_rows_are_packs_are_not_taken_for_sequences(to: str, tmp_path: Path) -> None:
    packs = [[Seq([1, 2, 3]), Seq([4, 5])], [Seq([6, 7, 8, 9])]]
    tokens = {"tokenizer.json": (TOKENIZER / "tokenizer.json").read_bytes()}
    write_folder(tmp_path / "packed", Folder(packs=packs, tokenizer=tokens))
    export(ExportConfig(folder=str(tmp_path / "packed"), to=to, output=str(tmp_path / "out")))
    run = build(tmp_path / "out", tmp_path / "again")
    assert run.code == 2 and not (tmp_path / "again" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"position_ids": [0, 1, 0, 1]}, "position_ids begins anew at place 2"),
        ({"position_ids": [3, 4, 5, 6]}, "position_ids has 3 at place 0"),
        ({"position_ids": [0, 1, 2, 4]}, "position_ids has 4 at place 3"),
        ({"attention_mask": [1, 1, 2, 2]}, "numbers the sequences of a pack"),
        ({"attention_mask": [1, 1, 1, 0]}, "the row is filled up"),
        ({"attention_mask": [0, 1, 1, 1]}, "attention_mask has 0 at place 0"),
        ({"segment_ids": [1, 1, 2, 2]}, "segment_ids has several numbers"),
        ({"seq_idx": [0, 0, 0, 1]}, "seq_idx has several numbers"),
        ({"seq_start_id": [0, 2]}, "seq_start_id has 2 entries"),
        ({"cu_seqlens": [0, 2, 4]}, "cu_seqlens has 3 entries"),
        ({"image_grid_thw": [[1, 2, 2]]}, "image_grid_thw says that some of its ids stand for images"),
        ({"video_grid_thw": [[1, 2, 2]], "image_grid_thw": []}, "video_grid_thw says that some of its"),
    ],
)
def test_rows_of_several_sequences_with_padding_or_with_images_are_told(
    columns: dict[str, list[Any]], message: str, tmp_path: Path
) -> None:
    run = build(write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7, 8], **columns}]), tmp_path / "out")
    assert run.code == 2 and message in run.err


def test_answers_of_pairs_are_not_taken_for_records_of_their_own(tmp_path: Path) -> None:
    """They would be packed without their margin, and apart from the answer that they are compared with."""
    pair = {"prompt": "hi", "chosen": "yo", "rejected": "no", "margin": 0.5}
    assert build(write_lines(tmp_path / "a.jsonl", [pair]), tmp_path / "packed").code == 0
    export(ExportConfig(folder=str(tmp_path / "packed"), to="unpacked", output=str(tmp_path / "rows")))
    run = build(tmp_path / "rows", tmp_path / "again")
    assert run.code == 2 and "one answer of a pair" in run.err and "repack" in run.err
    assert not (tmp_path / "again" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "hi", "completion": "no", "label": False}, "label"),
        ({"prompt_ids": [9, 8], "response_ids": [7, 6], "advantages": -1.5}, "advantages"),
    ],
)
def test_rated_answers_and_rollouts_are_not_taken_for_answers_to_learn(
    row: dict[str, Any], column: str, tmp_path: Path
) -> None:
    assert build(write_lines(tmp_path / "a.jsonl", [row]), tmp_path / "packed").code == 0
    export(ExportConfig(folder=str(tmp_path / "packed"), to="unpacked", output=str(tmp_path / "rows")))
    run = build(tmp_path / "rows", tmp_path / "again", "--format", "tokenized")
    assert run.code == 2 and f"{column} says how good the answer is" in run.err and "repack" in run.err


def test_labels_that_are_no_verdicts_are_left_out_by_name(tmp_path: Path) -> None:
    """Of a text that is classified, say: the refusal names the option, and the option helps."""
    source = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "label": 3}])
    refused = build(source, tmp_path / "packed", "--format", "tokenized")
    assert refused.code == 2 and "--column label=" in refused.err
    assert build(source, tmp_path / "packed", "--format", "tokenized", "--column", "label=").code == 0
    assert [ids for ids, _ in sequences_of(tmp_path / "packed").values()] == [[5, 6, 7]]
    named = write_lines(tmp_path / "b.jsonl", [{"input_ids": [5, 6, 7], "is_good": False}])
    run = build(named, tmp_path / "other", "--format", "tokenized", "--column", "label=is_good")
    assert run.code == 2 and "is_good says how good the answer is" in run.err


@pytest.mark.parametrize("name", ["assistant_mask", "labels_mask"])
def test_masks_of_other_names_are_not_passed_over(name: str, tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], name: [0, 0, 1]}
    source = write_lines(
        tmp_path / "a.jsonl", [row, {"input_ids": [5, 6, 7], "special_tokens_mask": [1, 0, 0]}]
    )
    refused = build(source, tmp_path / "packed", "--format", "tokenized")
    assert refused.code == 2 and f"{name} seems" in refused.err and f"loss_mask={name}" in refused.err
    for named, labels in ((name, [-100, -100, 7]), ("", [-100, 6, 7])):
        words = ("--format", "tokenized", "--column", f"loss_mask={named}", "--limit", 1)
        assert build(source, tmp_path / f"packed-{named}", *words).code == 0
        assert [*sequences_of(tmp_path / f"packed-{named}").values()] == [([5, 6, 7], labels)]


def test_tokens_are_trained_that_all_masks_train_as_in_trl(tmp_path: Path) -> None:
    masks = {"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    assert (
        build(
            write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7, 8], **masks}]), tmp_path / "out"
        ).code
        == 0
    )
    assert sequences_of(tmp_path / "out") == {0: ([5, 6, 7, 8], [-100, 6, -100, 8])}


def test_masks_positions_and_boundaries_of_one_sequence_say_nothing(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2]}
    row |= {"segment_ids": [1, 1, 1], "seq_start_id": [0], "cu_seqlens": [0, 3]}
    assert build(write_lines(tmp_path / "a.jsonl", [row]), tmp_path / "out").code == 0
    assert sequences_of(tmp_path / "out") == {0: ([5, 6, 7], [-100, 6, 7])}
