"""A byte that changed is an error before anybody sees it, and nothing is read for it that is not used."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocked import FOLDERS, PACKS, SMALL, build_in_blocks, flip, shard, small_blocks  # noqa: F401
from building import pack
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import workers_ended
from packed import count_up, edit_manifest, write_folder
from torch.utils.data import DataLoader

from padless.runtime import gather as gather_module
from padless.runtime.blocks import MappedShard
from padless.runtime.collate import collate
from padless.runtime.dataset import PackBatchSampler, PackedDataset
from padless.runtime.format import (
    ChecksumError,
    ManifestError,
    read_manifest,
)
from padless.runtime.gather import Gather
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound ones, which no test changes."""
    root = tmp_path_factory.mktemp("sound")
    for name, folder in FOLDERS.items():
        write_folder(root / name, folder)
        if folder.compression:
            edit_manifest(root / name, lambda content: content["options"].update(compression="zstd"))
    return {name: root / name for name in FOLDERS}


@pytest.fixture
def packed(tmp_path: Path, folders: dict[str, Path]) -> Path:
    """One to change."""
    return Path(shutil.copytree(folders["mapped"], tmp_path / "packed"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_in_blocks(tmp_path_factory.mktemp("built") / "packed")


def place_of(path: Path, column: str, number: int, row: int = 0) -> int:
    """Where in a shard's file the first value of a column is, of a row of a record batch."""
    reader = PackedReader(path)
    batch = reader.batch(number)
    mapped, _ = reader._shards.open(0)
    values = batch.flat(column, slice(row, row + 1))
    return int(values.__array_interface__["data"][0]) - mapped.data.address


def content(reader: PackedReader) -> list[Any]:
    """All that its packs hold."""
    names = ("input_ids", "labels", "seq_lengths", "sequence_ids")
    sums = ("num_tokens", "num_targets", "max_seqlen", "attention_cost")
    return [
        [getattr(one, name).tolist() for name in names]
        + [getattr(one, name) for name in sums]
        + [np.asarray(values).tolist() for values in one.extras.values()]
        for one in reader
    ]


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from([*FOLDERS]), data=st.data())
def test_any_bit_that_changed_is_an_error_or_in_no_pack(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path], name: str, data: st.DataObject
) -> None:
    """BR-128: never another token, length, label, extra or sum, whatever bit of whatever shard it is."""
    right = content(PackedReader(folders[name]))
    path = Path(shutil.copytree(folders[name], tmp_path_factory.mktemp("flip") / "packed"))
    file = shard(path, data.draw(st.integers(0, len(read_manifest(path).shards) - 1)))
    size = file.stat().st_size
    place = data.draw(st.integers(0, size - 1))
    flip(file, place, data.draw(st.integers(0, 7)))
    try:
        assert content(PackedReader(path)) == right
        # No array reaches there: the end mark, and what fills up columns that are looked at by rows.
        assert name != "zstd" or place >= size - SMALL
    except ChecksumError as problem:
        begin = place // SMALL * SMALL
        where = f"{file}, bytes {begin:,} to {min(begin + SMALL, size):,}: they are not what was written"
        assert str(problem).startswith(where) and "copy the folder again" in str(problem)
    shutil.rmtree(path)


def test_each_bit_of_every_number_of_a_pack_is_seen(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Nothing of a sound folder is missed because its bytes are compared only when they are used."""
    reader = PackedReader(folders["extras"])
    batch = reader.batch(0)
    mapped, _ = reader._shards.open(0)
    for name in (
        "input_ids",
        "labels",
        "seq_lengths",
        "sequence_ids",
        "num_targets",
        "topk",
        "half",
        "reward",
        "lane",
    ):
        values = batch.flat(name)
        begin = int(values.__array_interface__["data"][0]) - mapped.data.address
        for place in {begin, begin + values.nbytes // 2, begin + values.nbytes - 1}:
            path = Path(shutil.copytree(folders["extras"], tmp_path / f"{name}-{place}"))
            flip(shard(path), place, 7)
            with pytest.raises(ChecksumError):
                list(PackedReader(path))


def by_stream(**options: Any) -> Callable[[Path], Any]:
    return lambda path: list(PackedStream(path, rank=0, world_size=1, shuffle=False, **options))


def compiled(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_module, "NUMPY_BATCHES", 0)
        patch.setattr(Gather, "_made", 0)
        by_stream()(path)


def by_sampler(path: Path) -> None:
    dataset = PackedDataset(path)
    sampler = PackBatchSampler(dataset, packs_per_batch=2, world_size=1)
    for _ in DataLoader(dataset, batch_sampler=sampler, collate_fn=collate):
        pass


def in_workers(path: Path) -> None:
    loader = DataLoader(PackedStream(path, rank=0, world_size=1), batch_size=None, num_workers=1)
    with workers_ended():
        for _ in loader:
            pass


WAYS: dict[str, Callable[[Path], Any]] = {
    "by number": lambda path: [PackedReader(path)[number] for number in range(len(PACKS))],
    "one after the other": lambda path: list(PackedReader(path)),
    "batches": lambda path: list(PackedReader(path).batches()),
    "blocks": lambda path: list(PackedReader(path).blocks()),
    "pickled": lambda path: list(pickle.loads(pickle.dumps(PackedReader(path)))),
    "stream": by_stream(),
    "stream of two": by_stream(packs_per_batch=2),
    "balanced": by_stream(packs_per_batch=2, balance="attention"),
    "replanned": by_stream(replan="bfd"),
    "compiled": compiled,
    "data set": lambda path: [PackedDataset(path)[number] for number in range(len(PACKS))],
    "sampler": by_sampler,
    "workers": in_workers,
}


@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("column", ["input_ids", "sequence_ids"])
def test_every_way_to_read_sees_a_changed_number(packed: Path, column: str, way: str) -> None:
    """One that no rule forbids: another token that there is, another line of the table."""
    flip(shard(packed), place_of(packed, column, 1, 1))
    with pytest.raises(ChecksumError, match=f"{shard(packed).name}, bytes .*they are not what was written"):
        WAYS[way](packed)


def test_a_further_plan_sees_it_too(packed: Path) -> None:
    assert (
        pack("repack", packed, "--plan-only", "other", "--strategy", "spread", "--max-length", 128).code == 0
    )
    flip(shard(packed), place_of(packed, "labels", 1, 1))
    with pytest.raises(ChecksumError, match="bytes"):
        list(PackedReader(packed, plan="other"))
    with pytest.raises(ChecksumError, match="bytes"):
        by_stream(plan="other")(packed)


def test_a_damaged_block_is_an_error_for_its_own_packs_alone(packed: Path) -> None:
    right = content(PackedReader(packed))
    flip(shard(packed), place_of(packed, "input_ids", 0, 1) + 60)  # in the middle of pack 1
    reader = PackedReader(packed)
    for number in range(len(PACKS)):
        if number == 1:
            for _ in range(2):  # and not only at the first touch
                with pytest.raises(ChecksumError):
                    reader[number]
        else:
            assert reader[number].input_ids.tolist() == right[number][0]


def test_blocks_are_compared_once_and_only_those_that_are_used(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: Counter[int] = Counter()
    own = MappedShard._compare

    def counted(self: MappedShard, block: int) -> None:
        compared[block] += 1
        own(self, block)

    monkeypatch.setattr(MappedShard, "_compare", counted)
    reader = PackedReader(packed)
    assert not compared, "opening reads the manifest alone"
    reader[0]
    ids = place_of(packed, "input_ids", 0), place_of(packed, "input_ids", 1)
    compared.clear()
    reader = PackedReader(packed)
    reader[0]
    first, other = (place // SMALL for place in ids)
    assert compared[first] == 1
    assert not any(compared[block] for block in range(other - 1, other + 2)), "of another record batch"
    for _ in range(3):
        list(reader)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(reader.__getitem__, range(len(PACKS))))
    # Two shards have blocks of the same number.
    assert set(compared.values()) <= {1, 2}


def test_exchanged_shards_are_told_as_such(packed: Path) -> None:
    """Of one size and one schema, so that nothing else tells them apart."""
    first, second = shard(packed, 0), shard(packed, 1)
    assert first.stat().st_size == second.stat().st_size
    data, other = first.read_bytes(), second.read_bytes()
    for path, new in ((first, other), (second, data)):
        path.unlink()
        path.write_bytes(new)
    for number in (0, 7):
        with pytest.raises(
            ChecksumError, match="these are the bytes of shard-0000.*the files were exchanged"
        ):
            PackedReader(packed)[number]


def test_a_shard_of_another_data_set_of_the_same_form_is_told(tmp_path: Path, packed: Path) -> None:
    others = [count_up(30, 7, 21, first=100 + 10 * number) for number in range(8)]
    write_folder(tmp_path / "other", replace(FOLDERS["mapped"], packs=others))
    file = shard(packed)
    assert file.stat().st_size == shard(tmp_path / "other").stat().st_size
    shutil.copyfile(shard(tmp_path / "other"), file)
    with pytest.raises(ChecksumError, match="changed, damaged or of another data set"):
        PackedReader(packed)[0]


def test_a_folder_without_block_checksums_is_read_as_before(packed: Path) -> None:
    right = content(PackedReader(packed))
    for entry in (edit := json.loads((packed / "manifest.json").read_bytes()))["shards"]:
        del entry["block_checksums"]
    edit_manifest(packed, lambda manifest: manifest.update(edit))
    assert content(PackedReader(packed)) == right
    flip(shard(packed), place_of(packed, "input_ids", 0))
    found = content(PackedReader(packed))
    assert found != right, "only `verify` tells"
    with pytest.raises(ChecksumError):
        PackedReader(packed, verify=True)


def test_one_block_checksum_is_left_out_of_some_shards(packed: Path) -> None:
    edit_manifest(packed, lambda manifest: manifest["shards"][1].pop("block_checksums"))
    assert len(list(PackedReader(packed, verify=True))) == len(PACKS)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "0" * 16,
        lambda text: "",
        lambda text: text.upper(),
        lambda text: "x" + text[1:],
        lambda text: " " + text[1:],
        lambda text: None,
        lambda text: [text],
        lambda text: 7,
    ],
)
def test_block_checksums_that_are_none_are_a_damaged_manifest(
    packed: Path, change: Callable[[str], Any]
) -> None:
    def damage(manifest: dict[str, Any]) -> None:
        entry = manifest["shards"][1]
        entry["block_checksums"] = change("a" + entry["block_checksums"][1:])

    edit_manifest(packed, damage)
    with pytest.raises(ManifestError, match=r"shards\[1\]\.block_checksums must be .*copy the folder again"):
        PackedReader(packed)


def test_a_changed_sequence_table_is_told_before_a_line_is_used(packed: Path) -> None:
    table = packed / "sequences.parquet"
    data = table.read_bytes()
    for place in range(0, len(data), 97):
        flip(table, place, place % 8)
        with pytest.raises(ChecksumError, match=r"sequences\.parquet"):
            PackedReader(packed).sequence_columns("length")
        with pytest.raises(ChecksumError, match=r"sequences\.parquet"):
            by_stream(replan="bfd")(packed)
        table.write_bytes(data)


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("report",), "shard"),
        (("report",), "sequences.parquet"),
        (("inspect", "--pack", "0"), "shard"),
        (("inspect", "--pack", "0"), "sequences.parquet"),
        (("inspect", "--pack", "0"), "tokenizer/tokenizer.json"),
        (("export", "--to", "parquet"), "shard"),
        (("export", "--to", "llamafactory"), "shard"),
        (("export", "--to", "llamafactory"), "tokenizer/tokenizer.json"),
    ],
)
def test_commands_end_with_2_where_a_byte_changed(
    tmp_path: Path, built: Path, words: tuple[str, ...], file: str
) -> None:
    path = Path(shutil.copytree(built, tmp_path / "packed"))
    command, *more = words
    if command == "export":
        more += ["--output", str(tmp_path / "out")]
    damaged = shard(path) if file == "shard" else path / file
    flip(damaged, place_of(path, "input_ids", 0) if file == "shard" else 1000)
    run = pack(command, path, *more)
    assert run.code == 2 and "Traceback" not in run.err
    assert damaged.name in run.err and "copy the folder again" in " ".join(run.err.split())
    assert not (tmp_path / "out").exists()
