"""Sources with several splits: each becomes a folder of its own under its own name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from building import DEMO, MAX_LENGTH, TOKENIZER, assert_verified, build, built, demo_rows, pack, write_lines
from hub_stand_in import Repository, StandIn, stand_in

from padless.packer import PackConfig, pack_dataset
from padless.packer.errors import InputError
from padless.packer.sources.splits import is_for_evaluation
from padless.runtime.format import Manifest, SplitsManifest, read_manifest
from padless.runtime.reader import PackedReader

datasets.disable_progress_bars()
COUNTS = {"train": 30, "validation": 7, "test": 9}


@pytest.fixture(scope="module")
def splits() -> datasets.DatasetDict:
    rows, begin, found = demo_rows(), 0, {}
    for name, count in COUNTS.items():
        found[name] = datasets.Dataset.from_list(rows[begin : begin + count])
        begin += count
    return datasets.DatasetDict(found)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def lines(rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def content(folder: Path) -> dict[str, Any]:
    """What a packed folder with splits says of all but its sources' names."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/manifest.json")):
        manifest = read_manifest(path.parent)
        found[path.parent.name] = (manifest.shards, manifest.plan_hash, manifest.statistics, manifest.options)
    return found


def pack_objects(value: Any, output: Path, **options: Any) -> Manifest | SplitsManifest:
    common: dict[str, Any] = {"tokenizer": str(TOKENIZER), "max_length": MAX_LENGTH, "output": str(output)}
    return pack_dataset(PackConfig(sources=(value,), **common, **options))


def test_all_splits_of_hub_folder_and_objects_are_the_same_folders(
    splits: datasets.DatasetDict, hub: StandIn, tmp_path: Path
) -> None:
    hub.repositories["datasets/org/set"] = Repository.of(
        {f"data/{name}-00000-of-00001.jsonl": lines(rows) for name, rows in splits.items()}
    )
    splits.save_to_disk(tmp_path / "saved")
    built("org/set", tmp_path / "hub", "--split", "train,validation,test")
    built(tmp_path / "saved", tmp_path / "folder", "--split", "all")
    pack_objects(splits, tmp_path / "dict", split="all")
    pack_objects(dict(splits), tmp_path / "plain", split="train, validation,test")
    found = content(tmp_path / "folder")
    assert {name: facts[2]["records"]["in"] for name, facts in found.items()} == COUNTS
    assert content(tmp_path / "hub") == content(tmp_path / "dict") == content(tmp_path / "plain") == found
    for name in COUNTS:
        assert_verified(tmp_path / "hub" / name)
        assert len(PackedReader(tmp_path / "folder", split=name)) == found[name][2]["packs"]
    loaded = datasets.load_from_disk(str(tmp_path / "hub"))
    assert {name: rows.num_rows for name, rows in loaded.items()} == {
        name: facts[2]["packs"] for name, facts in found.items()
    }


def test_a_split_for_evaluation_has_one_sequence_a_pack_unless_said_otherwise(
    splits: datasets.DatasetDict, tmp_path: Path
) -> None:
    named = datasets.DatasetDict(train_sft=splits["train"], test_sft=splits["test"])
    named.save_to_disk(tmp_path / "saved")
    built(tmp_path / "saved", tmp_path / "a", "--split", "all")
    train, test = (read_manifest(tmp_path / "a" / name).statistics for name in ("train_sft", "test_sft"))
    assert train["packs"] < train["sequences"] and test["packs"] == test["sequences"]
    built(tmp_path / "saved", tmp_path / "b", "--split", "all", "--eval-strategy", "bfd")
    assert read_manifest(tmp_path / "b" / "test_sft").statistics["packs"] < test["packs"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train", False),
        ("train_sft", False),
        ("en", False),
        ("", False),
        ("latest", False),
        ("test", True),
        ("validation", True),
        ("dev", True),
        ("test_sft", True),
    ],
)
def test_the_words_of_a_name_tell_whether_a_split_is_for_evaluation(name: str, expected: bool) -> None:
    assert is_for_evaluation(name) is expected


def test_one_split_is_one_folder_and_all_of_one_a_folder_of_splits(
    splits: datasets.DatasetDict, tmp_path: Path
) -> None:
    assert isinstance(pack_objects(splits, tmp_path / "one", split="validation"), Manifest)
    alone = datasets.DatasetDict(train=splits["train"])
    found = pack_objects(alone, tmp_path / "all", split="all")
    assert isinstance(found, SplitsManifest) and found.names == ("train",)


def test_splits_that_cannot_be_taken_are_refused_with_the_way_out(
    splits: datasets.DatasetDict, tmp_path: Path
) -> None:
    splits.save_to_disk(tmp_path / "saved")
    odd = datasets.DatasetDict({"train": splits["train"], "plans": splits["test"]})
    for option, message in (
        ("train,dev", "no split 'dev'; choose with --split: train, validation, test"),
        ("train,train", "names train twice"),
        ("train,", "no split ''"),
    ):
        run = build(tmp_path / "saved", tmp_path / "out", "--split", option)
        assert run.code == 2 and message in run.err, run.err
    for more, message in (
        (("--eval-fraction", 0.1), "keeps the sources' own splits"),
        (("--eval-source", DEMO), "keeps the sources' own splits"),
        (("--limit", 3), "validation split would be empty (0 of its 0 records kept): raise --limit 3"),
    ):
        run = build(tmp_path / "saved", tmp_path / "out", "--split", "all", *more)
        assert run.code == 2 and message in run.err, run.err
    file = write_lines(tmp_path / "x.jsonl", demo_rows()[-5:])
    run = pack("build", tmp_path / "saved", file, "--split", "all", "--tokenizer", TOKENIZER)
    assert run.code == 2 and "missing: --max-length, --output" in run.err
    run = build(tmp_path / "saved", tmp_path / "out", file, "--split", "all")
    assert run.code == 2 and "x.jsonl has no splits, so --split all does not say where it goes" in run.err
    with pytest.raises(InputError, match="called 'plans' can be no folder"):
        pack_objects(odd, tmp_path / "out", split="all")
    assert not (tmp_path / "out").exists()


def test_another_choice_of_splits_is_another_build_and_replaces_the_old_folders(
    splits: datasets.DatasetDict, tmp_path: Path
) -> None:
    splits.save_to_disk(tmp_path / "saved")
    built(tmp_path / "saved", tmp_path / "out", "--split", "all")
    assert built(tmp_path / "saved", tmp_path / "out", "--split", "all")["was_finished"]
    run = build(tmp_path / "saved", tmp_path / "out", "--split", "train,test")
    assert run.code == 2 and "splits: train and validation and test, now train and test" in run.err
    built(tmp_path / "saved", tmp_path / "out", "--split", "train,test", "--force")
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["test", "train"]
    built(tmp_path / "saved", tmp_path / "fresh", "--split", "train,test")
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_a_folder_that_no_build_made_is_never_swept(splits: datasets.DatasetDict, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out")
    built(DEMO, tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / "out" / "test")
    splits.save_to_disk(tmp_path / "saved")
    run = build(tmp_path / "saved", tmp_path / "out", "--split", "all", "--force")
    assert run.code == 2 and "holds 'test', which padless did not write" in run.err
    assert_verified(tmp_path / "out" / "test")


def test_repack_keeps_the_splits_and_how_each_is_packed(splits: datasets.DatasetDict, tmp_path: Path) -> None:
    splits.save_to_disk(tmp_path / "saved")
    built(tmp_path / "saved", tmp_path / "a", "--split", "all")
    assert pack("repack", tmp_path / "a", "--output", tmp_path / "b", "--seed", 3).code == 0
    built(tmp_path / "saved", tmp_path / "fresh", "--split", "all", "--seed", 3)
    assert content(tmp_path / "b") == content(tmp_path / "fresh")


def test_a_packed_folder_is_no_source_in_any_form(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "of" / "one")
    built(DEMO, tmp_path / "splits", "--eval-fraction", 0.2)
    one, (shard,) = tmp_path / "of" / "one", (tmp_path / "of" / "one").glob("*.arrow")
    for source, folder in (
        (one, one),
        (tmp_path / "of", one),
        (shard, one),
        (one / "*.arrow", one),
        (tmp_path / "splits", tmp_path / "splits"),
        (tmp_path / "splits" / "train", tmp_path / "splits" / "train"),
    ):
        run = build(source, tmp_path / "out")
        assert run.code == 2 and f"pack-dataset repack {folder} --output DIR" in run.err, run.err
    (one / ".work").mkdir()
    (one / "manifest.json").unlink()
    run = build(one, tmp_path / "out")
    assert run.code == 2 and "a packed folder that was never finished" in run.err


def test_a_packed_folder_beside_data_is_passed_over(tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "a.jsonl", demo_rows()[:5])
    built(DEMO, tmp_path / "data" / "packed")
    assert built(tmp_path / "data", tmp_path / "out")["records"] == 5
