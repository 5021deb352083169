"""Shards hold what the plan says however they are cut, and a full disk costs nothing that was finished."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from building import (
    DEMO,
    Run,
    assert_verified,
    build,
    built,
    files_of,
    pack,
    sequences_of,
    workers_in,
    write_many,
)
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer import durable, write
from padless.packer.durable import DurableFile, write_bytes
from padless.packer.errors import DiskFullError
from padless.packer.plan import PackPlan
from padless.packer.write import Layout, cut_shards
from padless.runtime.reader import PackedReader


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo set in one shard of one batch."""
    output = tmp_path_factory.mktemp("whole") / "out"
    built(DEMO, output)
    return output


def packs_of(folder: Path) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    return [
        (
            one.input_ids.tolist(),
            one.labels.tolist(),
            one.seq_lengths.tolist(),
            one.sequence_ids.tolist(),
        )
        for one in PackedReader(folder)
    ]


# -- shards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_small_shards_hold_the_same_packs_in_the_same_order(
    whole: Path, tmp_path: Path, workers: int
) -> None:
    limit = 30_000
    built(DEMO, tmp_path / "out", "--shard-size", limit, "--workers", workers)
    shards = PackedReader(tmp_path / "out").manifest.shards
    assert len(shards) > 4
    for shard in shards:
        assert shard.packs > 1
        assert shard.bytes < limit + 4096  # and the headers of schema and batch
    assert packs_of(tmp_path / "out") == packs_of(whole)
    assert_verified(tmp_path / "out")


def test_a_shard_holds_one_pack_at_least(whole: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--shard-size", 1)
    shards = PackedReader(tmp_path / "out").manifest.shards
    assert [shard.packs for shard in shards] == [1] * len(PackedReader(whole))
    assert packs_of(tmp_path / "out") == packs_of(whole)


def test_small_batches_hold_the_same_packs(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "BATCH_BYTES", 5000)
    monkeypatch.setattr(write, "SLICE_TOKENS", 100)  # several slices a batch
    built(DEMO, tmp_path / "out")
    (shard,) = PackedReader(tmp_path / "out").manifest.shards
    assert len(shard.batches) > 10
    assert packs_of(tmp_path / "out") == packs_of(whole)
    assert_verified(tmp_path / "out")


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_shards_are_smaller_and_read_the_same(
    whole: Path, tmp_path: Path, compression: str
) -> None:
    built(DEMO, tmp_path / "out", "--compression", compression)
    assert packs_of(tmp_path / "out") == packs_of(whole)
    sizes = [PackedReader(folder).manifest.shards[0].bytes for folder in (whole, tmp_path / "out")]
    assert sizes[1] < sizes[0]
    assert_verified(tmp_path / "out")


def test_shards_are_arrow_streams_named_by_their_checksum(whole: Path) -> None:
    (shard,) = PackedReader(whole).manifest.shards
    data = (whole / shard.file).read_bytes()
    digest = xxhash.xxh3_128(data).hexdigest()
    assert shard.file == f"shard-00000-{digest[:8]}.arrow"
    assert (shard.checksum, shard.bytes) == (f"xxh3:{digest}", len(data))
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    assert table.num_rows == shard.packs
    for offset, _ in shard.batches:
        assert data[offset : offset + 4] == b"\xff\xff\xff\xff"  # where a message begins


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    shard_bytes=st.integers(1, 3000),
    batch_bytes=st.integers(2, 600),
)
def test_cuts_cover_every_pack_once_within_the_limits(
    lengths: list[int], shard_bytes: int, batch_bytes: int
) -> None:
    # Packs of 1, 2, 3, 1, 2, 3 ... sequences.
    counts: list[int] = []
    while sum(counts) < len(lengths):
        counts.append(min(len(counts) % 3 + 1, len(lengths) - sum(counts)))
    offsets = np.cumsum([0, *counts])
    plan = PackPlan(order=np.arange(len(lengths)), offsets=offsets)
    layout = Layout(id_type="uint16", labels=True, compression=None, shard_bytes=shard_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "BATCH_BYTES", batch_bytes)
        shards = cut_shards(plan, np.array(lengths, dtype=np.int32), layout)
    batches = [batch for shard in shards for batch in shard]
    assert [start for start, _ in batches] == [0, *(stop for _, stop in batches[:-1])]
    assert batches[-1][1] == len(counts)
    assert all(shards)
    tokens = np.add.reduceat(lengths, offsets[:-1])
    for start, stop in batches:
        assert stop - start == 1 or tokens[start:stop].sum() * 2 <= batch_bytes
    for shard in shards:
        packs = slice(shard[0][0], shard[-1][1])
        size = int(layout.pack_bytes(tokens[packs], np.array(counts)[packs]).sum())
        assert packs.stop - packs.start == 1 or size <= shard_bytes


# -- a file that lasts ---------------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with DurableFile(str(tmp_path), "data") as file:
        file.write(b"one ")
        file.write(memoryview(b"two"))
        assert [path.name for path in tmp_path.iterdir()] == [".data.tmp"]
        info = file.commit(lambda checksum: f"data-{checksum[5:13]}")
    digest = xxhash.xxh3_128(b"one two").hexdigest()
    assert (info.file, info.bytes, info.checksum) == (f"data-{digest[:8]}", 7, f"xxh3:{digest}")
    assert files_of(tmp_path) == {info.file: b"one two"}


@pytest.mark.parametrize("can", ["direct", "not open", "not write", "in parts"])
@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 40_000), max_size=6))
def test_a_file_past_the_page_cache_has_the_same_bytes(can: str, sizes: list[int]) -> None:
    """Also where the file system does not open or write it so, or takes a part of what it is given."""
    system_open, system_write = os.open, os.write

    def open_(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and can == "not open":
            raise OSError(errno.EINVAL, "no")
        return system_open(path, flags, *mode)

    def write_(descriptor: int, data: Any) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if direct and can == "not write":
            raise OSError(errno.EINVAL, "no")
        return system_write(descriptor, memoryview(data)[:4096] if direct and can == "in parts" else data)

    pieces = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    with (
        tempfile.TemporaryDirectory(dir=ROOT) as folder,  # a disk's: one in memory need not know O_DIRECT
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(durable, "BLOCK", 8192)
        patch.setattr(os, "open", open_)
        patch.setattr(os, "write", write_)
        with DurableFile(folder, "data", direct=True) as file:
            for piece in pieces:
                file.write(piece)
            info = file.commit(lambda checksum: "data")
        found = (Path(folder) / "data").read_bytes()
    whole = b"".join(pieces)
    assert found == whole
    assert (info.bytes, info.checksum) == (len(whole), f"xxh3:{xxhash.xxh3_128(whole).hexdigest()}")


@settings(deadline=None)
@given(st.lists(st.integers(0, 40_000), min_size=2, max_size=4), st.integers(0, 2))
def test_a_file_in_the_blocks_of_another_has_its_own_bytes(sizes: list[int], prepared: int) -> None:
    contents = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    with (
        tempfile.TemporaryDirectory(dir=ROOT) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(durable, "BLOCK", 8192)
        durable.prepare_blocks(prepared)
        with durable.recycled_blocks():
            for n, content in enumerate(contents):
                with pytest.raises(RuntimeError), DurableFile(folder, "half", direct=True) as file:
                    file.write(content[::-1])
                    raise RuntimeError
                with DurableFile(folder, f"{n}", direct=True) as file:
                    file.write(content)
                    file.commit(lambda checksum, n=n: f"{n}")  # type: ignore[misc]
        assert not durable._spare
        found = files_of(Path(folder))
    assert found == {f"{n}": content for n, content in enumerate(contents)}


def test_a_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_bytes(str(tmp_path), "data", b"old")
    with pytest.raises(RuntimeError), DurableFile(str(tmp_path), "data") as file:
        file.write(b"half")
        raise RuntimeError
    assert files_of(tmp_path) == {"data": b"old"}


def test_a_full_disk_is_told_past_the_page_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block fails on its thread, while the next one is filled; the file says so before it has a name."""
    monkeypatch.setattr(durable, "BLOCK", 4096)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        with pytest.raises(DiskFullError, match=r"\.data\.tmp could not be written"):
            with DurableFile(folder, "data", direct=True) as file:
                monkeypatch.setattr(os, "write", fill_after(9000))
                file.write(bytes(12_000))
                file.commit(lambda checksum: "data")
        monkeypatch.undo()
        assert files_of(Path(folder)) == {}


def test_a_file_replaces_the_one_before_it(tmp_path: Path) -> None:
    write_bytes(str(tmp_path), "data", b"a longer old one")
    write_bytes(str(tmp_path), "data", b"new")
    assert files_of(tmp_path) == {"data": b"new"}


def test_a_full_disk_is_told_with_path_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiskFullError, match=r"\.data\.tmp could not be written \(5 bytes missing\)"):
        with DurableFile(str(tmp_path), "data") as file:
            monkeypatch.setattr(os, "write", fill_after(3))
            file.write(b"12345678")
    monkeypatch.undo()
    assert files_of(tmp_path) == {}


# -- builds on a full disk -----------------------------------------------------------------------------


def fill_after(room: int) -> Callable[..., int]:
    """An `os.write` or `os.pwrite` for a disk with room for so many bytes."""
    write, pwrite = os.write, os.pwrite  # before they are replaced

    def put(descriptor: int, data: Any, *at: int) -> int:
        nonlocal room
        data = memoryview(data)[:room]
        if not len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= len(data)
        return pwrite(descriptor, data, *at) if at else write(descriptor, data)

    return put


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "many.jsonl")


@pytest.fixture(scope="module")
def undisturbed(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    built(many, output)
    return output


def assert_disk_full(run: Run, output: Path, name: str) -> None:
    """One line that names the file (a pattern) and the missing bytes; nothing committed or half there."""
    assert run.code == 2, (run.out, run.err)
    assert "Traceback" not in run.err and run.err.count("\n") == 1
    assert re.search(rf"the disk is full: {re.escape(str(output))}/\S*{name}", run.err), run.err
    assert re.search(r"\([\d,]+ bytes missing\)", run.err)
    assert "run the same command again" in run.err
    assert {path.name for path in output.iterdir()} <= {".work", "tokenizer", "sequences.parquet"}
    assert not [name for name in files_of(output) if name.endswith((".tmp", ".arrow"))]


@pytest.mark.parametrize(("function", "name"), [("pwrite", r"(tokens|lines)\.bin"), ("write", "shard-00000")])
def test_a_build_goes_on_after_a_write_that_failed(
    many: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    name: str,
) -> None:
    output = tmp_path / "out"
    monkeypatch.setattr(os, function, fill_after(1_500_000))
    with workers_in("threads"):
        run = build(many, output, "--workers", 2)
    monkeypatch.undo()
    assert_disk_full(run, output, name)
    facts = built(many, output)
    assert facts["resumed_chunks"] > 0
    assert files_of(output) == files_of(undisturbed)


def test_a_full_disk_leaves_the_data_set_that_was_there(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(DEMO, tmp_path / "out")
    before = files_of(tmp_path / "out")
    monkeypatch.setattr(os, "write", fill_after(1_500_000))
    run = build(many, tmp_path / "out", "--force")
    monkeypatch.undo()
    assert run.code == 2 and "the disk is full" in run.err
    left = files_of(tmp_path / "out")
    assert {name: data for name, data in left.items() if not name.startswith(".work/")} == before
    built(many, tmp_path / "out", "--force")
    assert_verified(tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that gives a file system of so many bytes, and resizes it when called again."""
    folder = tmp_path / "disk"
    with ExitStack() as stack:

        def resize(size: int) -> Path:
            options = f"remount,size={size}" if folder.exists() else f"size={size}"
            folder.mkdir(exist_ok=True)
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True
            )
            if mounted.returncode:
                pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
            if not options.startswith("remount"):
                stack.callback(lambda: subprocess.run(["umount", "--lazy", folder], check=True))
            return folder

        yield resize


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize("stage", ["tokenize", "shards"])
def test_a_full_disk_stops_the_build_and_room_lets_it_go_on(
    many: Path,
    undisturbed: Path,
    small_disk: Callable[[int], Path],
    stage: str,
    way: str,
) -> None:
    """BR-130."""
    tokens = PackedReader(undisturbed).manifest.statistics["tokens"]
    shards = sum(shard.bytes for shard in PackedReader(undisturbed).manifest.shards)
    # The store takes four bytes a token and some 40 a record.
    room = {"tokenize": 2 * tokens, "shards": 4 * tokens + 9600 * 48 + shards // 2}[stage]
    disk = small_disk(room)
    with workers_in(way):
        run = build(many, disk / "out", "--workers", 2)
        assert_disk_full(run, disk / "out", {"tokenize": ".work/", "shards": ".shard-00000"}[stage])
        small_disk(10 * tokens + 2 * shards)
        facts = built(many, disk / "out", "--workers", 2)
    assert facts["resumed_chunks"] > 0
    assert files_of(disk / "out") == files_of(undisturbed)
    assert sequences_of(disk / "out") == sequences_of(undisturbed)


@pytest.mark.parametrize("share", [0.004, 0.1, 0.4, 0.6, 0.8, 0.9, 0.97])
def test_the_room_that_is_asked_for_is_enough(
    many: Path, small_disk: Callable[[int], Path], tmp_path: Path, share: float
) -> None:
    """BR-130. At every stage: before the first chunk, among chunks, shards and small files."""
    options = ("--shard-size", 500_000, "--workers", 2)
    built(many, tmp_path / "right", *options)
    tokens = PackedReader(tmp_path / "right").manifest.statistics["tokens"]
    room = int(share * (10.5 * tokens + 9600 * 48))
    disk = small_disk(room)
    run = build(many, disk / "out", *options)
    assert run.code == 2 and run.err.count("\n") == 1, run.err
    found = re.search(r"the disk is full: (\S+) could not be written \(([\d,]+) bytes missing\)", run.err)
    assert found and found[1].startswith(str(disk / "out")), run.err
    assert not list((disk / "out").rglob("shard-*.tmp"))
    small_disk(room + int(1.1 * int(found[2].replace(",", ""))) + 2**17)
    built(many, disk / "out", *options)
    assert files_of(disk / "out") == files_of(tmp_path / "right")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_repack_on_a_full_disk_goes_on_with_room(
    many: Path, small_disk: Callable[[int], Path], undisturbed: Path, tmp_path: Path, share: float
) -> None:
    arguments = ["repack", undisturbed, "--seed", 4, "--shard-size", 500_000, "--workers", 2]
    assert pack(*arguments, "--output", tmp_path / "right").code == 0
    right = files_of(tmp_path / "right")
    disk = small_disk(int(share * sum(map(len, right.values()))))
    run = pack(*arguments, "--output", disk / "out")
    assert run.code == 2 and run.err.count("\n") == 1 and "the disk is full" in run.err, run.err
    small_disk(2 * sum(map(len, right.values())))
    assert pack(*arguments, "--output", disk / "out").code == 0
    assert files_of(disk / "out") == right


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    with pytest.raises(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return disk / "filler"


def test_a_full_cache_stops_a_build_into_a_url_and_room_lets_it_go_on(
    small_disk: Callable[[int], Path], undisturbed: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a folder for it, and in the midst of its shards; nothing is in the store then."""
    disk = small_disk(2**20)
    monkeypatch.setenv("PADLESS_CACHE", str(disk / "cache"))
    store = fsspec.filesystem("memory")
    filler = fill(disk)
    for _ in range(2):
        run = build(many, "memory://full/out")
        assert run.code == 2 and run.err.count("\n") == 1, run.err
        assert f"the disk is full: {disk}/cache" in run.err and "run the same command again" in run.err
        assert "manifest.json" not in [Path(name).name for name in store.find("/full")]
        filler.unlink(missing_ok=True)
    small_disk(2**26)
    built(many, "memory://full/out")
    found = {Path(name).name: store.cat(name) for name in store.find("/full/out")}
    assert found == {Path(name).name: data for name, data in files_of(undisturbed).items()}
    assert not files_of(disk)


def test_a_full_folder_of_temporary_files_is_no_matter(
    small_disk: Callable[[int], Path], undisturbed: Path, many: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """BR-130: a build writes below its output and nowhere else."""
    disk = small_disk(2**20)
    fill(disk)
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for way in ("threads", "processes"):
        with workers_in(way):
            built(many, tmp_path / way, "--workers", 2)
        assert files_of(tmp_path / way) == files_of(undisturbed)
    assert [path.name for path in disk.iterdir()] == ["filler"]
