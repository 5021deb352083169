"""The token store keeps only what its journal vouches for, and its lock goes with its process."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless.packer import work_folder
from padless.packer.chunk import ChunkResult
from padless.packer.elements import gather_of, lay_elements
from padless.packer.errors import DiskFullError, InputError
from padless.packer.lines import LINE, Problem
from padless.packer.tables import collect
from padless.packer.token_store import ChunkStore, Entry, Reserved
from padless.packer.work_folder import WorkFolder


def ends(store: ChunkStore) -> Reserved:
    context = multiprocessing.get_context()
    return Reserved((context.Value("q", store.used[0]), context.Value("q", store.used[1])))


def result(*lengths: int, first: int = 0) -> ChunkResult:
    """Sequence k is k, k, k, ..."""
    lines = np.zeros(len(lengths), dtype=LINE)
    lines["length"] = lengths
    values = np.repeat(np.arange(first, first + len(lengths), dtype=np.int32), lengths)
    return ChunkResult(lines, values, len(lengths), [], 0)


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Path]:
    """The folder of a build that finished two of its chunks."""
    store = ChunkStore(str(tmp_path), "key")
    reserved = ends(store)
    for index in (1, 0):
        store.commit(store.write(index, 0, 10, result(3, 2, first=10 * index), reserved))
    store.write(2, 0, 10, result(4), reserved)  # not committed
    store.close()
    yield tmp_path


def tokens_of(store: ChunkStore, entry: Entry) -> list[int]:
    mapped = store.map_tokens()
    assert mapped is not None
    found = np.frombuffer(mapped, dtype="<i4")[entry.tokens_at : entry.tokens_at + entry.tokens].tolist()
    return list(found)


def test_finished_chunks_are_taken_up_and_others_are_not(stopped: Path) -> None:
    store = ChunkStore(str(stopped), "key")
    assert sorted(store.entries) == [0, 1]
    for index, entry in store.entries.items():
        first = 10 * index
        assert tokens_of(store, entry) == [first] * 3 + [first + 1] * 2
        assert store.lines_of(entry)["length"].tolist() == [3, 2]
    store.close()


def test_new_chunks_go_behind_those_that_were_finished(stopped: Path) -> None:
    store = ChunkStore(str(stopped), "key")
    store.commit(store.write(2, 0, 10, result(6, first=77), ends(store)))
    assert [tokens_of(store, store.entries[index])[0] for index in (0, 1, 2)] == [0, 10, 77]
    store.close()
    again = ChunkStore(str(stopped), "key")
    assert sorted(again.entries) == [0, 1, 2]
    again.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_sequences_are_found_whenever_a_chunk_without_any_was_finished(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """A chunk of dropped records begins where another does, of a lower or a higher number."""
    chunks = [result(3, 2, first=1), result(0), result(4, 1, 2, first=3), result(5, first=6)]
    store = ChunkStore(str(tmp_path), "key")
    reserved = ends(store)
    for index in order:
        store.commit(store.write(index, 0, 10, chunks[index], reserved))
    (split,) = collect(store, 1, 1)
    gather = gather_of(*lay_elements(store), split)
    found = [set(gather.values(np.array([number])).tolist()) for number in range(len(split.lengths))]
    assert found == [{value} for value in range(1, 7)]
    store.close()


def test_another_key_starts_afresh(stopped: Path) -> None:
    store = ChunkStore(str(stopped), "other")
    assert store.entries == {} and store.used == (0, 0)
    store.close()
    again = ChunkStore(str(stopped), "key")
    assert again.entries == {}
    again.close()


def test_a_line_of_the_journal_that_was_cut_off_is_no_chunk(stopped: Path) -> None:
    journal = stopped / "journal.jsonl"
    text = journal.read_text()
    journal.write_text(text[:-9])
    store = ChunkStore(str(stopped), "key")
    assert list(store.entries) == [1]
    store.commit(store.write(0, 0, 10, result(1), ends(store)))
    store.close()
    again = ChunkStore(str(stopped), "key")
    assert sorted(again.entries) == [0, 1]
    again.close()


@pytest.mark.parametrize("name", ["tokens.bin", "lines.bin"])
def test_a_chunk_whose_bytes_changed_is_no_chunk(stopped: Path, name: str) -> None:
    data = bytearray((stopped / name).read_bytes())
    data[0] ^= 1  # chunk 1 was written first
    (stopped / name).write_bytes(bytes(data))
    store = ChunkStore(str(stopped), "key")
    assert list(store.entries) == [0]
    store.close()


@pytest.mark.parametrize("name", ["tokens.bin", "lines.bin", "journal.jsonl"])
def test_a_missing_or_empty_file_starts_afresh(stopped: Path, name: str) -> None:
    (stopped / name).write_bytes(b"")
    store = ChunkStore(str(stopped), "key")
    assert store.entries == {}
    store.close()
    (stopped / name).unlink()
    store = ChunkStore(str(stopped), "key")
    assert store.entries == {}
    store.close()


def test_a_journal_of_something_else_starts_afresh(stopped: Path) -> None:
    (stopped / "journal.jsonl").write_text("not JSON\n{}\n")
    store = ChunkStore(str(stopped), "key")
    assert store.entries == {}
    store.close()


def test_a_chunk_with_problems_is_never_entered(tmp_path: Path) -> None:
    store = ChunkStore(str(tmp_path), "key")
    bad = result(1)._replace(problems=[Problem(0, 1, "it is bad")])
    store.commit(store.write(0, 0, 10, bad, ends(store)))
    store.close()
    again = ChunkStore(str(tmp_path), "key")
    assert again.entries == {}
    again.close()


def test_ranges_never_overlap(tmp_path: Path) -> None:
    store = ChunkStore(str(tmp_path), "key")
    reserved = ends(store)
    entries = [store.write(n, 0, 1, result(*range(1, n + 2)), reserved) for n in range(6)]
    places = [place for e in entries for place in range(e.tokens_at, e.tokens_at + e.tokens)]
    assert sorted(places) == list(range(len(places)))
    store.close()


def test_an_empty_chunk_is_a_chunk(tmp_path: Path) -> None:
    store = ChunkStore(str(tmp_path), "key")
    store.commit(store.write(0, 0, 10, result(), ends(store)))
    assert store.map_tokens() is None
    assert len(store.lines_of(store.entries[0])) == 0
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_the_path_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = ChunkStore(str(tmp_path), "key")
    store.commit(store.write(0, 0, 10, result(3), ends(store)))
    pwrite = os.pwrite

    def full(descriptor: int, data: Any, at: int) -> int:
        if len(data) > 100:
            return pwrite(descriptor, data[:100], at)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError, match=r"tokens\.bin could not be written \(100 bytes missing\)"):
        store.write(1, 0, 10, result(50), ends(store))
    monkeypatch.undo()
    store.cut_back()
    assert (tmp_path / "tokens.bin").stat().st_size == 3 * 4
    assert (tmp_path / "lines.bin").stat().st_size == LINE.itemsize
    assert tokens_of(store, store.entries[0]) == [0, 0, 0]
    store.close()


def test_other_failures_of_a_write_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, data: Any, at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = ChunkStore(str(tmp_path), "key")
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError) as raised:
        store.write(0, 0, 10, result(5), ends(store))
    assert raised.value.errno == errno.EIO and not isinstance(raised.value, DiskFullError)
    store.close()


# -- the lock ------------------------------------------------------------------------------------------


def test_one_build_at_a_time(tmp_path: Path) -> None:
    first = WorkFolder(str(tmp_path))
    with pytest.raises(InputError, match="another build is writing into"):
        WorkFolder(str(tmp_path))
    first.release()
    assert (tmp_path / ".work").is_dir()
    WorkFolder(str(tmp_path)).remove()
    assert not (tmp_path / ".work").exists()
    WorkFolder(str(tmp_path)).remove()


@pytest.mark.parametrize("content", ["", "1", "999999999", "nonsense"])
def test_a_lock_file_that_nobody_holds_blocks_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / ".work").mkdir()
    (tmp_path / ".work" / "lock").write_text(content)
    folder = WorkFolder(str(tmp_path))
    assert (tmp_path / ".work" / "lock").read_text() == str(os.getpid())
    folder.remove()
    assert not (tmp_path / ".work").exists()


def _take_and_leave_to_a_child(output: str, end: int, test: int) -> None:
    """In a forked process: die, and leave the folder to a child until the test lets it go."""
    WorkFolder(output)
    if os.fork() == 0:
        os.close(test)
        os.read(end, 1)
    os._exit(0)


@contextlib.contextmanager
def dead_build(output: Path) -> Iterator[Callable[[], int]]:
    """A build that is dead while a worker of it lives, which ends when the function given is called."""
    end, test = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_take_and_leave_to_a_child, args=(str(output), end, test)
    )
    process.start()
    process.join()
    try:
        yield lambda: os.write(test, b"x")
    finally:
        os.close(test)
        os.close(end)


def test_the_workers_of_a_dead_build_are_waited_for(tmp_path: Path) -> None:
    with dead_build(tmp_path) as let_go:
        threading.Timer(0.3, let_go).start()  # while this thread waits, or before
        WorkFolder(str(tmp_path)).remove()
    assert not (tmp_path / ".work").exists()


def test_they_are_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_folder, "DYING", 0.05)
    with dead_build(tmp_path), pytest.raises(InputError, match="another build is writing into"):
        WorkFolder(str(tmp_path))


# -- weights -------------------------------------------------------------------------------------------


def weighted(*lengths: int, weight: float) -> ChunkResult:
    made = result(*lengths)
    return made._replace(weights=np.full(len(made.values), weight, dtype=np.float32))


def test_weights_are_taken_up_with_their_chunks_and_no_others_get_those_of_a_stopped_one(
    tmp_path: Path,
) -> None:
    store = ChunkStore(str(tmp_path), "key")
    reserved = ends(store)
    store.commit(store.write(0, 0, 10, result(2), reserved))
    store.commit(store.write(1, 0, 10, weighted(3, weight=0.5), reserved))
    store.write(2, 0, 10, weighted(4, weight=0.25), reserved)  # not committed
    store.close()
    store = ChunkStore(str(tmp_path), "key")
    assert sorted(store.entries) == [0, 1] and store.is_weighted
    store.commit(store.write(2, 0, 10, result(4), ends(store)))
    found = np.frombuffer(store.map_weights(), dtype="<f4")[:9]
    assert found.tolist() == [0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 0]
    store.close()


@pytest.mark.parametrize("damage", [b"", b"\x00" * 12])
def test_a_chunk_whose_weights_changed_is_no_chunk(tmp_path: Path, damage: bytes) -> None:
    store = ChunkStore(str(tmp_path), "key")
    store.commit(store.write(0, 0, 10, weighted(3, weight=0.5), ends(store)))
    store.close()
    (tmp_path / "weights.bin").write_bytes(damage)
    store = ChunkStore(str(tmp_path), "key")
    assert store.entries == {} and not store.is_weighted
    store.close()


def test_files_of_work_have_the_mode_of_any_other_file(tmp_path: Path) -> None:
    ChunkStore(str(tmp_path), "key").close()
    (tmp_path / "other").touch()
    usual = (tmp_path / "other").stat().st_mode
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {usual}
