"""`--strategy wrapped`: full packs of text, every fragment where it was cut, every token accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from building import DEMO, build, built, pack, write_lines

from padless.packer.verify import verify
from padless.runtime.reader import PackedReader

WORDS = (
    "when the river rises over its banks",
    "nobody sleeps",
    "and then",
    "a",
    "of all the boats that left",
)
LINES = [f"{WORDS[number % 5]} {'again ' * (number * 7 % 23)}{number}" for number in range(60)]


def fragments_of(folder: Path) -> list[list[int]]:
    """Tokens of each line of the sequence table, in the order of the lines; [] where it was dropped."""
    reader = PackedReader(folder)
    lines = sum(table.lines for table in reader.manifest.sequence_tables)
    found: list[list[int]] = [[] for _ in range(lines)]
    for one in reader:
        ends = np.cumsum(one.seq_lengths)
        for number, end, length in zip(one.sequence_ids, ends, one.seq_lengths, strict=True):
            found[number] = one.input_ids[end - length : end].tolist()
    return found


def records_of(folder: Path) -> list[list[int]]:
    """Tokens of each record, its fragments put together."""
    records = pq.read_table(folder / "sequences.parquet")["record"].to_pylist()
    found: list[list[int]] = [[] for _ in range(max(records) + 1)]
    for record, tokens in zip(records, fragments_of(folder), strict=True):
        found[record] += tokens
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--workers", 2),
        ("--max-sequences-per-pack", 3),
        ("--align", 4),
        ("--packs-multiple", 4),
        ("--plan-window", 4),
    ],
    ids=str,
)
def test_fragments_rebuild_every_record_and_the_account_adds_up(
    text: Path, tmp_path: Path, more: tuple[object, ...]
) -> None:
    whole = built(text, tmp_path / "whole")
    facts = built(text, tmp_path / "cut", "--max-length", 64, "--strategy", "wrapped", *more)
    assert verify(tmp_path / "cut").ok, verify(tmp_path / "cut").to_json()
    assert records_of(tmp_path / "cut") == records_of(tmp_path / "whole")
    assert facts["tokens"] == whole["tokens"] and facts["cut_tokens"] == 0
    assert facts["sequences"] > facts["records"] == 60
    assert 0 < facts["split_records"] < 60
    assert facts["trained_tokens"] == facts["tokens"] - facts["sequences"]
    if not more:
        assert facts["packs"] == -(-facts["tokens"] // 64) == facts["bound_packs"]


def test_a_cut_line_says_where_its_fragment_begins_and_why(text: Path, tmp_path: Path) -> None:
    built(text, tmp_path / "cut", "--max-length", 64, "--strategy", "wrapped")
    table = pq.read_table(tmp_path / "cut" / "sequences.parquet").to_pylist()
    position = before = 0
    for line, after in zip(table, [*table[1:], None], strict=True):
        is_cut = line["part"] > 0 or (after is not None and after["part"] > 0)
        assert (line["status"], line["reason"]) == (("fragment", "pack-end") if is_cut else ("whole", None))
        position = position + before if line["part"] else 0
        assert (line["start"], line["num_targets"]) == (position, line["length"] - 1)
        before = line["length"]


def test_a_record_longer_than_a_pack_is_cut_at_pack_ends_alone(tmp_path: Path) -> None:
    source = tmp_path / "long.txt"
    source.write_text("\n".join(["short one", "word " * 300, "short too"]), encoding="utf-8")
    options = ("--max-length", 64, "--strategy", "wrapped")
    assert build(source, tmp_path / "out", *options).code == 2
    facts = built(source, tmp_path / "out", *options, "--overflow", "split")
    assert verify(tmp_path / "out").ok
    built(source, tmp_path / "whole")
    assert records_of(tmp_path / "out") == records_of(tmp_path / "whole")
    assert facts["packs"] == -(-facts["tokens"] // 64)
    # Cut once where each full pack ends, and nowhere else.
    assert facts["sequences"] == 3 + facts["packs"] - 1
    table = pq.read_table(tmp_path / "out" / "sequences.parquet")
    assert set(table["reason"].to_pylist()) <= {None, "too-long", "pack-end"}


def test_dropped_records_keep_their_lines_between_fragments(tmp_path: Path) -> None:
    rows = [{"text": line if number % 7 else ""} for number, line in enumerate(LINES)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    options = ("--max-length", 48, "--strategy", "wrapped", "--on-bad-record", "drop", "--max-drop-share", 1)
    more = ("--eos", "none", "--eval-fraction", 0.3, "--eval-strategy", "wrapped")
    facts = built(source, tmp_path / "out", *options, *more)
    assert facts["dropped_records"] == 9
    for split in ("train", "validation"):
        report = verify(tmp_path / "out" / split)
        assert report.ok, report.to_json()
        told = json.loads(pack("report", tmp_path / "out" / split, "--json").out)
        assert told["records"]["split"] > 0


def test_truncated_records_stay_truncated_where_they_are_cut_again(tmp_path: Path) -> None:
    source = tmp_path / "long.txt"
    source.write_text("\n".join(["short one", "word " * 300, "short too"]), encoding="utf-8")
    facts = built(
        source, tmp_path / "out", "--max-length", 64, "--strategy", "wrapped", "--overflow", "truncate"
    )
    assert verify(tmp_path / "out").ok
    assert (facts["truncated_records"], facts["cut_tokens"] > 0) == (1, True)


def test_the_first_token_of_a_fragment_is_no_target_of_the_one_before(text: Path, tmp_path: Path) -> None:
    built(text, tmp_path / "out", "--max-length", 64, "--strategy", "wrapped", "--labels", "always")
    for one in PackedReader(tmp_path / "out"):
        starts = np.cumsum(one.seq_lengths) - one.seq_lengths
        expected = one.input_ids.astype(np.int32)
        expected[starts] = -100
        assert one.labels.tolist() == expected.tolist()
        assert one.num_targets == len(one.input_ids) - len(one.seq_lengths)


@pytest.mark.parametrize("option", ["--strategy", "--eval-strategy"])
def test_chats_are_not_cut(tmp_path: Path, option: str) -> None:
    run = build(DEMO, tmp_path / "out", option, "wrapped", "--eval-fraction", 0.5)
    assert run.code == 2
    assert all(word in run.err for word in ("wrapped", "mid-conversation", "alpaca", "spread"))
    assert not (tmp_path / "out").exists()


def test_masked_tokens_are_not_cut(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}] * 5
    source = write_lines(tmp_path / "rows.jsonl", rows)
    run = build(source, tmp_path / "out", "--strategy", "wrapped", "--format", "tokenized")
    assert run.code == 2
    assert "5 tokens of these are masked" in run.err and "spread" in run.err
