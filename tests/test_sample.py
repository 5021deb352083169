"""Every record of a source has the same chance to be drawn, however it is stored and however long it is."""

from __future__ import annotations

import bz2
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer import sample
from padless.packer.errors import InputError
from padless.packer.sample import Sample, draw
from padless.packer.sources import BadRecord, resolve_sources

Write = Callable[[Path, list[str]], Path]


def rows_of(texts: list[str]) -> list[dict[str, str]]:
    return [{"text": text, "more": f"{number}"} for number, text in enumerate(texts)]


def as_lines(path: Path, texts: list[str]) -> Path:
    path.with_suffix(".jsonl").write_text("\n\n".join(map(json.dumps, rows_of(texts))))
    return path.with_suffix(".jsonl")


def as_array(path: Path, texts: list[str], **how: Any) -> Path:
    path.with_suffix(".json").write_text("\ufeff " + json.dumps(rows_of(texts), **how) + "\n")
    return path.with_suffix(".json")


def as_indented_array(path: Path, texts: list[str]) -> Path:
    return as_array(path, texts, indent=2, ensure_ascii=False)


def as_text(path: Path, texts: list[str]) -> Path:
    path.with_suffix(".txt").write_text("".join(f"{text}\n" for text in texts))
    return path.with_suffix(".txt")


def as_gzip(path: Path, texts: list[str]) -> Path:
    plain = as_lines(path, texts)
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    return path.with_suffix(".jsonl.gz")


def as_bz2(path: Path, texts: list[str]) -> Path:
    plain = as_array(path, texts)
    path.with_suffix(".json.bz2").write_bytes(bz2.compress(plain.read_bytes()))
    return path.with_suffix(".json.bz2")


def as_csv(path: Path, texts: list[str]) -> Path:
    quoted = "".join('"{}",{}\n'.format(text.replace('"', '""'), number) for number, text in enumerate(texts))
    path.with_suffix(".csv").write_text("text,more\n" + quoted)
    return path.with_suffix(".csv")


def as_parquet(path: Path, texts: list[str]) -> Path:
    table = pa.Table.from_pylist(rows_of(texts))
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=7)
    return path.with_suffix(".parquet")


def as_arrow(path: Path, texts: list[str]) -> Path:
    table = pa.Table.from_pylist(rows_of(texts))
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path.with_suffix(".arrow")


SOUGHT: list[Write] = [as_lines, as_array, as_indented_array, as_text, as_parquet, as_arrow]
PASSED: list[Write] = [as_gzip, as_bz2, as_csv]


def drawn(path: Path, wanted: int, seed: int = 0, **how: str) -> Sample:
    return draw(resolve_sources((str(path),), **how), wanted, np.random.default_rng(seed), **how)


def numbers_of(found: Sample) -> list[int]:
    """Which records were drawn."""
    return [int(row.split()[0] if isinstance(row, str) else row["more"]) for row in found.rows]


@pytest.fixture
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file counts as large, and blocks are small."""
    monkeypatch.setattr(sample, "SEEK_FROM", 1)
    monkeypatch.setattr(sample, "BLOCK_BYTES", (100, 200))
    monkeypatch.setattr(sample, "BLOCKS", 12)
    monkeypatch.setattr(sample, "_GROUPS", 12)
    monkeypatch.setattr(sample, "_GROUP_BYTES", 1)


@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize("write", [*SOUGHT, *PASSED])
def test_long_records_have_the_same_chance_as_short_ones(tmp_path: Path, write: Write) -> None:
    """Many draws; a record in ten is fifteen times as long, and a draw by bytes would take mostly those."""
    texts = [f"{number} " + "x" * (150 if number % 10 == 3 else 10) for number in range(300)]
    path = write(tmp_path / "data", texts)
    times: Counter[int] = Counter()
    expected = []
    for seed in range(100):
        found = drawn(path, 10**6, seed)
        assert found.how == "random" and not found.is_stratified
        assert len(found.block_of) == len(found.rows) and max(found.block_of, default=0) < found.blocks
        times.update(numbers_of(found))
        expected.append(found.records)
    mean = sum(times.values()) / 300
    assert np.mean(expected) == pytest.approx(300, rel=0.1)
    assert len(times) > 290
    long = np.mean([times[number] for number in range(3, 300, 10)])
    assert long == pytest.approx(mean, rel=0.25)


@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize("write", [*SOUGHT, *PASSED])
def test_the_blocks_share_out_the_records(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks together hold each record once."""
    monkeypatch.setattr(sample, "BLOCKS", 10**6)
    monkeypatch.setattr(sample, "_GROUP_BYTES", 2**40)
    texts = [f"{number} " + "x" * (number * 37 % 400) for number in range(120)]
    path = write(tmp_path / "data", texts)
    found = drawn(path, 10**6)
    assert numbers_of(found) == list(range(120)) and found.records == 120
    assert found.is_stratified and found.how == "all"
    some = drawn(path, 30)
    assert len(set(numbers_of(some))) == len(some.rows) == 30
    assert some.records == 120 and some.how == "random"
    assert numbers_of(some) == sorted(numbers_of(some)) == numbers_of(drawn(path, 30))
    assert numbers_of(some) != numbers_of(drawn(path, 30, seed=1))


@settings(deadline=None, max_examples=40)
@given(
    texts=st.lists(st.text(st.sampled_from('ab"\\,{}[] \n:é'), max_size=40), min_size=1, max_size=30),
    block=st.integers(1, 90),
    indent=st.sampled_from([None, 0, 2]),
)
def test_whatever_stands_in_strings_no_boundary_is_mistaken(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int, indent: int | None
) -> None:
    path = as_array(tmp_path_factory.mktemp("array") / "data", texts, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "SEEK_FROM", 1)
        patch.setattr(sample, "BLOCK_BYTES", (block,))
        patch.setattr(sample, "BLOCKS", 10**6)
        assert drawn(path, 10**6).rows == rows_of(texts)
        lines = as_lines(path, texts)
        assert drawn(lines, 10**6).rows == rows_of(texts)


@pytest.mark.usefixtures("in_small_blocks")
def test_an_array_without_a_separator_of_its_own_is_passed_through(tmp_path: Path) -> None:
    """Inner objects begin as the elements do, and elements begin in different ways."""
    inner = [{"a": 1, "more": f"{number}", "inner": [{"a": 2}, {"a": 3}]} for number in range(60)]
    mixed = [{"a" if number % 2 else "b": 1, "more": f"{number}"} for number in range(60)]
    for name, rows in (("inner", inner), ("mixed", mixed)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        times: Counter[int] = Counter()
        for seed in range(60):
            found = drawn(tmp_path / f"{name}.json", 10**6, seed)
            assert all(row in rows for row in found.rows)
            times.update(numbers_of(found))
        assert set(times) == set(range(60))


@pytest.mark.usefixtures("in_small_blocks")
def test_paragraphs_and_whole_files_are_drawn_as_a_build_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "BLOCKS", 10**6)
    paragraphs = [f"{number} one\ntwo" for number in range(40)]
    (tmp_path / "p.txt").write_text("\n\n".join(paragraphs))
    assert drawn(tmp_path / "p.txt", 10**6, text_by="blank").rows == paragraphs
    assert drawn(tmp_path / "p.txt", 10**6, text_by="[0-9]").rows == paragraphs
    (whole,) = drawn(tmp_path / "p.txt", 10**6, text_by="file").rows
    assert whole.count("two") == 40


@pytest.mark.usefixtures("in_small_blocks")
def test_several_files_are_one_population(tmp_path: Path) -> None:
    """Two files, one a hundred times as large."""
    as_lines(tmp_path / "large", [f"{number}" for number in range(2000)])
    as_lines(tmp_path / "small", [f"{number}" for number in range(20)])
    found = [drawn(tmp_path, 10**6, seed) for seed in range(100)]
    assert np.mean([one.records for one in found]) == pytest.approx(2020, rel=0.05)


@pytest.mark.usefixtures("in_small_blocks")
def test_a_pass_ends_at_its_limit_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_gzip(tmp_path / "data", [f"{number} " + "x" * 50 for number in range(200)])
    monkeypatch.setattr(sample, "PASSED_BYTES", 4000)
    found = drawn(path, 10**6)
    assert found.how == "part" and max(numbers_of(found)) < 100
    assert not found.is_stratified


@pytest.mark.usefixtures("in_small_blocks")
def test_records_longer_than_blocks_are_whole(tmp_path: Path) -> None:
    texts = [f"{number} " + "x" * 5000 for number in range(30)]
    for write in (as_lines, as_array):
        path = write(tmp_path / "data", texts)
        rows = [row for seed in range(30) for row in drawn(path, 10**6, seed).rows]
        assert rows and all(row in rows_of(texts) for row in rows)


@pytest.mark.usefixtures("in_small_blocks")
def test_malformed_lines_are_drawn_as_such_and_malformed_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n' * 4)
    rows = drawn(tmp_path / "bad.jsonl", 10**6).rows
    assert sum(isinstance(row, BadRecord) for row in rows) == 4
    (tmp_path / "bad.json").write_text('[{"a": 1}, {"a": 2}, {"a": 3')
    with pytest.raises(InputError, match=r"bad\.json, line 1"):
        drawn(tmp_path / "bad.json", 10**6)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    with pytest.raises(InputError, match="broken or cut short"):
        drawn(tmp_path / "bad.parquet", 10**6)
