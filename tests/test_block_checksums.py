"""Block checksums as they are written, by every writer, and as verify holds them against files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from blocked import FOLDERS, SMALL, build_in_blocks, shard, small_blocks  # noqa: F401
from building import pack
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import edit_manifest, write_folder, xxh3

from padless.packer.kept_shards import KeptShards
from padless.runtime.blocks import BlockHasher
from padless.runtime.format import (
    Manifest,
    read_manifest,
)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_folder(tmp_path / "packed", FOLDERS["mapped"])
    return tmp_path / "packed"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_in_blocks(tmp_path_factory.mktemp("built") / "packed")


def naive(path: Path, size: int) -> str:
    data = path.read_bytes()
    return "".join(xxhash.xxh3_64(data[at : at + size]).hexdigest() for at in range(0, len(data), size))


def test_a_build_lists_the_checksum_of_every_block(built: Path) -> None:
    shards = read_manifest(built).shards
    assert len(shards) > 2
    assert [info.block_checksums for info in shards] == [naive(built / info.file, SMALL) for info in shards]


def test_repack_lists_them_too(tmp_path: Path, built: Path) -> None:
    assert pack("repack", built, "--output", tmp_path / "out", "--max-length", 2048).code == 0
    for info in read_manifest(tmp_path / "out").shards:
        assert info.block_checksums == naive(tmp_path / "out" / info.file, SMALL)


def test_verify_tells_blocks_that_are_not_those_of_an_unchanged_file(packed: Path) -> None:
    assert pack("verify", packed).code == 0

    def damage(manifest: dict[str, Any]) -> None:
        entry = manifest["shards"][1]
        text = entry["block_checksums"]
        entry["block_checksums"] = ("1" if text[0] == "0" else "0") + text[1:]

    edit_manifest(packed, damage)
    run = pack("verify", packed, "--json")
    assert run.code == 1
    [check] = [check for check in run.json["checks"] if not check["ok"]]
    assert f"{shard(packed, 1)} is unchanged, and the manifest's block_checksums" in check["detail"]


def test_the_manifest_spells_them_so() -> None:
    """Literally: 16 digits of XXH3-64 a block, one after the other, the last one shorter."""
    hasher = BlockHasher()
    hasher.update(memoryview(b"a" * SMALL))
    hasher.update(memoryview(b"a"))
    told = hasher.block_checksums
    assert told[16:] == "e6c632b61e964e1f", "XXH3-64 of the letter a"
    assert told[:16] == xxhash.xxh3_64(b"a" * SMALL).hexdigest()
    assert hasher.checksum == xxh3(b"a" * (SMALL + 1))


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.binary(max_size=3 * SMALL), max_size=6))
def test_checksums_do_not_depend_on_how_a_file_is_written(pieces: list[bytes]) -> None:
    hasher = BlockHasher()
    for piece in pieces:
        hasher.update(memoryview(piece))
    whole = b"".join(pieces)
    blocks = [whole[at : at + SMALL] for at in range(0, len(whole), SMALL)]
    assert hasher.block_checksums == "".join(xxhash.xxh3_64(block).hexdigest() for block in blocks)
    assert hasher.checksum == xxh3(whole)


def test_a_shard_that_an_earlier_padless_left_without_is_written_anew(tmp_path: Path, packed: Path) -> None:
    """Or the finished folder would not be the one that a build in one go gives."""
    info = read_manifest(packed).shards[0]
    KeptShards(str(tmp_path), str(packed), "key").add("", 0, info)
    assert KeptShards(str(tmp_path), str(packed), "key").find("", 0) == info
    journal = tmp_path / "shards.jsonl"
    row = json.loads(journal.read_text())
    del row["shard"]["block_checksums"]
    journal.write_text(json.dumps(row) + "\n")
    assert KeptShards(str(tmp_path), str(packed), "key").find("", 0) is None


def test_a_manifest_with_block_checksums_comes_back_as_it_was_written(packed: Path) -> None:
    data = read_manifest(packed).to_json()
    entry = json.loads(data)["shards"][0]
    assert entry["block_checksums"] == naive(shard(packed), SMALL)
    assert f'"block_checksums": "{entry["block_checksums"]}",\n   "bytes"'.encode() in data
    assert Manifest.from_json(data, "here").to_json() == data
    plain = replace(
        read_manifest(packed), shards=(replace(read_manifest(packed).shards[0], block_checksums=None),)
    )
    assert b"block_checksums" not in plain.to_json()
