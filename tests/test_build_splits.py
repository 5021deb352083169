"""What a build makes of one set: a training and an evaluation side, the same from any kind of file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import (
    DEMO,
    assert_verified,
    built,
    demo_rows,
    sequence_table,
    sequences_of,
    token_lists,
    write_lines,
)

from padless.runtime.reader import PackedReader


def test_an_eval_fraction_makes_a_folder_of_two_verified_splits(whole: Path, tmp_path: Path) -> None:
    facts = built(DEMO, tmp_path / "out", "--eval-fraction", 0.2)
    assert_verified(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["kind"] == "splits"
    assert [split["name"] for split in manifest["splits"]] == ["train", "validation"]
    listed = json.loads((tmp_path / "out" / "dataset_dict.json").read_text())
    assert listed == {"splits": ["train", "validation"]}
    train, validation = (token_lists(tmp_path / "out" / name) for name in ("train", "validation"))
    assert sorted(train + validation) == sorted(token_lists(whole))
    assert 0.1 < len(validation) / 400 < 0.3
    assert facts["records"] == 400
    assert facts["splits"]["train"]["records"] == len(train)
    assert facts["splits"]["validation"]["records"] == len(validation)


def test_the_eval_split_has_one_sequence_a_pack_in_the_input_order(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--eval-fraction", 0.2)
    reader = PackedReader(tmp_path / "out", split="validation")
    assert len(reader) > 10
    assert [one.sequence_ids.tolist() for one in reader] == [[n] for n in range(len(reader))]
    records = sequence_table(tmp_path / "out" / "validation")["record"]
    assert records == sorted(records)
    assert max(len(one.sequence_ids) for one in PackedReader(tmp_path / "out", split="train")) > 1


def test_an_eval_strategy_packs_the_eval_split(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--eval-fraction", 0.2, "--eval-strategy", "bfd")
    reader = PackedReader(tmp_path / "out", split="validation")
    assert len(reader) < sum(len(one.sequence_ids) for one in reader)


def test_an_eval_source_is_the_eval_split(tmp_path: Path) -> None:
    rows = demo_rows()
    train, held = (
        write_lines(tmp_path / "train.jsonl", rows[50:]),
        write_lines(tmp_path / "h.jsonl", rows[:50]),
    )
    built(train, tmp_path / "out", "--eval-source", held)
    built(held, tmp_path / "alone", "--strategy", "none")
    assert_verified(tmp_path / "out")
    assert token_lists(tmp_path / "out" / "validation") == token_lists(tmp_path / "alone")
    assert len(token_lists(tmp_path / "out" / "train")) == 350


def test_new_records_move_no_old_one_to_the_other_side(tmp_path: Path) -> None:
    rows = demo_rows()
    first = write_lines(tmp_path / "first.jsonl", rows[:200])
    second = write_lines(tmp_path / "second.jsonl", rows[200:300] + rows[:200] + rows[300:])
    for source in (first, second):
        built(source, tmp_path / source.stem, "--eval-fraction", 0.3)
    for split in ("train", "validation"):
        before = set(token_lists(tmp_path / "first" / split))
        assert len(before) > 20
        assert before < set(token_lists(tmp_path / "second" / split))


def test_duplicates_stay_on_one_side(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "twice.jsonl", demo_rows() * 2)
    built(source, tmp_path / "out", "--eval-fraction", 0.3)
    train, validation = (token_lists(tmp_path / "out" / name) for name in ("train", "validation"))
    assert len(train) + len(validation) == 800
    assert validation
    assert not set(train) & set(validation)


def test_another_seed_chooses_another_eval_side(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "a", "--eval-fraction", 0.2)
    built(DEMO, tmp_path / "b", "--eval-fraction", 0.2, "--seed", 1)
    sides = [set(token_lists(tmp_path / name / "validation")) for name in ("a", "b")]
    assert sides[0] != sides[1]


@pytest.fixture(params=["messages", "alpaca"])
def one_set_three_ways(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """The same records as JSON lines, as a JSON array and as Parquet."""
    rows: list[Any] = demo_rows()
    if request.param == "messages":
        rows = [
            {
                "messages": [
                    {"role": "user", "content": row["instruction"]},
                    {"role": "assistant", "content": row["output"]},
                ],
                "stars": number,
                "score": number / 8,
            }
            for number, row in enumerate(rows)
        ]
    write_lines(tmp_path / "lines.jsonl", rows)
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table.parquet")
    yield [tmp_path / name for name in ("lines.jsonl", "array.json", "table.parquet")]


def test_the_kind_of_file_decides_nothing(one_set_three_ways: list[Path], tmp_path: Path) -> None:
    found = []
    for source in one_set_three_ways:
        output = tmp_path / source.suffix[1:]
        built(source, output, "--eval-fraction", 0.3)
        found.append([sequences_of(output / split) for split in ("train", "validation")])
    assert len(found[0][1]) > 60
    assert found[0] == found[1] == found[2]


def test_load_from_disk_takes_the_folders_as_they_are(whole: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    built(DEMO, tmp_path / "out", "--eval-fraction", 0.2)
    splits = datasets.load_from_disk(str(tmp_path / "out"))
    assert sorted(splits) == ["train", "validation"]
    assert splits["train"].num_rows == len(PackedReader(tmp_path / "out", split="train"))
    one = datasets.load_from_disk(str(whole))
    expected = PackedReader(whole)
    assert one.num_rows == len(expected)
    assert one[3]["input_ids"] == expected[3].input_ids.tolist()
    assert one[3]["seq_lengths"] == expected[3].seq_lengths.tolist()
