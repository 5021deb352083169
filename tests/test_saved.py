"""Folders of `save_to_disk` and `datasets` objects as sources: the packs of the file they came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from building import DEMO, MAX_LENGTH, TOKENIZER, build, built, demo_rows, sequence_table, write_lines

from padless.packer import PackConfig, pack_dataset
from padless.packer.errors import InputError
from padless.runtime.format import Manifest, read_manifest

datasets.disable_progress_bars()


def content_of(folder: Path) -> dict[str, Any]:
    """What a packed folder says of everything but the source."""
    manifest = read_manifest(folder)
    table = sequence_table(folder)
    return {
        "shards": manifest.shards,
        "plan": manifest.plan_hash,
        "statistics": manifest.statistics,
        "options": manifest.options,
        "table": {name: values for name, values in table.items() if name not in ("source", "row")},
    }


def pack_object(value: Any, output: Path, **options: Any) -> Any:
    common: dict[str, Any] = {"tokenizer": str(TOKENIZER), "max_length": MAX_LENGTH, "output": str(output)}
    return pack_dataset(PackConfig(sources=(value,), **common, **options))


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list(demo_rows())


@pytest.fixture(scope="module")
def from_json(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("json") / "out"
    built(DEMO, output)
    return content_of(output)


def test_a_saved_folder_packs_like_its_json_and_its_parquet_file(
    rows: datasets.Dataset, from_json: dict[str, Any], tmp_path: Path
) -> None:
    rows.save_to_disk(tmp_path / "saved", num_shards=3)
    built(tmp_path / "saved", tmp_path / "a")
    manifest = read_manifest(tmp_path / "a")
    assert [source.path for source in manifest.sources] == [f"data-0000{n}-of-00003.arrow" for n in range(3)]
    rows.save_to_disk(tmp_path / "one")
    built(tmp_path / "one", tmp_path / "b")
    rows.to_parquet(tmp_path / "demo.parquet")
    built(tmp_path / "demo.parquet", tmp_path / "c")
    assert content_of(tmp_path / "b") == content_of(tmp_path / "c") == from_json
    a = content_of(tmp_path / "a")
    counts = a["statistics"].pop("by_source")  # of three files instead of one
    (whole,) = from_json["statistics"]["by_source"]
    assert {key: sum(count[key] for count in counts) for key in whole} == whole
    a["statistics"]["by_source"] = [whole]
    assert {**a, "options": {**a["options"], "formats": ["alpaca"]}} == from_json
    assert sequence_table(tmp_path / "b") == sequence_table(tmp_path / "c")


def test_a_split_of_a_saved_dict_is_chosen_by_name(rows: datasets.Dataset, tmp_path: Path) -> None:
    splits = datasets.DatasetDict(train=rows, test=rows.select(range(7)))
    splits.save_to_disk(tmp_path / "dict")
    assert built(tmp_path / "dict", tmp_path / "train")["records"] == len(rows)
    assert built(tmp_path / "dict", tmp_path / "test", "--split", "test")["records"] == 7
    run = build(tmp_path / "dict", tmp_path / "no", "--split", "dev")
    assert run.code == 2 and "no split 'dev'" in run.err and "train, test" in run.err
    assert pack_object(splits, tmp_path / "object", split="test").statistics["records"]["in"] == 7
    with pytest.raises(InputError, match="no split 'dev'; choose with --split: train, test"):
        pack_object(splits, tmp_path / "no", split="dev")


def test_datasets_objects_pack_like_their_file(
    rows: datasets.Dataset, from_json: dict[str, Any], tmp_path: Path
) -> None:
    backwards = rows.select(range(len(rows) - 1, -1, -1))
    forms = {
        "dataset": rows,
        "selected twice": backwards.select(range(len(rows) - 1, -1, -1)),
        "splits": datasets.DatasetDict(train=rows),
        "streamed": rows.to_iterable_dataset(num_shards=3),
        "mapped": rows.to_iterable_dataset().map(lambda row: row),
    }
    for name, value in forms.items():
        pack_object(value, tmp_path / name)
        assert content_of(tmp_path / name) == from_json, name


def test_a_selection_is_packed_in_its_order(rows: datasets.Dataset, tmp_path: Path) -> None:
    chosen = [5, 2, 399, 2]
    pack_object(rows.select(chosen), tmp_path / "selected")
    built(write_lines(tmp_path / "x.jsonl", [demo_rows()[i] for i in chosen]), tmp_path / "file")
    assert content_of(tmp_path / "selected") == content_of(tmp_path / "file")


def test_an_object_of_a_finished_build_is_left_alone_and_a_changed_one_refused(
    rows: datasets.Dataset, tmp_path: Path
) -> None:
    first = pack_object(rows, tmp_path / "out")
    assert isinstance(first, Manifest) and first.sources[0].records == len(rows)
    stamp = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    assert pack_object(rows, tmp_path / "out") == first
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match="has changed"):
        pack_object(rows.select(range(9)), tmp_path / "out")


@pytest.fixture(scope="module")
def photos() -> datasets.Dataset:
    """Texts beside images, which nobody has to decode to pack the texts."""
    shot = datasets.Image(decode=False)
    kinds = {"text": datasets.Value("string"), "shots": datasets.List({"view": shot}), "photo": shot}
    features, view = datasets.Features(kinds), {"bytes": b"x" * 99, "path": None}
    rows = [{"text": f"A horse {n}.", "shots": [{"view": view}], "photo": view} for n in range(9)]
    return datasets.Dataset(pa.Table.from_pylist(rows, schema=features.arrow_schema))


def test_columns_that_must_be_decoded_are_passed_over(photos: datasets.Dataset, tmp_path: Path) -> None:
    photos.save_to_disk(tmp_path / "saved")
    photos.to_parquet(tmp_path / "photos.parquet")
    built(write_lines(tmp_path / "x.jsonl", photos.select_columns("text").to_list()), tmp_path / "json")
    more: dict[str, Any] = {"eval_fraction": 0.5, "labels": "always"}
    for name, source in (
        ("a", str(tmp_path / "saved")),
        ("b", str(tmp_path / "photos.parquet")),
        ("c", photos),
    ):
        pack_object(source, tmp_path / name)
        assert content_of(tmp_path / name) == content_of(tmp_path / "json")
        pack_object(source, tmp_path / f"{name}2", **more)
    pack_object(str(tmp_path / "x.jsonl"), tmp_path / "json2", **more)
    for split in ("train", "validation"):
        assert content_of(tmp_path / "c2" / split) == content_of(tmp_path / "json2" / split)
        assert content_of(tmp_path / "a2" / split) == content_of(tmp_path / "b2" / split)


@pytest.mark.parametrize("column", ["shots", "photo"])
def test_columns_that_must_be_decoded_are_refused_where_they_are_used(
    photos: datasets.Dataset, column: str, tmp_path: Path
) -> None:
    photos.save_to_disk(tmp_path / "saved")
    photos.to_parquet(tmp_path / "photos.parquet")
    named = photos.rename_columns({"text": "about", column: "text"})
    told = "'text' holds Image data, which padless does not read"
    for source in (tmp_path / "saved", tmp_path / "photos.parquet"):
        run = build(source, tmp_path / "out", "--format", "text", "--column", f"text={column}")
        assert run.code == 2 and f"record 0: column '{column}' holds Image data" in run.err, run.err
    with pytest.raises(InputError, match=told):
        pack_object(named, tmp_path / "out")
    with pytest.raises(InputError, match="'messages' holds Image data"):
        pack_object(photos.rename_column(column, "messages"), tmp_path / "out", format="messages")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_data_files": None}, "lists no Arrow files"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "lists no Arrow files"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow is missing"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
        (None, "has no state.json"),
    ],
)
def test_a_saved_folder_that_is_not_whole_is_refused_with_the_reason(
    rows: datasets.Dataset, change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    rows.select(range(3)).save_to_disk(tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    if change is None:
        state.unlink()
    else:
        state.write_text(json.dumps({**json.loads(state.read_text()), **change}))
    run = build(tmp_path / "saved", tmp_path / "out")
    assert run.code == 2 and message in run.err
    assert not (tmp_path / "out").exists()


def test_options_that_no_source_takes_are_refused(rows: datasets.Dataset, tmp_path: Path) -> None:
    rows.select(range(3)).save_to_disk(tmp_path / "saved")
    for source, option in (
        (DEMO, "split"),
        (DEMO, "subset"),
        (DEMO, "revision"),
        (tmp_path / "saved", "split"),
    ):
        run = build(source, tmp_path / "out", f"--{option}", "other")
        assert run.code == 2 and f"--{option} other does not apply" in run.err, source


def test_a_folder_of_records_with_a_dataset_info_is_no_saved_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "a.jsonl", demo_rows()[:3])
    write_lines(tmp_path / "data" / "dataset_info.json", [{"a": {"file_name": "a.jsonl"}}])
    assert built(tmp_path / "data" / "a.jsonl", tmp_path / "out")["records"] == 3
    run = build(tmp_path / "data", tmp_path / "out2")
    assert run.code == 2 and "dataset_info.json" in run.err


def test_a_saved_folder_is_read_without_datasets(rows: datasets.Dataset, tmp_path: Path) -> None:
    rows.save_to_disk(tmp_path / "saved")
    code = (
        "import sys\nfrom padless.packer import PackConfig, pack_dataset\n"
        f"pack_dataset(PackConfig(sources=({str(tmp_path / 'saved')!r},), tokenizer={str(TOKENIZER)!r}, "
        f"max_length={MAX_LENGTH}, output={str(tmp_path / 'out')!r}))\n"
        "heavy = {'datasets', 'torch', 'transformers', 'huggingface_hub', 'numba'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
