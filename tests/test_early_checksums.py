"""Checksums that a repack begins before anything else: of the right files, and compared like any other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import DEMO, build, built, pack

from padless.packer import early_checksums
from padless.runtime.format import read_manifest


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    yield
    early_checksums._begun.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards."""
    path = tmp_path_factory.mktemp("early") / "packed"
    built(DEMO, path, "--shard-size", 40_000)
    return path


def test_each_shard_has_the_checksum_of_the_manifest_once(folder: Path) -> None:
    shards = read_manifest(folder).shards
    assert len(shards) > 1
    early_checksums.start([str(folder), "--output", "out"])
    assert [early_checksums.take(folder / shard.file) for shard in shards] == [s.checksum for s in shards]
    assert early_checksums.take(folder / shards[0].file) is None


def test_folders_of_splits_begin_with_all_their_shards(tmp_path: Path) -> None:
    assert build(DEMO, tmp_path / "both", "--eval-fraction", 0.3).code == 0
    early_checksums.start([str(tmp_path / "both")])
    for split in ("train", "validation"):
        (shard,) = read_manifest(tmp_path / "both", split).shards
        assert early_checksums.take(tmp_path / "both" / split / shard.file) == shard.checksum


@pytest.mark.parametrize(
    "words", [("--output", "{}"), ("{}", "--plan-only", "name"), ("{}", "--plan-only=name")]
)
def test_what_is_no_input_or_is_not_compared_is_not_read(folder: Path, words: tuple[str, ...]) -> None:
    early_checksums.start([word.format(folder) for word in words])
    assert all(early_checksums.take(folder / shard.file) is None for shard in read_manifest(folder).shards)


def test_a_single_core_is_left_to_the_start_of_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    early_checksums.start([str(folder)])
    assert early_checksums.take(folder / read_manifest(folder).shards[0].file) is None


@pytest.mark.parametrize(
    "text",
    [
        None, "", "[]", "{", '{"kind": "splits", "splits": [{"name": "absent"}]}',
        '{"kind": "splits", "splits": [{"name": "."}, {"name": "."}]}', "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_packed_folder_is_passed_over(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    early_checksums.start([str(tmp_path), str(tmp_path / "absent"), ""])
    assert early_checksums._begun == {}


@pytest.fixture(scope="module")
def long_shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of several MiB: to open it does not compare all of it."""
    path = tmp_path_factory.mktemp("long")
    line = json.dumps({"input_ids": [number % 300 for number in range(256)]})
    (path / "ids.jsonl").write_text(f"{line}\n" * 6_000)
    assert build(path / "ids.jsonl", path / "packed").code == 0
    return path / "packed"


@pytest.mark.parametrize("damage", ["changed", "exchanged", "gone"])
def test_a_shard_that_changes_once_it_was_read_is_refused(
    damage: str, long_shard: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(long_shard, tmp_path / "copy")
    (info,) = read_manifest(copy).shards
    shard = copy / info.file
    data = bytearray(shard.read_bytes())
    assert len(data) > 2 << 20
    data[len(data) // 2] ^= 1
    arguments = [str(copy), "--output", str(tmp_path / "out"), "--max-length", "512"]
    early_checksums.start(arguments)
    (begun,) = early_checksums._begun.values()
    begun.result()
    if damage != "changed":
        shard.unlink()
    if damage != "gone":
        shard.write_bytes(data)
    run = pack("repack", *arguments)
    assert run.code == 2 and shard.name in run.err, run.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "emptied"])
def test_a_damaged_shard_is_refused_with_its_name_whoever_read_it_first(
    damage: str, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    shard = copy / read_manifest(copy).shards[1].file
    data = bytearray(shard.read_bytes())
    if damage == "gone":
        shard.unlink()
    else:
        data[len(data) // 2] ^= 1
        shard.write_bytes({"changed": data, "cut": data[:-8], "emptied": b""}[damage])
    arguments = [str(copy), "--output", str(tmp_path / "out"), "--max-length", "512", "--overflow", "drop"]
    early_checksums.start(arguments)
    run = pack("repack", *arguments)
    assert run.code == 2 and shard.name in run.err, run.err
    assert not (tmp_path / "out").exists()
