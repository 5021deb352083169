"""Builds into a bucket: the files of a local build, committed by the manifest, whatever breaks on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from building import (
    DEMO,
    build,
    build_arguments,
    built,
    demo_rows,
    files_of,
    pack,
    write_lines,
    write_many,
)
from conftest import ROOT
from object_storage import S3, environment_of, s3_server, spoil

from padless.packer import publish
from padless.runtime.reader import PackedReader

LOCK = ".work/lock"
SMALL = ("--shard-size", 2**17)
"""Some shards of the demo set."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        yield server


@pytest.fixture(autouse=True)
def reached(s3: S3, tmp_path: Path) -> Iterator[None]:
    with environment_of(s3, tmp_path / "cache"):
        yield


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the demo set's small shards, built into a folder."""
    folder = tmp_path_factory.mktemp("publish") / "local"
    built(DEMO, folder, *SMALL)
    return files_of(folder)


def shards(files: Any) -> list[str]:
    return sorted(name for name in files if name.endswith(".arrow"))


def left_here(tmp_path: Path) -> list[str]:
    """What builds left of their work on this machine."""
    folder = tmp_path / "cache" / "uploads"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_build_into_a_bucket_leaves_the_files_of_a_local_one(
    s3: S3, local: dict[str, bytes], tmp_path: Path
) -> None:
    url = "s3://bucket/plain"
    found = built(DEMO, url, *SMALL)
    assert found["output"] == url
    assert s3.files("plain") == local
    assert left_here(tmp_path) == []
    assert len(PackedReader(url, verify=True)) == found["packs"]


def test_the_manifest_is_put_last_and_only_where_there_is_none(s3: S3) -> None:
    built(DEMO, "s3://bucket/order", *SMALL)
    puts = [path for method, path in s3.faults.requests if method == "PUT" and "/order/" in path]
    names = [path.partition("/order/")[2] for path in puts]
    assert names[0] == LOCK
    assert names[-1] == "manifest.json"
    first_other = next(n for n, name in enumerate(names[1:]) if not name.startswith("shard-"))
    assert not any(name.startswith("shard-") for name in names[1 + first_other :])


def test_a_bucket_is_reported_and_inspected_like_a_folder(s3: S3, tmp_path: Path) -> None:
    for output in (url := "s3://bucket/looked-at", tmp_path / "local"):
        built(DEMO, output, *SMALL)
    for command in (("report",), ("inspect", "--pack", "3"), ("inspect", "--text", "the")):
        there, here = (pack(command[0], at, *command[1:], "--json") for at in (url, tmp_path / "local"))
        assert there.code == here.code == 0, there.err
        assert {**there.json, "path": ""} == {**here.json, "path": ""}
    assert pack("report", url, "--json").json["path"] == url
    for command in (("verify", url, "--trainer", "trl"), ("report", url, "--card")):
        run = pack(*command)
        assert run.code == 2 and f"{url} is a URL" in run.err, run.err


def test_a_bucket_is_verified_like_a_folder(s3: S3, tmp_path: Path) -> None:
    for output in (url := "s3://bucket/verified", folder := tmp_path / "local"):
        built(DEMO, output, *SMALL, "--eval-fraction", 0.1)
    there, here = (pack("verify", at, "--json") for at in (url, folder))
    assert there.code == here.code == 0, there.err
    assert there.out.replace(url, "HERE") == here.out.replace(str(folder), "HERE")
    s3.system.pipe_file("bucket/verified/train/shard-00009-00000000.arrow", b"a stranger")
    again = pack("verify", url, "--json")
    assert (
        again.json["ok"] and "shard-00009-00000000.arrow is not in the manifest" in again.json["warnings"][0]
    )
    assert pack("verify", f"{url}/validation").code == pack("verify", url, "--split", "train").code == 0
    run = pack("verify", url, "--plan", "nope")
    assert run.code == 2 and f"{url}/train has no plan 'nope'" in run.err


@pytest.mark.parametrize("how", ["missing", "cut", "changed"])
def test_what_happened_to_an_object_since_it_was_read_is_found(
    s3: S3, local: dict[str, bytes], how: str
) -> None:
    built(DEMO, url := f"s3://bucket/spoilt-{how}", *SMALL)
    assert pack("verify", url).code == 0  # the cache has it from now on
    name = shards(local)[0]
    spoil(s3.system, f"{url.removeprefix('s3://')}/{name}", how)
    found = pack("verify", url, "--json")
    assert found.code == 1
    assert [check["name"] for check in found.json["checks"] if not check["ok"]] == ["files"]
    assert f"{url}/{name}" in found.json["checks"][0]["detail"]


def test_a_split_whose_manifest_was_changed_is_found(s3: S3) -> None:
    built(DEMO, url := "s3://bucket/splits-changed", "--eval-fraction", 0.1)
    spoil(s3.system, "bucket/splits-changed/validation/manifest.json", "changed")
    found = pack("verify", url, "--json")
    failed = [check for check in found.json["checks"] if not check["ok"]]
    assert found.code == 1 and [check["name"] for check in failed] == ["validation: manifest"]
    assert f"{url}/validation/manifest.json" in failed[0]["detail"]


def test_what_is_no_folder_behind_a_url_is_told(s3: S3) -> None:
    run = pack("verify", "s3://bucket/nothing")
    assert run.code == 2 and "s3://bucket/nothing has no manifest.json" in run.err


def test_an_export_goes_from_bucket_to_bucket_as_from_folder_to_folder(s3: S3, tmp_path: Path) -> None:
    for output in (url := "s3://bucket/exported", tmp_path / "packed"):
        built(DEMO, output)
    to = ("--to", "parquet", "--shard-size", 2**15)
    assert pack("export", tmp_path / "packed", *to, "--output", tmp_path / "out").code == 0
    run = pack("export", url, *to, "--output", "s3://bucket/export", "--json")
    assert run.code == 0 and not run.json["was_there"], run.err
    assert run.json["output"] == "s3://bucket/export"
    here, there = files_of(tmp_path / "out"), s3.files("export")
    assert {**there, "README.md": b""} == {**here, "README.md": b""}
    puts = [
        path.partition("/export/")[2]
        for how, path in s3.faults.requests
        if how == "PUT" and "/export/" in path
    ]
    assert puts[0] == "export.unfinished.json" and puts[-1] == "export.json"
    assert not os.listdir(tmp_path / "cache" / "exports")
    assert pack("export", url, *to, "--output", "s3://bucket/export", "--json").json["was_there"]


def test_another_export_is_refused_unless_forced_and_then_leaves_nothing_of_the_first(
    s3: S3, tmp_path: Path
) -> None:
    built(DEMO, tmp_path / "packed")
    export = ("export", tmp_path / "packed", "--output", "s3://bucket/export-forced", "--to")
    assert pack(*export, "parquet").code == 0
    run = pack(*export, "unpacked")
    assert run.code == 2 and "in another form (parquet)" in run.err and "--force" in run.err
    assert pack(*export, "unpacked", "--force").code == 0
    assert not any(name.endswith(".parquet") for name in s3.files("export-forced"))
    s3.system.rm_file(
        f"bucket/export-forced/{next(n for n in s3.files('export-forced') if n.endswith('.arrow'))}"
    )
    run = pack(*export, "unpacked")
    assert run.code == 2 and "--force writes the export anew" in run.err
    s3.system.pipe_file("bucket/export-forced/mine.txt", b"not padless's")
    run = pack(*export, "unpacked", "--force")
    assert run.code == 2 and "'mine.txt', which no export of padless wrote" in run.err


def test_an_export_whose_upload_broke_off_is_none_and_is_written_anew(s3: S3, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "packed")
    export = ("export", tmp_path / "packed", "--to", "parquet", "--output", "s3://bucket/export-torn")
    s3.faults.add("/data-00000.parquet", method="PUT", status=403)
    run = pack(*export)
    assert run.code == 2 and "may not be written" in run.err
    assert "export.json" not in s3.files("export-torn") and not os.listdir(tmp_path / "cache" / "exports")
    assert pack(*export).code == 0
    assert "export.unfinished.json" not in s3.files("export-torn") and "export.json" in s3.files(
        "export-torn"
    )


@pytest.mark.parametrize("url", ["hf://datasets/a/b", "http://127.0.0.1:9/x"])
def test_an_address_that_takes_no_export_is_told(url: str, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "packed")
    run = pack("export", tmp_path / "packed", "--to", "parquet", "--output", url)
    assert run.code == 2 and "a folder or a bucket" in run.err and url in run.err


def test_splits_go_into_a_bucket_as_into_a_folder(s3: S3, tmp_path: Path) -> None:
    options = (*SMALL, "--eval-fraction", 0.2)
    built(DEMO, "s3://bucket/splits", *options)
    built(DEMO, tmp_path / "local", *options)
    assert s3.files("splits") == files_of(tmp_path / "local")
    assert PackedReader("s3://bucket/splits", split="validation", verify=True)[0].num_tokens


def test_a_repack_goes_into_a_bucket_as_into_a_folder(s3: S3, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "packed")
    for output in (tmp_path / "local", "s3://bucket/repacked"):
        run = pack("repack", tmp_path / "packed", "--output", output, "--max-length", 2048, "--json")
        assert run.code == 0, run.err
    assert s3.files("repacked") == files_of(tmp_path / "local")


def test_a_build_goes_from_bucket_to_bucket(s3: S3, tmp_path: Path) -> None:
    s3.system.pipe_file("bucket/data/demo.jsonl", DEMO.read_bytes())
    url = "s3://bucket/from-to"
    built("s3://bucket/data/demo.jsonl", url, *SMALL)
    built("s3://bucket/data/demo.jsonl", tmp_path / "local", *SMALL)
    assert s3.files("from-to") == files_of(tmp_path / "local")


def test_other_stores_take_a_build_too(local: dict[str, bytes]) -> None:
    built(DEMO, "memory://published/out", *SMALL)
    system = fsspec.filesystem("memory")
    names = [path.removeprefix("/published/out/") for path in system.find("/published/out")]
    assert {name: system.cat_file(f"/published/out/{name}") for name in names} == local
    assert built(DEMO, "memory://published/out", *SMALL)["was_finished"]


def test_an_address_of_this_machine_is_a_folder(local: dict[str, bytes], tmp_path: Path) -> None:
    built(DEMO, f"file://{tmp_path}/out", *SMALL)
    assert files_of(tmp_path / "out") == local


# -- a second run --------------------------------------------------------------------------------------


def test_a_second_run_says_that_it_is_finished_and_writes_nothing(s3: S3) -> None:
    url = "s3://bucket/second"
    built(DEMO, url, *SMALL)
    s3.faults.requests.clear()
    assert built(DEMO, url, *SMALL)["was_finished"]
    assert {method for method, _ in s3.faults.requests} <= {"GET", "HEAD"}


def test_another_build_is_refused_unless_forced_and_then_leaves_nothing_of_the_first(
    s3: S3, local: dict[str, bytes]
) -> None:
    url = "s3://bucket/forced"
    built(DEMO, url)
    s3.system.pipe_file("bucket/forced/plans/old.parquet", b"a plan over sequences that will be gone")
    s3.system.pipe_file("bucket/forced/README.md", b"mine")
    before = s3.files("forced")
    run = build(DEMO, url, *SMALL)
    assert run.code == 2
    assert f"{url} holds a finished data set of another build" in run.err
    assert s3.files("forced") == before
    built(DEMO, url, *SMALL, "--force")
    assert s3.files("forced") == {**local, "README.md": b"mine"}


def test_a_finished_folder_that_lacks_a_file_is_told(s3: S3, local: dict[str, bytes]) -> None:
    url = "s3://bucket/lacking"
    built(DEMO, url, *SMALL)
    s3.system.rm_file(f"bucket/lacking/{shards(local)[0]}")
    run = build(DEMO, url, *SMALL)
    assert run.code == 2
    assert f"{url}/{shards(local)[0]} is in the manifest and not there" in run.err


@pytest.mark.parametrize("name", ["thesis.doc", "manifest.json", "train/notes.txt"])
def test_what_padless_did_not_write_is_never_touched(s3: S3, name: str, tmp_path: Path) -> None:
    folder = f"strange-{len(name)}"
    s3.system.pipe_file(f"bucket/{folder}/{name}", b"{}")
    for force in ((), ("--force",)):
        run = build(DEMO, f"s3://bucket/{folder}", *force)
        assert run.code == 2
        assert f"s3://bucket/{folder}" in run.err
    assert s3.files(folder) == {name: b"{}"}
    assert [path for path in (tmp_path / "cache").rglob("*.arrow")] == []


def test_a_data_set_below_another_is_never_swept_with_it(s3: S3) -> None:
    built(DEMO, "s3://bucket/outer", *SMALL)
    built(DEMO, "s3://bucket/outer/inner", *SMALL)
    before = s3.files("outer")
    run = build(DEMO, "s3://bucket/outer", "--force")
    assert run.code == 2
    assert "s3://bucket/outer holds 'inner/" in run.err
    assert s3.files("outer") == before


def test_splits_of_a_build_that_broke_off_are_swept_by_the_next(
    s3: S3, local: dict[str, bytes], tmp_path: Path
) -> None:
    s3.faults.add("outer-splits/manifest.json", method="PUT", status=503, times=10**9)
    assert build(DEMO, "s3://bucket/outer-splits", "--eval-fraction", 0.2).code == 2
    s3.faults.waiting.clear()
    assert {"train/manifest.json", "validation/manifest.json"} < set(s3.files("outer-splits"))
    built(DEMO, "s3://bucket/outer-splits", *SMALL)
    assert s3.files("outer-splits") == local
    assert left_here(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "message"), [("hf://datasets/a/b", "pack-dataset push"), ("http://127.0.0.1:9/x", "only read")]
)
def test_an_address_that_takes_no_build_is_told(url: str, message: str) -> None:
    run = build(DEMO, url)
    assert run.code == 2
    assert message in run.err
    assert len(run.err.strip().splitlines()) == 1


def test_bad_input_leaves_neither_a_lock_nor_work(s3: S3, tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", [*demo_rows()[:3], {"instruction": 1}])
    run = build(bad, "s3://bucket/bad-input")
    assert run.code == 2
    assert s3.files("bad-input") == {}
    assert left_here(tmp_path) == []


# -- broken off ----------------------------------------------------------------------------------------


def test_an_upload_that_breaks_off_goes_on_with_what_is_missing(
    s3: S3, local: dict[str, bytes], tmp_path: Path
) -> None:
    """BR-124: until the manifest is there nothing is, and what was uploaded is not sent again."""
    url, last = "s3://bucket/broken", shards(local)[-1]
    s3.faults.add(last, method="PUT", status=503, times=10**9)
    run = build(DEMO, url, *SMALL)
    assert run.code == 2
    assert f"{url}/{last} cannot be written" in run.err
    there = s3.files("broken")
    assert "manifest.json" not in there
    assert set(shards(there)) == {*shards(local)[:-1]}
    assert left_here(tmp_path) != []
    s3.faults.waiting.clear()
    s3.faults.requests.clear()
    built(DEMO, url, *SMALL)
    assert s3.files("broken") == local
    sent = {path for method, path in s3.faults.requests if method == "PUT"}
    assert [path for path in sent if path.endswith(".arrow")] == [f"/bucket/broken/{last}"]
    assert left_here(tmp_path) == []


def test_another_build_after_one_that_broke_off_leaves_nothing_of_it(
    s3: S3, local: dict[str, bytes], tmp_path: Path
) -> None:
    s3.faults.add("sequences.parquet", method="PUT", status=503, times=10**9)
    assert build(DEMO, "s3://bucket/changed-mind").code == 2
    s3.faults.waiting.clear()
    built(DEMO, "s3://bucket/changed-mind", *SMALL)
    assert s3.files("changed-mind") == local
    assert left_here(tmp_path) == []


def test_an_object_that_was_changed_since_it_was_uploaded_is_sent_again(
    s3: S3, local: dict[str, bytes]
) -> None:
    s3.faults.add("manifest.json", method="PUT", status=503, times=10**9)
    assert build(DEMO, "s3://bucket/tampered", *SMALL).code == 2
    s3.faults.waiting.clear()
    first, second, *_ = shards(local)
    s3.system.pipe_file(f"bucket/tampered/{first}", bytes(len(local[first])))
    s3.system.rm_file(f"bucket/tampered/{second}")
    built(DEMO, "s3://bucket/tampered", *SMALL)
    assert s3.files("tampered") == local


def test_throttling_is_waited_out(s3: S3, local: dict[str, bytes]) -> None:
    for name in (shards(local)[0], "state.json", "manifest.json", LOCK):
        s3.faults.add(name, method="PUT", status=503, times=2)
    built(DEMO, "s3://bucket/throttled", *SMALL)
    assert s3.files("throttled") == local
    assert s3.faults.waiting == []


def test_a_build_stopped_between_its_commit_and_its_sweep_is_tidied_by_the_next(
    s3: S3, local: dict[str, bytes]
) -> None:
    url = "s3://bucket/untidy"
    built(DEMO, url)
    old = shards(s3.files("untidy"))
    s3.faults.add(old[0], method="DELETE", status=503, times=10**9)
    assert build(DEMO, url, *SMALL, "--force").code == 2
    s3.faults.waiting.clear()
    assert {old[0], LOCK, "manifest.json"} < set(s3.files("untidy"))
    assert built(DEMO, url, *SMALL)["was_finished"]
    assert s3.files("untidy") == local


PARTS = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests")!r})
import s3fs.core
s3fs.core.calculate_chunksize = lambda *args, **options: 2**18
from padless.packer.cli import main; main()
"""
"""The command line with uploads of many parts."""


def test_a_build_killed_in_the_middle_of_an_upload_leaves_nothing_that_looks_whole(
    s3: S3, tmp_path: Path
) -> None:
    """BR-124: a torn upload of several parts is not there, and the same command ends as if undisturbed."""
    source = write_many(tmp_path / "many.jsonl", 8)
    options = ("--labels", "always", "--strategy", "ordered")
    gate = threading.Event()
    part = s3.faults.add("partNumber=2", method="PUT", gate=gate, times=10**9)
    arguments = build_arguments(source, "s3://bucket/killed", *options)
    with subprocess.Popen([sys.executable, "-c", PARTS, *arguments], start_new_session=True) as process:
        try:
            for _ in range(12000):
                if part.times < 10**9:
                    break
                assert process.poll() is None, "it ended before it was held"
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            s3.faults.waiting.clear()
            gate.set()
    assert s3.open_uploads() == 1
    assert "manifest.json" not in s3.files("killed")
    assert shards(s3.files("killed")) == []
    found = built(source, "s3://bucket/killed", *options)
    assert found["resumed_chunks"] == 0, "the folder was finished here, and only had to be sent"
    built(source, tmp_path / "local", *options)
    assert s3.files("killed") == files_of(tmp_path / "local")


def test_a_part_that_fails_for_good_is_no_open_upload(
    s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda *args, **options: 2**18)
    before = s3.open_uploads()
    source = write_many(tmp_path / "many.jsonl", 8)
    s3.faults.add("partNumber=2", method="PUT", status=503, times=10**9)
    run = build(source, "s3://bucket/aborted", "--labels", "always")
    assert run.code == 2
    assert "cannot be written" in run.err
    assert s3.open_uploads() == before
    assert shards(s3.files("aborted")) == []


# -- two builds ----------------------------------------------------------------------------------------


def other_lock(s3: S3, folder: str) -> None:
    """The lock of a build on another machine."""
    lock = {"token": "another", "host": "elsewhere", "since": "yesterday"}
    s3.system.pipe_file(f"bucket/{folder}/{LOCK}", json.dumps(lock).encode())


def test_a_build_on_another_machine_is_told_and_can_be_replaced(s3: S3, local: dict[str, bytes]) -> None:
    other_lock(s3, "busy")
    run = build(DEMO, "s3://bucket/busy", *SMALL)
    assert run.code == 2
    assert "a build on elsewhere has been writing into s3://bucket/busy since yesterday" in run.err
    assert "--force" in run.err
    assert [*s3.files("busy")] == [LOCK]
    built(DEMO, "s3://bucket/busy", *SMALL, "--force")
    assert s3.files("busy") == local


def test_a_build_on_this_machine_is_told(s3: S3) -> None:
    url = "s3://bucket/busy-here"
    with publish.Publishing(url, f"xxh3:{'0' * 32}", (), force=False, report=lambda stage, counts: None):
        run = build(DEMO, url, "--force")
        assert run.code == 2
        assert f"another build of this machine is writing into {url}" in run.err


@pytest.mark.parametrize("how", ["lock", "unlocked", "file", "manifest"])
def test_who_was_overtaken_commits_nothing(s3: S3, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds that do not know of each other: only one of them has its manifest there."""
    folder = f"overtaken-{how}"
    check = publish.Publishing._check

    def overtaken(self: Any, names: list[str]) -> None:
        if how == "lock":
            other_lock(s3, folder)
        elif how == "unlocked":
            s3.system.rm_file(f"bucket/{folder}/{LOCK}")
        elif how == "file":
            s3.system.pipe_file(f"bucket/{folder}/sequences.parquet", b"theirs")
        check(self, names)
        if how == "manifest":
            s3.system.pipe_file(f"bucket/{folder}/manifest.json", b"theirs")

    monkeypatch.setattr(publish.Publishing, "_check", overtaken)
    run = build(DEMO, f"s3://bucket/{folder}", *SMALL)
    assert run.code == 2
    reason = {
        "lock": "a build on elsewhere took",
        "unlocked": "a build on another machine took",
        "file": "somebody else",
        "manifest": "another build has committed",
    }
    assert reason[how] in run.err
    assert s3.files(folder).get("manifest.json") == (b"theirs" if how == "manifest" else None)
