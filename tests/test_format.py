"""The manifest: deterministic, checked on reading, and strict about whatever points elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed import Folder, count_up, edit_manifest, write_folder, write_splits, xxh3

from padless.runtime.format import (
    ChecksumError,
    ColumnInfo,
    FileInfo,
    FormatError,
    Manifest,
    ManifestError,
    NotPackedError,
    PadlessError,
    ShardInfo,
    SourceInfo,
    SplitError,
    SplitInfo,
    SplitsManifest,
    TableInfo,
    VersionError,
    checksum_bytes,
    checksum_file,
    load_manifest,
    open_folder,
    parse_type,
    read_manifest,
    schema_of,
    shard_columns,
    shard_schema,
)

XXH3 = "xxh3:" + "0" * 32


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "shards": (
            ShardInfo(
                file="shard-00000-00000000.arrow",
                packs=3,
                sequences=5,
                tokens=40,
                bytes=4096,
                checksum=XXH3,
                batches=((176, 2), (1024, 1)),
            ),
        ),
        "sequence_tables": (TableInfo(file="sequences.parquet", lines=5, bytes=100, checksum=XXH3),),
        "tokenizer_files": (FileInfo(file="tokenizer/tokenizer.json", bytes=2, checksum=XXH3),),
        "tokenizer_fingerprint": "sha256:" + "0" * 64,
        "vocab_size": 300,
        "largest_id": 299,
        "chat_template_checksum": None,
        "columns": shard_columns("uint16", labels=True),
        "options": {"max_length": 16, "strategy": "bfd"},
        "sources": (SourceInfo(path="a.jsonl", bytes=9, checksum=XXH3, records=5),),
        "seed": 0,
        "statistics": {
            "max_length": 16,
            "sequences": 5,
            "packs": 3,
            "bound_packs": 3,
            "tokens": 40,
            "trained_tokens": 30,
            "masked_tokens": 10,
            "cut_tokens": 0,
            "empty_replies": 0,
            "records": {"in": 5, "whole": 5, "truncated": 0, "split": 0, "dropped": 0},
            "dropped_by_reason": {},
            "cut_by_reason": {},
        },
        "plan_hash": XXH3,
        "padless_version": "0.1.0",
        "pyarrow_version": "26.0.1",
    }
    return Manifest(**(fields | changes))


def changed(**keys: Any) -> bytes:
    return json.dumps(json.loads(manifest().to_json()) | keys).encode()


def test_a_manifest_comes_back_as_it_was_written() -> None:
    written = manifest()
    assert Manifest.from_json(written.to_json(), "here") == written


def test_the_order_of_options_does_not_change_the_bytes() -> None:
    forward = manifest(options={"a": 1, "b": {"c": 2, "d": 3}}).to_json()
    backward = manifest(options={"b": {"d": 3, "c": 2}, "a": 1}).to_json()
    assert forward == backward
    assert forward.startswith(b'{\n "chat_template": {\n') and forward.endswith(b"\n}\n")


def test_splits_come_back_as_they_were_written() -> None:
    written = SplitsManifest(
        splits=(SplitInfo(name="train", bytes=10, checksum=XXH3),), padless_version="0.1.0"
    )
    assert SplitsManifest.from_json(written.to_json(), "here") == written


def test_unknown_keys_are_ignored() -> None:
    shards = json.loads(manifest().to_json())["shards"]
    data = changed(novelty={"x": 1}, shards=[shards[0] | {"colour": "red"}])
    assert Manifest.from_json(data, "here") == manifest()


def test_a_file_name_that_is_no_text_survives() -> None:
    odd = manifest(sources=(SourceInfo(path="\udcff.txt", bytes=1, checksum=XXH3, records=1),))
    assert Manifest.from_json(odd.to_json(), "here") == odd


def test_a_later_version_is_refused_with_both_versions() -> None:
    with pytest.raises(VersionError, match="version 2, this padless reads up to 1; upgrade"):
        Manifest.from_json(changed(version=2), "manifest.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": "other"}', b"[" * 100_000, b"9" * 5000],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError, match="somewhere"):
        Manifest.from_json(data, "somewhere")


@pytest.mark.parametrize("version", [True, 0, -1, "1", 1.0, None])
def test_a_version_is_a_positive_whole_number(version: object) -> None:
    with pytest.raises(ManifestError, match="version"):
        Manifest.from_json(changed(version=version), "here")


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        "a\\b",
        "C:a",
        "a\0b",
        "a\nb",
        "\udcff",
        "x" * 256,
        "\u00e9" * 128,
        3,
        None,
    ],
)
def test_file_names_cannot_leave_the_folder(name: object) -> None:
    content = json.loads(manifest().to_json())
    shard = content["shards"][0] | {"file": name}
    table = content["sequence_tables"][0] | {"file": name}
    for key, value in (("shards", [shard]), ("sequence_tables", [table])):
        with pytest.raises(ManifestError, match="file must be"):
            Manifest.from_json(changed(**{key: value}), "here")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer/../x", "tokenizer/..", "tokenizer/"])
def test_tokenizer_files_lie_just_below_tokenizer(name: str) -> None:
    tokenizer = json.loads(manifest().to_json())["tokenizer"]
    tokenizer["files"][0]["file"] = name
    with pytest.raises(ManifestError, match="tokenizer/NAME"):
        Manifest.from_json(changed(tokenizer=tokenizer), "here")


@pytest.mark.parametrize("value", [-1, 2**61, 10**400, 1.5, True, "1", None, [], {}])
@pytest.mark.parametrize("key", ["packs", "sequences", "tokens", "bytes"])
def test_counts_are_whole_and_not_negative(key: str, value: object) -> None:
    shard = json.loads(manifest().to_json())["shards"][0] | {key: value}
    with pytest.raises(ManifestError, match=rf"shards\[0\]\.{key}"):
        Manifest.from_json(changed(shards=[shard]), "here")


@pytest.mark.parametrize(
    "batches",
    [
        [],
        [[176, 2]],
        [[176, 4]],
        [[176, 2], [176, 1]],
        [[1024, 2], [176, 1]],
        [[176, 2], [4096, 1]],
        [[-8, 3]],
        [[176, 3, 1]],
        [[176, True], [200, 2]],
        [[176, 4], [200, -1]],
        "ab",
    ],
)
def test_record_batches_lie_in_the_file_and_hold_the_shards_packs(batches: object) -> None:
    shard = json.loads(manifest().to_json())["shards"][0] | {"batches": batches}
    with pytest.raises(ManifestError, match="batches"):
        Manifest.from_json(changed(shards=[shard]), "here")


def test_a_file_listed_twice_is_refused() -> None:
    shard = json.loads(manifest().to_json())["shards"][0]
    with pytest.raises(ManifestError, match="listed twice"):
        Manifest.from_json(changed(shards=[shard, shard]), "here")


@pytest.mark.parametrize(
    "column",
    [
        {"name": "reward", "level": "sequence", "type": "float32"},
        {"name": "reward", "level": "sequence", "type": "list<fixed_size_list<float32, 2>>"},
        {"name": "reward", "level": "row", "type": "float32"},
        {"name": "reward", "level": "token", "type": "list<object>"},
        {"name": "reward", "level": "token", "type": "list<fixed_size_list<float32, 0>>"},
        {"name": "labels", "level": "token", "type": "list<int64>"},
        {"name": "labels", "level": "sequence", "type": "list<int32>"},
        {"name": "num_tokens", "level": "pack", "type": "int64"},
    ],
)
def test_a_column_of_no_known_level_or_type_is_refused(column: dict[str, str]) -> None:
    columns = [vars(info) for info in shard_columns("uint16", labels=False)] + [column]
    with pytest.raises(ManifestError, match="columns"):
        Manifest.from_json(changed(columns=columns), "here")


def test_a_manifest_without_a_column_of_the_format_is_refused() -> None:
    columns = [vars(info) for info in shard_columns("int32", labels=True)]
    columns = [column for column in columns if column["name"] != "seq_lengths"]
    with pytest.raises(ManifestError, match="seq_lengths"):
        Manifest.from_json(changed(columns=columns), "here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(key=st.sampled_from(sorted(json.loads(manifest().to_json()))), value=json_values)
def test_no_value_of_a_key_does_more_than_raise_a_format_error(key: str, value: object) -> None:
    try:
        read = Manifest.from_json(changed(**{key: value}), "here")
    except FormatError as problem:
        assert "here" in str(problem)
    else:
        assert Manifest.from_json(read.to_json(), "here") == read


def test_columns_stand_in_the_order_of_the_specification() -> None:
    extra = ColumnInfo(name="reward", level="sequence", type="list<float32>")
    names = [column.name for column in shard_columns("uint16", labels=True, extras=[extra])]
    lists = ["input_ids", "labels", "seq_lengths", "sequence_ids", "reward"]
    assert names == [*lists, "num_tokens", "num_targets", "max_seqlen", "attention_cost"]
    schema = shard_schema("int32", labels=False)
    assert "labels" not in schema.names
    assert schema.field("input_ids").type == pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("name", "arrow"),
    [
        ("bool", pa.bool_()),
        ("float16", pa.float16()),
        ("list<string>", pa.list_(pa.string())),
        ("list<fixed_size_list<float32, 8>>", pa.list_(pa.list_(pa.float32(), 8))),
    ],
)
def test_types_are_read_as_they_are_spelled(name: str, arrow: pa.DataType) -> None:
    assert parse_type(name) == arrow
    assert schema_of([ColumnInfo(name="x", level="pack", type=name)]).field("x").type == arrow


@pytest.mark.parametrize("name", ["", "list<>", "list<list<int32>>", "timestamp", "list<int32"])
def test_no_other_type_is_read(name: str) -> None:
    with pytest.raises(ValueError, match="no column type"):
        parse_type(name)


def test_a_checksum_names_its_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"padless")
    assert checksum_file(tmp_path / "file") == checksum_bytes(b"padless") == xxh3(b"padless")


def test_a_folder_without_a_manifest_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(NotPackedError, match=r"no manifest\.json"):
        read_manifest(tmp_path)
    with pytest.raises(NotPackedError, match="no folder"):
        read_manifest(tmp_path / "nothing")
    (tmp_path / ".work").mkdir()
    with pytest.raises(NotPackedError, match="run the same pack-dataset build again"):
        read_manifest(tmp_path)


def test_a_folder_around_packed_folders_names_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "mine", Folder(packs=[count_up(3)]))
    with pytest.raises(NotPackedError, match="packed folders inside: mine"):
        read_manifest(tmp_path)


def test_a_folder_of_splits_lists_them_and_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    folder = Folder(packs=[count_up(3)])
    write_splits(path, {"train": folder, "validation": folder})
    with pytest.raises(SplitError, match=r"\(train, validation\): name one, as .*packed/train or"):
        read_manifest(path)
    with pytest.raises(SplitError, match="no split 'test'; it has: train, validation"):
        read_manifest(path, "test")
    with pytest.raises(SplitError, match="is a single split: leave split='train' out"):
        read_manifest(path / "train", "train")
    found, one = open_folder(path, "validation")
    assert found == path / "validation" and one.num_packs == 1
    assert load_manifest(path).kind == "splits"


def test_a_split_that_was_rebuilt_alone_is_noticed(tmp_path: Path) -> None:
    write_splits(tmp_path / "packed", {"train": Folder(packs=[count_up(3)])})
    edit_manifest(tmp_path / "packed" / "train", lambda content: content.update(seed=1))
    with pytest.raises(ChecksumError, match=r"train/manifest\.json"):
        read_manifest(tmp_path / "packed", "train")


def test_the_independent_writer_of_the_tests_writes_what_format_reads(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(3, 2)]))
    read = read_manifest(tmp_path / "packed")
    assert read.num_packs == 1 and read.has_labels and read.extras == ()


def test_every_error_is_a_padless_error_and_a_value_error() -> None:
    assert issubclass(FormatError, PadlessError) and issubclass(FormatError, ValueError)


def test_importing_the_format_loads_neither_pyarrow_nor_numpy() -> None:
    code = (
        "import sys, padless.runtime.format\n"
        "print(sorted({'pyarrow', 'numpy', 'xxhash', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("change", ["lost", "reversed", "twice"])
def test_a_list_that_lacks_shards_or_has_them_in_another_order_is_refused(
    tmp_path: Path, change: str
) -> None:
    write_folder(
        tmp_path / "packed", Folder(packs=[count_up(2, first=n) for n in range(6)], packs_per_shard=2)
    )

    def edit(manifest: dict[str, Any]) -> None:
        shards = manifest["shards"]
        manifest["shards"] = {
            "lost": shards[:-1],
            "reversed": shards[::-1],
            "twice": [*shards[:2], shards[2] | {"file": shards[1]["file"].replace("00001", "00009")}],
        }[change]

    edit_manifest(tmp_path / "packed", edit)
    words = "statistics.packs is 6, and the shards listed hold 4" if change == "lost" else "belongs elsewhere"
    with pytest.raises(ManifestError, match=words):
        load_manifest(tmp_path / "packed")


@pytest.mark.parametrize("key", ["packs", "sequences", "tokens"])
def test_statistics_that_are_not_the_shards_sums_are_refused(key: str) -> None:
    statistics = manifest().statistics
    with pytest.raises(ManifestError, match=f"statistics.{key} is 2, and the shards listed hold"):
        Manifest.from_json(changed(statistics={**statistics, key: 2}), "here")
