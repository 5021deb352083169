"""Folders behind URLs: the same batches, whole files in the cache, and errors as of local folders."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from building import TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st
from object_storage import spoil
from packed import Folder, count_up, write_folder, write_numbered, write_splits
from ranks import numbers, read_through_cache
from torch.utils.data import DataLoader

from padless.runtime.errors import (
    ChecksumError,
    FormatError,
    MissingFileError,
    NotPackedError,
    PlanError,
    RemoteError,
    SplitError,
    StateError,
    TruncatedFileError,
)
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream

PACKS = 46


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 shards of two packs, each pack one sequence."""
    return write_numbered(tmp_path_factory.mktemp("remote") / "packed", PACKS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shards"


@pytest.fixture
def bucket(packed: Path) -> Iterator[Any]:
    """The folder in fsspec's memory, as memory://bucket/packed."""
    system = fsspec.filesystem("memory")
    for file in packed.rglob("*"):
        if file.is_file():
            system.pipe_file(f"/bucket/packed/{file.relative_to(packed)}", file.read_bytes())
    yield system
    system.rm("/bucket", recursive=True)


URL = "memory://bucket/packed"


def kept(cache: Path) -> list[Path]:
    """The complete files of a cache."""
    return sorted(path for path in cache.iterdir() if path.name.startswith("xxh3-") and not path.suffix)


def test_packs_behind_a_url_are_those_of_the_folder(packed: Path, bucket: Any, cache: Path) -> None:
    remote, local = PackedReader(URL), PackedReader(packed)
    assert not cache.exists(), "opening reads the manifest alone"
    assert [remote[number].input_ids.tolist() for number in range(PACKS)] == [
        local[number].input_ids.tolist() for number in range(PACKS)
    ]
    assert remote.sequence_table().equals(local.sequence_table())
    assert pickle.loads(pickle.dumps(remote))[3].input_ids.tolist() == [3] * 4
    assert PackedReader(f"file://{packed}", verify=True)[5].num_tokens == 6


@pytest.mark.parametrize("balance", [None, "attention"])
def test_a_stream_shuffles_shards_and_sees_each_pack_once(
    packed: Path, bucket: Any, balance: str | None
) -> None:
    options: dict[str, Any] = {"packs_per_batch": 3, "remainder": "pad", "balance": balance}
    ranks = [list(PackedStream(URL, rank=rank, world_size=2, **options)) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    assert sorted(number for rank in ranks for batch in rank for number in numbers(batch)) == list(
        range(PACKS)
    )
    # The order hangs on how packs are shuffled and not on where they lie.
    local = [PackedStream(packed, rank=rank, world_size=2, shuffle="shards", **options) for rank in range(2)]
    assert [[numbers(batch) for batch in rank] for rank in ranks] == [
        [numbers(batch) for batch in rank] for rank in local
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**62 - 1),
    epoch=st.integers(0, 5),
    stop=st.integers(0, PACKS),
    world_size=st.sampled_from([1, 2, 3]),
)
def test_a_window_of_shards_is_done_before_the_next_and_can_be_resumed(
    packed: Path, seed: int, epoch: int, stop: int, world_size: int
) -> None:
    options: dict[str, Any] = {"seed": seed, "epoch": epoch, "shuffle": "shards", "remainder": "pad"}
    stream = PackedStream(packed, rank=0, world_size=1, **options)
    order = [numbers(batch)[0] for batch in stream]
    assert sorted(order) == list(range(PACKS))
    windows = [{number // 2 for number in order[first : first + 8]} for first in range(0, PACKS, 8)]
    assert [len(window) for window in windows] == [4, 4, 4, 4, 4, 3], "shards, whole, four at a time"
    stream.set_epoch(epoch)
    for _ in zip(range(stop), stream, strict=False):
        pass
    state = json.loads(json.dumps(stream.state_dict()))
    seen = order[:stop]
    if state["epoch"] == epoch:
        rest = []
        for rank in range(world_size):
            resumed = PackedStream(packed, rank=rank, world_size=world_size, **options)
            resumed.load_state_dict(state)
            rest.append([numbers(batch) for batch in resumed])
        seen += [number for step in zip(*rest, strict=True) for batch in step for number in batch]
    assert seen == order


def test_epochs_and_seeds_order_shards_anew(packed: Path) -> None:
    orders = {
        tuple(numbers(b)[0] for b in PackedStream(packed, rank=0, world_size=1, shuffle="shards", **options))
        for options in ({}, {"seed": 1}, {"epoch": 1})
    }
    assert len(orders) == 3


def test_a_state_of_another_shuffle_is_refused(packed: Path, bucket: Any) -> None:
    state = PackedStream(packed, rank=0, world_size=1).state_dict()
    with pytest.raises(StateError, match="shuffle=True, this stream has shuffle='shards'"):
        PackedStream(URL, rank=0, world_size=1).load_state_dict(state)


def test_the_cache_keeps_its_limit_by_what_was_used_longest_ago(
    packed: Path, bucket: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [file.stat().st_size for file in packed.glob("shard-*")]
    monkeypatch.setenv("PADLESS_CACHE_BYTES", str(max(sizes) * 5))
    reader = PackedReader(URL)
    held = [reader[number] for number in range(PACKS)]
    assert 3 <= len(kept(cache)) <= 5
    assert sum(path.stat().st_size for path in kept(cache)) <= max(sizes) * 5
    # Packs that are still held outlive their files.
    assert [pack.input_ids.tolist() for pack in held] == [[n] * (1 + n % 7) for n in range(PACKS)]
    last = reader.manifest.shards[-1].checksum.replace(":", "-")
    assert cache / last in kept(cache)
    monkeypatch.setenv("PADLESS_CACHE_BYTES", "2 GB")
    with pytest.raises(RemoteError, match="'2 GB'.*whole number"):
        PackedReader(URL)


def test_the_cache_removes_nothing_that_it_did_not_put_there(
    packed: Path, bucket: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of others in PADLESS_CACHE and in its shards/, with a suffix or without, and folders."""
    monkeypatch.setenv("PADLESS_CACHE_BYTES", "1")
    mine = [folder / name for folder in (cache.parent, cache) for name in ("LICENSE", "xxh3-mine", "a.txt")]
    mine += [
        cache.parent / f"xxh3-{'0' * 32}",
        cache / "packs" / "LICENSE",
        cache.parent / "packs" / "LICENSE",
    ]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert [pack.num_tokens for pack in PackedReader(URL)] == [1 + number % 7 for number in range(PACKS)]
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)
    others = {path.name for path in cache.iterdir()} - {path.name for path in mine} - {"packs"}
    assert len(others) == 1, "the last shard alone, and no locks"


def test_parts_that_a_kill_left_long_ago_are_removed(bucket: Any, cache: Path) -> None:
    cache.mkdir(parents=True)
    old, new = (cache / f"xxh3-{digit * 32}.part" for digit in "01")
    for path in (old, new):
        path.write_text("a piece")
    os.utime(old, (0, 0))
    assert PackedReader(URL)[0].num_tokens == 1
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"


def test_pack_and_streams_of_urls_share_padless_cache(
    packed: Path, bucket: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from padless.packer import pack

    monkeypatch.setenv("PADLESS_CACHE_BYTES", "1")
    records = [{"text": "one two three"}]
    packs = pack(records, str(TOKENIZER), max_length=64)
    files = {path: path.read_bytes() for path in cache.parent.rglob("*") if path.is_file()}
    assert len(list(PackedStream(URL, rank=0, world_size=1))) == PACKS
    assert {path: path.read_bytes() for path in files} == files
    assert pack(records, str(TOKENIZER), max_length=64)[0].num_tokens == packs[0].num_tokens


def test_a_file_removed_by_another_reader_before_it_is_opened_comes_again(
    packed: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one file, whatever anybody fetches removes what all the others have just fetched."""
    monkeypatch.setenv("PADLESS_CACHE_BYTES", "1")
    reader, other = PackedReader(URL), PackedReader(URL)
    shards = iter(other.manifest.shards[5:])
    assert other.remote is not None
    fetch, utime = other.remote.fetch, os.utime

    def seen_then_removed(path: Path) -> None:
        utime(path)
        with monkeypatch.context() as calm:
            calm.setattr("padless.runtime.cache.os.utime", utime)
            fetch(next(shards))
        assert not path.exists()

    assert reader.remote is not None
    reader.remote.fetch(reader.manifest.shards[0])
    monkeypatch.setattr("padless.runtime.cache.os.utime", seen_then_removed)
    assert reader[0].input_ids.tolist() == [0]
    reader.remote.fetch(reader.manifest.sequence_tables[0])
    assert reader.sequence_table().equals(PackedReader(packed).sequence_table())


def test_readers_of_one_cache_with_room_for_a_file_all_end(
    packed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADLESS_CACHE_BYTES", "1")

    def read(seed: int) -> list[int]:
        stream = PackedStream(f"file://{packed}", rank=0, world_size=1, seed=seed)
        return sorted(number for batch in stream for number in numbers(batch))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [list(range(PACKS))] * 4


def test_a_cache_that_cannot_be_written_is_told(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "file"))
    reader = PackedReader(f"file://{packed}")
    for read in (lambda: reader[0], reader.sequence_table):
        with pytest.raises(RemoteError, match="cannot be kept in .*; make room there, or set PADLESS_CACHE"):
            read()


def test_shards_are_read_ahead(packed: Path, bucket: Any, cache: Path) -> None:
    batches = iter(PackedStream(URL, rank=0, world_size=1))
    next(batches)
    reader = PackedReader(URL)
    reader.read_ahead([0, 1, 2])
    assert reader.remote is not None and reader.remote._ahead is not None
    reader.remote._ahead.wait()
    wanted = {shard.checksum.replace(":", "-") for shard in reader.manifest.shards[:3]}
    assert wanted <= {path.name for path in kept(cache)}
    bucket.rm("/bucket/packed", recursive=True)
    assert reader[0].num_tokens == 1, "what was read ahead is here"
    bucket.pipe_file("/bucket/packed/manifest.json", (packed / "manifest.json").read_bytes())


@pytest.mark.parametrize(
    ("how", "error"),
    [("missing", MissingFileError), ("cut", TruncatedFileError), ("changed", ChecksumError)],
)
def test_a_bad_file_is_an_error_that_names_it_and_leaves_nothing(
    bucket: Any, cache: Path, how: str, error: type[FormatError]
) -> None:
    """BR-128, BR-129: within a moment, and never a wrong batch."""
    reader = PackedReader(URL)
    shard = reader.manifest.shards[0].file
    spoil(bucket, f"/bucket/packed/{shard}", how)
    for _ in range(2):
        with pytest.raises(error, match=f"{URL}/{shard}"):
            reader[0]
    assert list(cache.iterdir()) == []
    assert reader[2].num_tokens == 3


def test_damage_on_the_way_is_tried_again(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-128."""
    reader = PackedReader(URL)
    opened = type(bucket).open
    broken = [True]

    def once(self: Any, path: str, *args: Any, **options: Any) -> Any:
        file = opened(self, path, *args, **options)
        if broken and path.endswith(".arrow"):
            broken.pop()
            file.read(8)
        return file

    monkeypatch.setattr(type(bucket), "open", once)
    assert reader[0].input_ids.tolist() == [0]
    assert not broken


def test_what_is_no_folder_or_cannot_be_reached_is_told(packed: Path, bucket: Any) -> None:
    with pytest.raises(NotPackedError, match="memory://bucket/other has no manifest.json"):
        PackedReader("memory://bucket/other")
    with pytest.raises(RemoteError, match="nowhere://packed"):
        PackedReader("nowhere://packed")
    with pytest.raises(PlanError, match="memory://bucket/packed has no plan 'long'"):
        PackedReader(URL, plan="long")


def test_a_split_behind_a_url_is_asked_for(tmp_path: Path) -> None:
    splits = {name: Folder(packs=[count_up(1 + size)]) for size, name in enumerate(("train", "validation"))}
    write_splits(tmp_path / "splits", splits)
    url = f"file://{tmp_path}/splits"
    assert PackedReader(url, split="validation")[0].num_tokens == 2
    assert PackedReader(f"{url}/train")[0].num_tokens == 1
    for options, message in (({}, "train, validation"), ({"split": "test"}, "no split 'test'")):
        with pytest.raises(SplitError, match=message):
            PackedReader(url, **options)
    manifest = tmp_path / "splits" / "train" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(TruncatedFileError, match="train/manifest.json"):
        PackedReader(url, split="train")


def test_forked_loader_workers_read_through_the_cache(packed: Path, cache: Path) -> None:
    stream = PackedStream(f"file://{packed}", rank=0, world_size=1)
    wanted = [numbers(batch) for batch in stream]
    stream.set_epoch(0)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [numbers(batch) for batch in loader] == wanted


def test_processes_share_a_cache_and_a_killed_one_leaves_no_file_that_looks_whole(
    packed: Path, cache: Path
) -> None:
    """BR-124: a part of a file, as a kill leaves it, is under a name that nobody reads."""
    shard = PackedReader(packed).manifest.shards[0]
    killed = (
        "import os, sys; from padless.runtime.reader import PackedReader; from padless.runtime import cache\n"
        "cache.os.fsync = lambda file: os.kill(os.getpid(), 9)\n"
        "PackedReader(sys.argv[1])[0]"
    )
    run = subprocess.run([sys.executable, "-c", killed, f"file://{packed}"], env=os.environ, check=False)
    assert run.returncode == -9
    assert kept(cache) == []
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    readers = [
        context.Process(target=read_through_cache, args=(f"file://{packed}", results)) for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    found = [results.get(timeout=120) for _ in readers]
    for reader in readers:
        reader.join(10)
    assert found == [[[number] * (1 + number % 7) for number in range(PACKS)]] * 2
    assert (cache / shard.checksum.replace(":", "-")).stat().st_size == shard.bytes
    assert len(kept(cache)) == PACKS // 2
    assert not list(cache.glob("*.part"))


def test_what_changed_in_the_cache_is_told_or_fetched_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are used by blocks, so another process finds the block; what is read whole comes again."""
    packs = [count_up(3, 1 + number, first=number) for number in range(6)]
    write_folder(tmp_path / "packed", Folder(packs=packs, block_bytes=1 << 20))
    url = f"file://{tmp_path}/packed"
    reader = PackedReader(url)
    with monkeypatch.context() as patch:
        # Compared whole on its way, and so not by blocks.
        patch.setattr("padless.runtime.blocks.MappedShard._compare", None)
        wanted = [pack.input_ids.tolist() for pack in reader]
    table = reader.sequence_table()
    for path in kept(cache):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.unlink()
        path.write_bytes(data)
    later = PackedReader(url)
    for number, shard in ((0, 0), (5, 2)):
        path = cache / later.manifest.shards[shard].checksum.replace(":", "-")
        with pytest.raises(ChecksumError, match=f"shard-0000{shard}.*remove {path}, it is fetched again"):
            later[number]
        path.unlink()
    assert later.sequence_table().equals(table)
    PackedReader(url, verify=True)
    assert [pack.input_ids.tolist() for pack in PackedReader(url)] == wanted
