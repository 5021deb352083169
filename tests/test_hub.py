"""Data sets and tokenizers of the Hub, against a stand-in of its HTTP interface; no network."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import (
    DEMO,
    MAX_LENGTH,
    TOKENIZER,
    assert_verified,
    build,
    built,
    demo_rows,
    files_of,
    pack,
    run_script,
    sequence_table,
    write_lines,
)
from hub_stand_in import Repository, StandIn, commit_of, stand_in

from padless.packer import hub as hub_module
from padless.runtime.format import read_manifest

NAME = "yahma/alpaca-cleaned"
CARD = b"---\nlicense: mit\n---\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def texts(count: int) -> bytes:
    return lines([{"text": f"line {number}"} for number in range(count)])


def offer(hub: StandIn, files: dict[str, bytes], name: str = NAME, **more: Any) -> None:
    hub.repositories[f"datasets/{name}"] = Repository.of({"README.md": CARD, **files}, **more)


def content_of(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    facts = (manifest.shards, manifest.plan_hash, manifest.statistics, manifest.options)
    return {"facts": facts, "table": sequence_table(folder)}


def records(hub: StandIn, output: Path, *options: object) -> int:
    found: int = built(NAME, output, *options)["records"]
    return found


# -- what is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "jsonl", "jsonl.gz", "parquet"])
def test_a_data_set_on_the_hub_packs_like_the_file_it_holds(hub: StandIn, form: str, tmp_path: Path) -> None:
    import gzip

    data = {
        "json": json.dumps(demo_rows()).encode(),
        "jsonl": DEMO.read_bytes(),
        "jsonl.gz": gzip.compress(DEMO.read_bytes(), mtime=0),
        "parquet": parquet(demo_rows()),
    }[form]
    offer(hub, {f"alpaca_data_cleaned.{form}": data, "LICENSE.txt": b"MIT"})
    built(NAME, tmp_path / "hub")
    built(DEMO, tmp_path / "file")
    assert content_of(tmp_path / "hub") == content_of(tmp_path / "file")
    assert_verified(tmp_path / "hub")
    (source,) = read_manifest(tmp_path / "hub").sources
    assert source.path == f"hf://datasets/{NAME}/alpaca_data_cleaned.{form}"
    assert (source.revision, source.bytes) == (commit_of("main"), len(data))
    assert source.checksum.startswith("sha256:")


def test_a_second_run_lists_the_hub_and_fetches_nothing(hub: StandIn, tmp_path: Path) -> None:
    offer(hub, {"train.jsonl": DEMO.read_bytes()})
    built(NAME, tmp_path / "out")
    hub.requests.clear()
    built(NAME, tmp_path / "out")
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path or "/storage/" in path]
    offer(hub, {"train.jsonl": texts(3)})
    run = build(NAME, tmp_path / "out")
    assert run.code == 2 and "train.jsonl has changed" in run.err


def test_a_repack_keeps_the_revision_that_was_read(hub: StandIn, tmp_path: Path) -> None:
    offer(hub, {"train.jsonl": DEMO.read_bytes()})
    built(NAME, tmp_path / "long")
    built(NAME, tmp_path / "fresh", "--strategy", "spread")
    run = pack("repack", tmp_path / "long", "--strategy", "spread", "--output", tmp_path / "again")
    assert run.code == 0, run.err
    assert files_of(tmp_path / "again") == files_of(tmp_path / "fresh")


def test_an_existing_path_wins_over_the_hub(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(hub, {"train.jsonl": texts(9)})
    write_lines(tmp_path / NAME / "a.jsonl", demo_rows()[:4])
    monkeypatch.chdir(tmp_path)
    assert records(hub, tmp_path / "out") == 4
    assert not hub.requests


def test_a_limit_stops_the_download(hub: StandIn, tmp_path: Path) -> None:
    offer(hub, {"train.jsonl": texts(600_000)})
    assert records(hub, tmp_path / "out", "--limit", 5) == 5
    assert hub.sent < 100_000  # the listings; the file did not go out to its end


def test_a_revision_is_read_and_recorded(hub: StandIn, tmp_path: Path) -> None:
    hub.repositories[f"datasets/{NAME}"] = Repository(
        commits={commit_of("old"): {"train.jsonl": texts(3)}, commit_of("new"): {"train.jsonl": texts(5)}},
        refs={"main": commit_of("new"), "v1": commit_of("old")},
    )
    for revision, count, commit in (
        (None, 5, commit_of("new")),
        ("v1", 3, commit_of("old")),
        (commit_of("old"), 3, commit_of("old")),
    ):
        output = tmp_path / str(revision)
        assert records(hub, output, *(("--revision", revision) if revision else ())) == count
        assert read_manifest(output).sources[0].revision == commit
    run = build(NAME, tmp_path / "no", "--revision", "v9")
    assert run.code == 2 and f"{NAME} at revision v9 does not exist" in run.err


# -- which files are a split ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        ({"a.jsonl": 2, "b.jsonl": 3}, {"train": 5}),
        ({"train.jsonl": 2, "test.jsonl": 3, "dev.jsonl": 4}, {"train": 2, "test": 3, "validation": 4}),
        ({"data/train/x.jsonl": 2, "data/valid/x.jsonl": 3}, {"train": 2, "validation": 3}),
        (
            {"data/train_sft-00000-of-00002.jsonl": 2, "data/train_sft-00001-of-00002.jsonl": 3},
            {"train_sft": 5},
        ),
        ({"trainers.jsonl": 2}, {"train": 2}),
        ({"train.jsonl": 2, "dataset_infos.json": 1, ".cache/train.jsonl": 9}, {"train": 2}),
    ],
)
def test_splits_are_told_by_the_names_of_the_files(
    hub: StandIn, files: dict[str, int], splits: dict[str, int], tmp_path: Path
) -> None:
    offer(hub, {name: texts(count) for name, count in files.items()})
    for split, count in splits.items():
        assert records(hub, tmp_path / split, "--split", split) == count
    run = build(NAME, tmp_path / "no", "--split", "other")
    assert run.code == 2 and "no split 'other'" in run.err
    assert set(run.err.partition("--split: ")[2].strip().split(", ")) == set(splits)


def test_subsets_and_their_splits_are_those_of_the_card(hub: StandIn, tmp_path: Path) -> None:
    files = {"a/one.jsonl": 2, "a/two.jsonl": 3, "b/train.jsonl": 4, "b/test.jsonl": 5, "c/deep/x.jsonl": 6}
    configs: list[dict[str, Any]] = [
        {"config_name": "a", "data_files": [{"split": "train", "path": "a/*.jsonl"}]},
        {"config_name": "b", "data_dir": "b"},
        {"config_name": "c", "data_files": "c/**"},
    ]
    data = {name: texts(count) for name, count in files.items()}
    offer(hub, data, card={"configs": configs})
    run = build(NAME, tmp_path / "no")
    assert run.code == 2 and "choose one with --subset: a, b, c" in run.err
    run = build(NAME, tmp_path / "no", "--subset", "d")
    assert run.code == 2 and "no subset 'd'; it has: a, b, c" in run.err
    for subset, split, count in (("a", "train", 5), ("b", "train", 4), ("b", "test", 5), ("c", "train", 6)):
        output = tmp_path / f"{subset}-{split}"
        assert records(hub, output, "--subset", subset, "--split", split) == count
    offer(hub, data, card={"configs": [*configs[1:], {**configs[0], "default": True}]})
    assert records(hub, tmp_path / "default") == 5


def test_the_hubs_own_conversion_has_its_subsets_in_folders(hub: StandIn, tmp_path: Path) -> None:
    rows = demo_rows()
    files = {"main/train/0000.parquet": parquet(rows[:4]), "extra/test/0000.parquet": parquet(rows[:2])}
    offer(hub, {"build.py": b"raise SystemExit"})
    repository = hub.repositories[f"datasets/{NAME}"]
    repository.commits[commit_of("converted")] = files
    repository.refs["refs/convert/parquet"] = commit_of("converted")
    run = build(NAME, tmp_path / "no")
    assert run.code == 2 and "README.md, build.py" in run.err and "--revision refs/convert/parquet" in run.err
    converted = ("--revision", "refs/convert/parquet", "--subset")
    assert records(hub, tmp_path / "a", *converted, "main") == 4
    assert records(hub, tmp_path / "b", *converted, "extra", "--split", "test") == 2


def test_a_set_to_evaluate_on_gives_its_validation_split(hub: StandIn, tmp_path: Path) -> None:
    rows = demo_rows()
    offer(hub, {"train.jsonl": lines(rows[:9]), "validation.jsonl": lines(rows[9:14])})
    built(NAME, tmp_path / "out", "--eval-source", NAME)
    run = build(DEMO, tmp_path / "no", "--eval-source", NAME, "--split", "test")
    assert run.code == 2 and "--split test does not apply" in run.err
    for split, count in (("train", 9), ("validation", 5)):
        assert read_manifest(tmp_path / "out" / split).statistics["records"]["in"] == count


# -- what goes wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gated": True}, "is gated: ask for access on https://huggingface.co/datasets/yahma/alpaca-cleaned"),
        ({"private": True}, "is not on the Hub; see how it is spelled (if it is private: log in"),
        (None, "there is no path of that name here, and the data set yahma/alpaca-cleaned is not on the Hub"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_data_set_that_may_not_be_read_is_told_apart(
    hub: StandIn, how: dict[str, bool] | None, message: str, form: str, tmp_path: Path
) -> None:
    if how is not None:
        data = DEMO.read_bytes() if form == "jsonl" else parquet(demo_rows())
        offer(hub, {f"train.{form}": data}, **how)
    run = build(NAME, tmp_path / "out")
    assert run.code == 2 and message in run.err, run.err
    assert not (tmp_path / "out").exists()


def test_a_mistyped_path_does_not_ask_the_hub(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "data" / "alpaca_clean" / "x.jsonl", demo_rows()[:2])
    monkeypatch.chdir(tmp_path)
    for spelled, message in (
        ("data/x.json", "there is no file data/x.json"),
        ("data/alpaca_claen", "near it: data/alpaca_clean"),
        ("../data", "there is no file ../data"),
    ):
        run = build(spelled, tmp_path / "out")
        assert run.code == 2 and message in run.err, run.err
    assert not hub.requests


def test_offline_is_told_with_the_way_out(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(hub, {"train.jsonl": texts(3)})
    options = ("--tokenizer", TOKENIZER, "--max-length", MAX_LENGTH, "--output", tmp_path / "out")
    run = run_script("build", NAME, *options, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    assert run.code == 2 and "HF_HUB_OFFLINE forbids to fetch it" in run.err, run.err
    assert f"hf download --repo-type dataset {NAME} --local-dir FOLDER" in run.err
    assert not hub.requests


def test_no_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    run = build(NAME, tmp_path / "out")
    assert run.code == 2 and "could not be fetched from the Hub" in run.err and "HF_ENDPOINT" in run.err


def test_a_broken_connection_keeps_what_is_finished(hub: StandIn, tmp_path: Path) -> None:
    data = texts(100_000)
    offer(hub, {"train.jsonl": data})
    hub.cut_after = len(data) // 2 + 1000
    hub.cut_ranges_after = 1000
    run = build(NAME, tmp_path / "out")
    assert run.code == 2 and "stopped coming" in run.err and "the same command goes on" in run.err, run.err
    assert (tmp_path / "out" / ".work").is_dir()
    hub.cut_after = hub.cut_ranges_after = None
    built(NAME, tmp_path / "out")
    (tmp_path / "train.jsonl").write_bytes(data)
    built(tmp_path / "train.jsonl", tmp_path / "file")
    assert content_of(tmp_path / "out") == content_of(tmp_path / "file")


def test_a_connection_that_breaks_once_is_made_again(hub: StandIn, tmp_path: Path) -> None:
    data = texts(100_000)
    offer(hub, {"train.jsonl": data})
    hub.cut_after = len(data) // 2 + 1000
    assert records(hub, tmp_path / "out") == 100_000
    assert any(part for _, path, part in hub.requests if "/storage/" in path)


def test_an_address_names_files_of_the_hub(hub: StandIn, tmp_path: Path) -> None:
    offer(hub, {"data/a.jsonl": texts(3), "data/b.jsonl": texts(4), "other.jsonl": texts(8), "x.bin": b"x"})
    address = f"hf://datasets/{NAME}"
    for path, count in (("/data/*.jsonl", 7), ("@main/data/b.jsonl", 4), ("/data", 7)):
        found = built(address + path, tmp_path / str(abs(hash(path))))
        assert found["records"] == count
    for path in ("/data/c.jsonl", "/x.bin"):
        run = build(address + path, tmp_path / "none")
        assert run.code == 2 and f"{address}{path} is" in run.err and "data/a.jsonl" in run.err, run.err


# -- tokenizers ----------------------------------------------------------------------------------------


def test_a_tokenizer_of_the_hub_packs_like_its_folder_and_is_cached(hub: StandIn, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in TOKENIZER.iterdir()}
    hub.repositories["models/org/model"] = Repository.of({"model.safetensors": b"x" * 9000, **files})
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = ("build", DEMO, "--tokenizer", "org/model", "--max-length", MAX_LENGTH, "--output")
    run = run_script(*command, tmp_path / "hub", **environment)
    assert run.code == 0, run.err
    assert not [path for _, path, _ in hub.requests if "safetensors" in path]
    hub.requests.clear()
    run = run_script(*command, tmp_path / "offline", HF_HUB_OFFLINE="1", **environment)
    assert run.code == 0 and not hub.requests, run.err
    built(DEMO, tmp_path / "folder")
    manifests = [(tmp_path / name / "manifest.json").read_bytes() for name in ("hub", "offline", "folder")]
    assert manifests[0] == manifests[1] == manifests[2]
    run = run_script(
        *command[:3], "org/other", *command[4:], tmp_path / "no", HF_HUB_OFFLINE="1", **environment
    )
    assert run.code == 2 and "HF_HUB_OFFLINE forbids" in run.err and "hf download org/other" in run.err


def test_a_tokenizer_that_is_not_there_or_gated_is_told(hub: StandIn, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in TOKENIZER.iterdir()}
    hub.repositories["models/org/gated"] = Repository.of(files, gated=True)
    for name, message in (
        ("org/none", "the tokenizer org/none is not on the Hub"),
        ("org/gated", "the tokenizer org/gated is gated: ask for access on https://huggingface.co/org/gated"),
    ):
        run = build(DEMO, tmp_path / "out", "--tokenizer", name)
        assert run.code == 2 and message in run.err, run.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", True),
        ("Qwen/Qwen3-8B", True),
        ("a", False),
        ("a/b/c", False),
        ("../b", False),
        ("a b/c", False),
    ],
)
def test_what_is_spelled_like_a_name_on_the_hub(text: str, expected: bool) -> None:
    assert hub_module.is_hub_id(text) is expected
