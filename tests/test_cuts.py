"""A JSON array whose records look like the array around them: cut on trust first, then exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from building import (
    Gate,
    assert_verified,
    await_chunks,
    build,
    build_arguments,
    demo_rows,
    files_of,
    start,
    workers_in,
    write_lines,
)

WAYS = pytest.mark.parametrize("way", ["threads", "processes"])
ALPACA = ("--format", "alpaca")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    """Two records of a kind, the second with a list of the very records: some 3 MB."""
    return [
        {**row, "instruction": f"{row['instruction']} ({time})", "sources": inside}
        for time in range(3)
        for row in demo_rows()
        for inside in ([], [{**row, "sources": [{**row, "sources": []}] * 2}] * 4)
    ]


@pytest.fixture(scope="module")
def array(rows: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("array") / "rows.json"
    path.write_text(json.dumps(rows))
    assert path.stat().st_size > 4 * 512 * 1024, "several chunks"
    return path


@pytest.fixture(scope="module")
def by_lines(rows: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the same records give as JSON lines, which cannot be cut wrongly."""
    folder = tmp_path_factory.mktemp("lines")
    assert build(write_lines(folder / "rows.jsonl", rows), folder / "out", *ALPACA).code == 0
    return data_of(folder / "out")


def data_of(folder: Path) -> dict[str, bytes]:
    """The shards and the sequence table."""
    return {
        name: data
        for name, data in files_of(folder).items()
        if name.endswith((".arrow", "sequences.parquet"))
    }


@WAYS
def test_records_that_hold_lists_of_such_records_give_what_their_lines_give(
    way: str, array: Path, by_lines: dict[str, bytes], tmp_path: Path
) -> None:
    with workers_in(way):
        run = build(array, tmp_path / "out", *ALPACA, "--workers", 2)
    assert run.code == 0, run.err
    assert data_of(tmp_path / "out") == by_lines


@WAYS
def test_a_malformed_array_is_told_by_its_line(way: str, tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in demo_rows()] * 20
    lines[-100] = lines[-100].replace('": "', '": ', 1)
    (tmp_path / "rows.json").write_text("[" + ",\n".join(lines) + "]")
    with workers_in(way):
        run = build(tmp_path / "rows.json", tmp_path / "out", "--workers", 2)
    assert run.code == 2
    assert f"rows.json, line {len(lines) - 99:,}, column" in run.err.replace("\n", "")
    assert not (tmp_path / "out").exists()


def test_a_build_that_is_stopped_after_it_began_again_goes_on_with_exact_cuts(
    array: Path, by_lines: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments, gate = build_arguments(array, output, *ALPACA, "--workers", 1), Gate(tmp_path / "gate")
    with start(*arguments, way="threads", gate=gate) as process:
        journal = output / ".work" / "journal.jsonl"
        while not journal.exists() or '"exact_cuts": true' not in journal.read_text():
            assert process.poll() is None
            if not os.listdir(gate.folder):
                gate.let(1)
        await_chunks(output, process, gate)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    assert process.returncode == 130
    run = build(array, output, *ALPACA)
    assert run.code == 0 and data_of(output) == by_lines
    assert_verified(output)
