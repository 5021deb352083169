"""The demo: what ships with padless goes the whole way, twice, and harms nobody's folder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from padless.packer.demo import DEFAULT_OUTPUT, run_demo
from padless.packer.errors import InputError


def new_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_demo_packs_every_record_and_names_its_shards(tmp_path: Path) -> None:
    console = new_console()
    result = run_demo(tmp_path / "out", console)
    assert result["output"] == str(tmp_path / "out")
    records = result["report"]["records"]
    assert records["in"] == records["whole"] == 400
    assert result["report"]["utilization"] > 0.95
    assert len(result["pack"]["sequences"]) > 1
    assert result["shards"]
    for shard in result["shards"]:
        assert Path(shard).is_file()
        assert f"  {shard}\n" in printed(console)


def test_a_second_run_shows_the_same_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = new_console(), new_console()
    run_demo(None, first)
    before = contents(tmp_path / DEFAULT_OUTPUT)
    assert before
    run_demo(None, second)
    assert contents(tmp_path / DEFAULT_OUTPUT) == before
    assert printed(second) == printed(first)


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError):
        run_demo(tmp_path, new_console())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
