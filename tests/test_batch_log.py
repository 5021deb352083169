"""A trainer's own batches, measured: what was padding, and what packs would have held."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from building import pack
from hypothesis import given
from hypothesis import strategies as st

from padless.packer.batch_log import Batch, read_batches, report_batches
from padless.packer.errors import InputError

LOG = [[3, 1], [8, 2, 2], [5]]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_padding_is_what_the_batches_had(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", "".join(f"{json.dumps(batch)}\n" for batch in LOG))
    report = report_batches(log)
    assert (report["batches"], report["sequences"], report["tokens"]) == (3, 6, 21)
    assert report["places"] == 3 * 2 + 8 * 3 + 5
    assert report["padding"] == pytest.approx(1 - 21 / 35)
    assert report["worst"][0] == {
        "batch": "2",
        "rows": 3,
        "padded_to": 8,
        "tokens": 12,
        "padding": 0.5,
    }
    assert {(row["strategy"], row["max_length"]) for row in report["packed"]} >= {("bfd", 8), ("spread", 8)}
    assert report["packed"][0]["packs"] == 3


def test_the_width_that_a_trainer_padded_to_counts(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", '{"lengths": [3, 1], "padded_to": 10}\n\n{"lengths": [4]}\n')
    assert list(read_batches(log)) == [Batch("1", [3, 1], 10), Batch("3", [4], 4)]


@given(batches=st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=5), min_size=1, max_size=6))
def test_csv_and_json_lines_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    rows = [f"{number},{length}" for number, batch in enumerate(batches) for length in batch]
    table = write(folder / "log.csv", "\n".join(["batch,length", *rows]))
    lines = write(folder / "log.jsonl", "\n".join(map(json.dumps, batches)))
    assert [batch.lengths for batch in read_batches(table)] == batches
    ignored = {"path", "worst"}
    both = [
        {key: value for key, value in report_batches(log).items() if key not in ignored}
        for log in (table, lines)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("log.jsonl", "", "holds no batches"),
        ("log.jsonl", "[1]\n{", "line 2 is no JSON"),
        ("log.jsonl", "[1]\n" + "[" * 100_000, "line 2 is no JSON"),
        ("log.csv", f"batch,length\n{'1' * 200_000},1\n", "is no CSV"),
        ("log.jsonl", "[]", "line 1 has no lengths"),
        ("log.jsonl", "[1, 0]", "line 1: 0 is no length in tokens; it must be from 1 to 2,147,483,647"),
        ("log.jsonl", "[true]", "True is no length"),
        ("log.jsonl", '{"lengths": [5], "padded_to": 4}', "padded_to is 4, and the longest sequence has 5"),
        ("log.csv", "a,b\n1,2\n", "has the columns a, b"),
        ("log.csv", "batch,length\n1,many\n", "line 2: 'many' is no length"),
        ("log.csv", "batch,length\n0,1\n1,5\n0,7\n", "line 4: batch 0 goes on, or begins again"),
        ("log.csv", "batch,length,padded_to\n0,1,8\n0,1,\n0,2,16\n", "line 4: padded_to is 16, and 8 "),
    ],
)
def test_what_is_no_log_is_told_by_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    before = csv.field_size_limit(131_072)  # a CSV source raises it for the whole process
    try:
        with pytest.raises(InputError, match=words):
            report_batches(write(tmp_path / name, text))
    finally:
        csv.field_size_limit(before)


def test_the_command_needs_a_folder_or_a_log(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", "[3, 1]\n")
    run = pack("report", "--batches", log)
    assert run.code == 0 and run.out.startswith("33.3% of these batches was padding")
    assert max(map(len, run.out.splitlines())) <= 80
    assert pack("report", "--batches", log, "--json").json["padding"] == pytest.approx(1 / 3)
    assert "missing: DIR" in pack("report").err
    for more in (("--split", "train"), ("--plan", "a")):
        assert "leave DIR, --html, --card, --model, --split and --plan out" in pack(
            "report", "--batches", log, *more
        ).err.replace("\n", " ")
    both = pack("report", tmp_path, "--batches", log)
    assert both.code == 2 and "--batches" in both.err
    assert pack("report", "--batches", tmp_path / "nowhere").code == 2
