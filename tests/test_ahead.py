"""Large chunks are handed out before their turn, and nothing else is changed by that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from building import build, built, demo_rows, files_of, workers_in, write_lines
from hypothesis import given
from hypothesis import strategies as st

from padless.packer import ahead as ahead_module
from padless.packer.ahead import EACH_TIME, LARGE, Ahead
from padless.packer.errors import InputError
from padless.packer.prepared import Task
from padless.packer.sources import Chunk


def task(index: int, size: int, payload: bytes | None = None) -> Task:
    return Task(
        Chunk(index=index, source=0, reader="jsonl", path="", start=0, stop=size, payload=payload), "text"
    )


def order(sizes: list[int]) -> list[int]:
    return [one.chunk.index for one in Ahead(task(n, size) for n, size in enumerate(sizes))]


@given(st.lists(st.sampled_from([1, 1, LARGE, LARGE + 5]), max_size=40))
def test_every_chunk_is_given_once_and_common_ones_in_the_order_of_the_sources(sizes: list[int]) -> None:
    given_out = order(sizes)
    assert sorted(given_out) == list(range(len(sizes)))
    common = [n for n in given_out if sizes[n] < LARGE]
    assert common == sorted(common)


def test_a_large_chunk_at_the_end_is_given_out_as_soon_as_it_is_seen() -> None:
    # The walk is eight chunks further with each that is given, so at most an eighth is given before it.
    given_out = order([1] * 400 + [LARGE])
    assert given_out.index(400) <= 400 // EACH_TIME + 1
    assert order([1, LARGE, LARGE + 1, LARGE])[:3] == [2, 1, 3]


def test_the_walk_goes_no_further_ahead_than_it_may() -> None:
    walked = []

    def tasks() -> Iterator[Task]:
        for number in range(200):
            walked.append(number)
            yield task(number, 10, b"x" * 10)

    for limit in ({"MOST_AHEAD": 20}, {"MOST_BYTES": 200}):
        walked.clear()
        with patch.multiple(ahead_module, **limit):
            for given_out, _ in enumerate(Ahead(tasks())):
                assert walked[-1] - given_out <= 20


def test_behind_a_chunk_that_stops_the_build_none_is_given_and_before_it_all_are() -> None:
    ahead = Ahead(task(n, LARGE if n == 5 else 1) for n in range(100))
    assert next(ahead).chunk.index == 5
    ahead.stop_at(5)
    assert [one.chunk.index for one in ahead] == [0, 1, 2, 3, 4]


def test_a_fault_of_the_walk_waits_for_what_lies_before_it() -> None:
    def tasks() -> Iterator[Task]:
        yield task(0, 1)
        yield task(1, 1)
        raise InputError("the file ends in mid-record")

    ahead = Ahead(tasks())
    assert [next(ahead).chunk.index, next(ahead).chunk.index] == [0, 1]
    with pytest.raises(InputError, match="mid-record"):
        next(ahead)
    stopped = Ahead(tasks())
    next(stopped)
    stopped.stop_at(1)
    assert list(stopped) == []


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_the_first_fault_in_the_order_of_the_input_is_told_though_a_large_record_went_first(
    tmp_path: Path, way: str
) -> None:
    rows = demo_rows()
    large = {"instruction": "words " * 500_000, "output": "too long"}  # 3 MB, which is a chunk of its own
    source = write_lines(tmp_path / "in.jsonl", [*rows * 5, {"instruction": 5}, *rows * 5, large])
    with workers_in(way):
        run = build(source, tmp_path / "out", "--workers", 2)
    assert run.code == 2
    assert "record 2,000 (line 2,001)" in run.err


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_large_records_that_went_first_leave_no_trace_in_the_folder(tmp_path: Path, way: str) -> None:
    rows = [{"text": json.dumps(row)} for row in demo_rows()]
    large = [{"text": f"{n} words " * 300_000} for n in range(2)]
    source = write_lines(tmp_path / "in.jsonl", [*rows, large[0], *rows * 3, large[1]])
    built(source, tmp_path / "one", "--overflow", "split", "--workers", 1)
    with workers_in(way):
        built(source, tmp_path / "two", "--overflow", "split", "--workers", 3)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
