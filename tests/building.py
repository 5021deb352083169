"""Runs `pack-dataset` for tests: in this process, or in one of its own that can be killed.

In this process a build of the demo set takes a tenth of a second; a process of its own takes half a
second more, so only what needs one (hash seeds, signals, exit codes of the script) gets one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
from conftest import ROOT

from padless.packer import tokenizing
from padless.packer.chunk import ChunkWork
from padless.packer.commands import run as run_commands

DEMO = ROOT / "packer" / "demo_data" / "instructions.jsonl"
TOKENIZER = ROOT / "packer" / "demo_data" / "tokenizer"
MAX_LENGTH = 1024
"""Tokens; the longest record of the demo set has 778."""

SMALL_BELOW = {"threads": 2**60, "processes": 0}
"""An input goes to threads where it is small, otherwise to processes; small is below so many bytes."""


@dataclass(frozen=True)
class Run:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def pack(*arguments: object) -> Run:
    """`pack-dataset` with these arguments, in this process."""
    out, err = io.StringIO(), io.StringIO()
    words = ["pack-dataset", *map(str, arguments)]
    with (
        patch.object(sys, "argv", words),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run_commands()
    return Run(code, out.getvalue(), err.getvalue())


def build_arguments(source: object, output: object, *more: object) -> list[str]:
    """A build of a source with the demo tokenizer; options given twice count as given last."""
    options = ("--tokenizer", TOKENIZER, "--max-length", MAX_LENGTH, "--output", output)
    return [str(word) for word in ("build", source, *options, *more)]


def config_file(folder: Path, text: str) -> Path:
    """A file of options for `--config`."""
    path = folder / "pack.yaml"
    path.write_text(text)
    return path


def build(source: object, output: object, *more: object) -> Run:
    """`build_arguments`, run; what it printed is JSON."""
    return pack(*build_arguments(source, output, *more), "--json")


def built(source: object, output: object, *more: object) -> dict[str, Any]:
    """A build that must succeed; its summary."""
    run = build(source, output, *more)
    assert run.code == 0, run.err
    found: dict[str, Any] = run.json
    return found


def run_script(*arguments: object, cwd: Path | None = None, **environment: str) -> Run:
    """The console script in a process of its own."""
    with start(*arguments, cwd=cwd, environment=environment) as process:
        out, err = process.communicate(timeout=300)
    return Run(process.returncode, out, err)


class Gate:
    """Holds the chunks of a build in another process: as many go through as the test lets.

    So a test that stops a build, or comes in the middle of one, does not depend on how fast it runs.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.given = 0

    def let(self, chunks: int) -> None:
        """Let so many more chunks through."""
        for number in range(self.given, self.given + chunks):
            (self.folder / f"pass-{number}").touch()
        self.given += chunks

    def open(self) -> None:
        """Let all others through."""
        (self.folder / "open").touch()


class Started(subprocess.Popen[str]):
    """A process that does not outlive the test that failed beside it, whatever it waits for."""

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, trace)


def start(
    *arguments: object,
    way: str | None = None,
    gate: Gate | None = None,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start the console script, in a session of its own so that signals reach it and its workers."""
    hold = f"building.hold({str(gate.folder)!r}); " if gate else ""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import building; "
        f"building.choose({way!r}); {hold}from padless.packer.cli import main; main()"
        if way
        else "from padless.packer.cli import main; main()"
    )
    return Started(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def choose(way: str) -> None:
    """In a child process: choose the way of the workers for good."""
    tokenizing.SHADOW_BYTES = SMALL_BELOW[way]


def hold(folder: str) -> None:
    """In a child process: each chunk waits at a `Gate`. Ctrl-C and a parent's death let it through."""
    finish, parent, interrupted = ChunkWork.finish, os.getpid(), threading.Event()

    def passed() -> bool:
        if interrupted.is_set() or os.path.exists(f"{folder}/open"):
            return True
        if os.getpid() != parent and os.getppid() != parent:
            return True
        for name in os.listdir(folder):
            if name == "open":  # it came since, and is for all
                return True
            with contextlib.suppress(FileNotFoundError):  # another chunk took it
                os.remove(f"{folder}/{name}")
                return True
        return False

    def held(self: ChunkWork, prepared: Any) -> Any:
        while not passed():
            time.sleep(0.005)
        return finish(self, prepared)

    def interrupt(number: int, frame: Any) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    ChunkWork.finish = held  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, interrupt)


@contextlib.contextmanager
def workers_in(way: str) -> Iterator[None]:
    """Have chunks done in `threads` or in `processes`, which is otherwise a matter of time and size."""
    with patch.object(tokenizing, "SHADOW_BYTES", SMALL_BELOW[way]):
        yield


def await_chunks(output: Path, process: subprocess.Popen[str], gate: Gate, chunks: int = 1) -> None:
    """Let a build finish so many chunks more, and wait until they are told in its journal."""
    journal = output / ".work" / "journal.jsonl"
    gate.let(chunks)
    while True:
        with contextlib.suppress(OSError):
            if journal.read_bytes().count(b"\n") > chunks:
                break
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    assert not (output / "manifest.json").exists()


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder with its bytes, and when it was last written."""
    return {name: (data, (folder / name).stat().st_mtime_ns) for name, data in files_of(folder).items()} | {
        "": (b"", folder.stat().st_mtime_ns)
    }


def demo_rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_many(path: Path, times: int = 24) -> Path:
    """The demo set many times over, no record like another: some six chunks."""
    rows = [
        {**row, "instruction": f"{row['instruction']} ({number})"}
        for number in range(times)
        for row in demo_rows()
    ]
    return write_lines(path, rows)


def sequence_table(folder: Path) -> dict[str, list[Any]]:
    """The sequence table's columns."""
    found: dict[str, list[Any]] = pq.read_table(folder / "sequences.parquet").to_pydict()
    return found


def sequences_of(folder: Path) -> dict[int, tuple[list[int], list[int]]]:
    """By their number: the tokens and labels of all sequences in a folder's packs."""
    from padless.runtime.reader import PackedReader

    found: dict[int, tuple[list[int], list[int]]] = {}
    for one in PackedReader(folder):
        ends = np.cumsum(one.seq_lengths)
        for number, end, length in zip(one.sequence_ids, ends, one.seq_lengths, strict=True):
            mine = slice(int(end - length), int(end))
            found[int(number)] = (one.input_ids[mine].tolist(), one.labels[mine].tolist())
    return found


def token_lists(folder: Path) -> list[tuple[int, ...]]:
    """The tokens of every sequence, in the order of the sequence table."""
    found = sequences_of(folder)
    return [tuple(found[number][0]) for number in sorted(found)]


def assert_verified(folder: Path) -> None:
    """The folder is what its manifest says, and nothing of the build's work is left."""
    run = pack("verify", folder)
    assert run.code == 0, run.out
    assert not (folder / ".work").exists()
    assert not [name for name in files_of(folder) if name.endswith(".tmp")]
