"""Long work says how far it is: bars in a terminal, lines of a log elsewhere, nothing where it is told so."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from building import DEMO, MAX_LENGTH, TOKENIZER, build_arguments, built, pack

from padless.packer import progress as telling
from padless.packer.progress import part_of, progress


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("progress") / "packed"
    built(DEMO, folder)
    return folder


def commands(packed: Path, output: Path) -> dict[str, tuple[list[object], list[str]]]:
    """Command -> its words, and the stages it tells of."""
    return {
        "build": ([*build_arguments(DEMO, output)], ["tokenize", "write"]),
        "repack": (["repack", packed, "--output", output, "--max-length", 2048], ["write"]),
        "report": (["report", packed], ["sequences"]),
        "inspect": (["inspect", packed, "--text", "<|im_end|>", "--pack", 1], []),
        "verify": (["verify", packed], ["bytes", "packs"]),
        "export": (["export", packed, "--to", "parquet", "--output", output], ["packs"]),
        "estimate": (
            ["estimate", DEMO, "--tokenizer", TOKENIZER, "--max-length", MAX_LENGTH, "--limit", 40],
            ["sample", "tokenize", "write"],
        ),
    }


COMMANDS = ("build", "repack", "report", "inspect", "verify", "export", "estimate")


@pytest.mark.parametrize("name", COMMANDS)
def test_off_a_terminal_long_work_writes_lines_of_a_log(
    packed: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "LOG_SECONDS", 0.0)
    words, stages = commands(packed, tmp_path / "out")[name]
    run = pack(*words, "--json")
    assert run.code == 0, run.err
    assert run.json
    lines = run.err.splitlines()
    assert list(dict.fromkeys(line.split(":")[0] for line in lines)) == stages
    for stage in stages:
        last = [line for line in lines if line.startswith(f"{stage}: ")][-1]
        assert re.fullmatch(rf"{stage}: 100%, [\d.,]+ .*, about 0 s left", last) or stage == "tokenize", last


@pytest.mark.parametrize("name", COMMANDS)
def test_quiet_and_short_work_writes_none(
    packed: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, _ = commands(packed, tmp_path / "out")[name]
    monkeypatch.setattr(telling, "LOG_SECONDS", 30.0)
    monkeypatch.setattr(telling, "clock", lambda: 1000.0)  # however slow the machine is
    assert pack(*words).err == ""
    monkeypatch.setattr(telling, "LOG_SECONDS", 0.0)
    words, _ = commands(packed, tmp_path / "again")[name]
    run = pack(*words, "--quiet")
    assert (run.code, run.err) == (0, "")


def test_words_that_are_looked_for_are_counted_by_packs(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "LOG_SECONDS", 0.0)
    run = pack("inspect", packed, "--text", "nobody wrote this")
    assert run.code == 2
    assert re.search(r"^packs: 100%, (\d+) of \1, about 0 s left$", run.err, re.MULTILINE)


def test_a_log_line_comes_at_most_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(telling, "LOG_SECONDS", 30.0)
    monkeypatch.setattr(telling, "clock", lambda: now)
    with progress() as report:
        more = part_of(report, "packs", 200)
        for _ in range(200):
            now += 1.0
            more(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[0] == "packs: 15%, 30 of 200, about 170 s left"


def test_what_is_left_of_a_second_folder_goes_by_its_own_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(telling, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(telling, "clock", lambda: now)
    with progress() as report:
        for seconds in (100.0, 10.0):
            more = part_of(report, "packs", 100)
            for _ in range(100):
                now += seconds
                more(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[49] == "packs: 50%, 50 of 100, about 5,000 s left"
    assert lines[102] == "packs: 3%, 3 of 100, about 970 s left"


def test_a_terminal_has_a_bar_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(telling, "_REFRESH_SECONDS", 0.0)
    with progress() as report:
        more = part_of(report, "packs", 3000)
        more(1234)
        more(1766)
    assert "packs" in terminal.getvalue()
    assert "1,234 of 3,000" in terminal.getvalue() and "3,000 of 3,000" in terminal.getvalue()
    with progress(quiet=True) as report:
        assert report is None
        part_of(report, "packs", 1)(1)
