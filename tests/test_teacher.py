"""A teacher's candidates stay with their tokens: through build, repack, plans, exports and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from building import assert_verified, build, built, files_of, pack, workers_in, write_lines
from toys import packed, refused, word_tokenizer

from padless.packer import buckets
from padless.runtime.collate import collate
from padless.runtime.reader import PackedReader

K = 3


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "words")


def taught(number: int, length: int, **more: Any) -> dict[str, Any]:
    """Every candidate and every number is another one, so that none can be where another should be."""
    ids = [10 + (number + place) % 80 for place in range(length)]
    return {
        "input_ids": ids,
        "teacher_ids": [[token, (token + number) % 100, place % 100] for place, token in enumerate(ids)],
        "teacher_logprobs": [
            [-(number + 1) / 64 - place / 8 - rank - 1 for rank in range(K)] for place in range(length)
        ],
    } | more


def weighed(number: int, length: int) -> dict[str, Any]:
    return taught(number, length, loss_weight=[0, *(0.25 * (1 + place % 3) for place in range(length - 1))])


ROWS = [taught(n, 2 + n % 11) for n in range(40)]
WEIGHED = [weighed(n, 2 + n % 11) for n in range(40)]


def check(folder: Path, rows: list[dict[str, Any]], plan: str | None = None) -> None:
    """Every stored token has its record's candidates (and weight, where it is trained)."""
    reader = PackedReader(folder, plan=plan)
    table = reader.sequence_columns("record", "start")
    seen = 0
    for one in reader:
        ends = np.cumsum(one.seq_lengths)
        for sequence, end, length in zip(one.sequence_ids, ends, one.seq_lengths, strict=True):
            row = rows[table["record"][sequence]]
            mine = slice(end - length, end)
            ids = one.input_ids[mine].tolist()
            begin = row["input_ids"].index(ids[0])
            there = slice(begin, begin + length)
            assert ids == row["input_ids"][there]
            assert one.extras["teacher_ids"][mine].tolist() == row["teacher_ids"][there]
            expected = np.array(row["teacher_logprobs"][there], dtype=np.float32)
            assert np.array_equal(one.extras["teacher_logprobs"][mine], expected)
            if "loss_weight" in row:
                weights = [0.0, *row["loss_weight"][there][1:]]
                assert one.extras["loss_weight"][mine].tolist() == weights
            seen += length
    assert seen == sum(len(row["input_ids"]) for row in rows)


@pytest.mark.parametrize("rows", [ROWS, WEIGHED], ids=["plain", "weighed"])
@pytest.mark.parametrize("way", ["threads", "processes"])
def test_candidates_and_weights_stay_with_their_tokens(
    rows: list[dict[str, Any]], way: str, words: Path, tmp_path: Path
) -> None:
    with workers_in(way):
        packed(tmp_path, rows, words, "--max-length", 32, "--workers", 2)
    check(tmp_path / "packed", rows)
    reader = PackedReader(tmp_path / "packed")
    kinds = {column.name: (column.level, column.type) for column in reader.manifest.extras}
    weight = {"loss_weight": ("token", "list<float32>")} if rows is WEIGHED else {}
    assert kinds == {
        **weight,
        "teacher_ids": ("token", f"list<fixed_size_list<int32, {K}>>"),
        "teacher_logprobs": ("token", f"list<fixed_size_list<float32, {K}>>"),
    }
    assert_verified(tmp_path / "packed")
    batch = collate(list(reader))
    assert batch["teacher_ids"].shape == batch["teacher_logprobs"].shape == (*batch["labels"].shape, K)


@pytest.mark.parametrize(
    "options", [("--strategy", "spread"), ("--strategy", "wrapped", "--overflow", "split")]
)
def test_a_repack_is_a_fresh_build_and_a_plan_reads_the_same(
    options: tuple[str, ...], words: Path, tmp_path: Path
) -> None:
    rows = ROWS if "wrapped" in options else WEIGHED  # masked records are not split
    packed(tmp_path, rows, words, "--max-length", 32)
    check(tmp_path / "packed", rows)
    shorter = ("--max-length", 16, *options)
    built(tmp_path / "rows.jsonl", tmp_path / "fresh", "--tokenizer", words, "--max-drop-share", 1, *shorter)
    check(tmp_path / "fresh", rows)
    run = pack("repack", tmp_path / "packed", "--output", tmp_path / "again", *shorter)
    assert run.code == 0, run.err
    assert files_of(tmp_path / "again") == files_of(tmp_path / "fresh")
    run = pack("repack", tmp_path / "packed", "--plan-only", "other", *shorter)
    assert run.code == 0, run.err
    check(tmp_path / "packed", rows, plan="other")


def test_a_store_in_buckets_and_compressed_shards_are_the_same(words: Path, tmp_path: Path) -> None:
    packed(tmp_path, WEIGHED, words, "--max-length", 32)
    source, options = tmp_path / "rows.jsonl", ("--tokenizer", words, "--max-length", 32)
    with mock.patch.object(buckets, "BUCKETS_FROM", 0):
        built(source, tmp_path / "buckets", *options, "--max-drop-share", 1)
    assert files_of(tmp_path / "buckets") == files_of(tmp_path / "packed")
    built(source, tmp_path / "zstd", *options, "--compression", "zstd")
    check(tmp_path / "zstd", WEIGHED)


@pytest.mark.parametrize("form", ["unpacked", "parquet"])
def test_exports_that_keep_columns_keep_the_candidates(form: str, words: Path, tmp_path: Path) -> None:
    packed(tmp_path, ROWS, words, "--max-length", 32)
    run = pack("export", tmp_path / "packed", "--to", form, "--output", tmp_path / "out")
    assert run.code == 0, run.err
    if form == "unpacked":
        rows = [
            row
            for file in sorted((tmp_path / "out").glob("**/*.arrow"))
            for row in pa.ipc.open_stream(file).read_all().to_pylist()
        ]
        found = {tuple(row["input_ids"]): row["teacher_ids"] for row in rows}
        assert found == {tuple(row["input_ids"]): row["teacher_ids"] for row in ROWS}
    else:
        import pyarrow.parquet as pq

        [file] = (tmp_path / "out").glob("**/*.parquet")
        stored = [len(one) for one in pq.read_table(file)["teacher_logprobs"].to_pylist()]
        assert sum(stored) == sum(len(row["input_ids"]) for row in ROWS)


def test_the_first_token_may_have_no_candidates(words: Path, tmp_path: Path) -> None:
    row = taught(0, 4)
    row["teacher_ids"][0] = row["teacher_logprobs"][0] = None
    packed(tmp_path, [row], words)
    [one] = PackedReader(tmp_path / "packed")
    assert one.extras["teacher_ids"][1:].tolist() == row["teacher_ids"][1:]
    assert one.extras["teacher_logprobs"][0].tolist() == [0.0] * K


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (taught(0, 3, teacher_logprobs=None), "it has teacher_ids and no teacher_logprobs"),
        (taught(0, 3, teacher_ids=[[1, 2, 3]] * 2), "teacher_ids has 2 entries for 3 input_ids"),
        (taught(0, 3, teacher_ids=[[1, 2, 3], [1], [2]]), "lists of equally many numbers"),
        (
            taught(0, 3, teacher_ids=[[1, 2]] * 3),
            "teacher_ids has 2 candidates a token and teacher_logprobs 3",
        ),
        (taught(0, 3, teacher_ids=[[1.5, 2, 3]] * 3), "teacher_ids must be whole numbers"),
        (taught(0, 3, teacher_ids=[[1, 2, 9999]] * 3), "teacher_ids has 9999, outside the tokenizer's ids"),
        (taught(0, 3, teacher_ids=[[1, 2, -1]] * 3), "teacher_ids has -1"),
        (taught(0, 3, teacher_logprobs=[[0.5, 0.2, 0.1]] * 3), "logarithms of probabilities"),
        (
            taught(0, 3, teacher_logprobs=[[0, 0, 0], [-1, -2, -3], [-0.25, -0.5, -4]]),
            "teacher_logprobs of token 2 add up to a probability of 1.404",
        ),
    ],
)
def test_candidates_that_cannot_be_meant_are_refused(
    row: dict[str, Any], message: str, words: Path, tmp_path: Path
) -> None:
    assert message in " ".join(refused(tmp_path, [row], words).split())


def test_tokens_that_are_not_trained_may_have_zeros_for_candidates(words: Path, tmp_path: Path) -> None:
    """Of a prompt nobody asks the teacher; and bfloat16 rounds what adds up to 1."""
    row = taught(0, 4, teacher_logprobs=[[0] * K, [0] * K, [-0.0098, -4.5, -4.5], [-1, -2, -3]])
    packed(tmp_path, [{**row, "labels": [-100, -100, *row["input_ids"][2:]]}], words)
    [one] = PackedReader(tmp_path / "packed")
    assert one.extras["teacher_logprobs"][:2].tolist() == [[0.0] * K] * 2


@pytest.mark.parametrize(
    "other", [{"input_ids": [10, 11]}, taught(0, 2, teacher_ids=[[1]] * 2, teacher_logprobs=[[-1]] * 2)]
)
def test_all_records_have_as_many_candidates_or_none(
    other: dict[str, Any], words: Path, tmp_path: Path
) -> None:
    told = " ".join(refused(tmp_path, [taught(0, 3), other], words).split())
    assert "record 1" in told and "give as many for all records, or none" in told
    one = write_lines(tmp_path / "one.jsonl", [taught(0, 3)])
    two = write_lines(tmp_path / "two.jsonl", [other])
    run = build(one, tmp_path / "out", two, "--tokenizer", words)
    assert run.code == 2 and "two.jsonl has records with" in run.err
    assert not (tmp_path / "out").exists()
