"""Sources in buckets and behind http: the packs of a local copy, and failures told with a way out."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import (
    DEMO,
    assert_verified,
    build,
    built,
    demo_rows,
    files_of,
    sequence_table,
    workers_in,
    write_lines,
)
from object_storage import S3, environment_of, http_server, s3_server

from padless.runtime.format import read_manifest
from padless.runtime.storage import Storage

ROWS = demo_rows()[:40]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def reached(s3: S3, tmp_path: Path) -> Iterator[None]:
    with environment_of(s3, tmp_path / "cache"):
        yield


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return bytes(sink.getvalue())


def as_arrow(rows: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


FORMS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": as_lines,
    "json": lambda rows: json.dumps(rows).encode(),
    "jsonl.gz": lambda rows: gzip.compress(as_lines(rows)),
    "json.bz2": lambda rows: bz2.compress(json.dumps(rows).encode()),
    "parquet": as_parquet,
    "arrow": as_arrow,
    "csv": as_csv,
}


def packs_of(folder: Path) -> Any:
    """All of a folder that does not name its sources."""
    manifest = read_manifest(folder)
    kept = {name: data for name, data in files_of(folder).items() if name != "manifest.json"}
    sources = [(source.bytes, source.checksum, source.records) for source in manifest.sources]
    return kept, sources, manifest.plan_hash, manifest.options, manifest.statistics["tokens"]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_in_a_bucket_packs_like_a_local_copy(s3: S3, form: str, tmp_path: Path) -> None:
    data = FORMS[form](ROWS)
    (tmp_path / f"data.{form}").write_bytes(data)
    s3.system.pipe_file(f"bucket/forms/data.{form}", data)
    built(tmp_path / f"data.{form}", tmp_path / "local")
    built(f"s3://bucket/forms/data.{form}", tmp_path / "remote")
    assert packs_of(tmp_path / "remote")[:4] == packs_of(tmp_path / "local")[:4]
    (source,) = read_manifest(tmp_path / "remote").sources
    assert source.path == f"s3://bucket/forms/data.{form}"
    assert source.revision == Storage(source.path).stamp("").mark != ""
    assert_verified(tmp_path / "remote")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("spec", ["*.jsonl", "", "**"])
def test_patterns_and_folders_name_files_in_the_order_of_their_names(
    s3: S3, spec: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    for number, name in enumerate(("b", "a", "c")):
        write_lines(folder / f"{name}.jsonl", ROWS[number * 10 : number * 10 + 10])
    name = f"many{len(spec)}"
    s3.upload(folder, name)
    if not spec:
        for other in ("README.md", ".hidden/d.jsonl", "notes.bin", "empty/"):
            s3.system.pipe_file(f"bucket/{name}/{other}", b"{}")
    found = built(f"s3://bucket/{name}/{spec}", tmp_path / "remote")
    built(folder, tmp_path / "local")
    assert found["records"] == 30
    assert packs_of(tmp_path / "remote") == packs_of(tmp_path / "local")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(s3: S3, tmp_path: Path) -> None:
    """A path that exists goes before a pattern, on this machine too."""
    write_lines(tmp_path / "data" / "part[1].jsonl", ROWS[:10])
    write_lines(tmp_path / "data" / "part1.jsonl", ROWS[10:30])
    s3.upload(tmp_path / "data", "brackets")
    for number, (name, records) in enumerate((("part[1].jsonl", 10), ("part[1]*", 20))):
        for place in ("s3://bucket/brackets", tmp_path / "data"):
            found = built(f"{place}/{name}", tmp_path / f"{number}-{'data' in str(place)}")
            assert found["records"] == records


@pytest.mark.parametrize("ranges", [True, False])
def test_files_behind_http_pack_like_local_copies(ranges: bool, tmp_path: Path) -> None:
    for form in ("jsonl", "parquet"):
        (tmp_path / f"data.{form}").write_bytes(FORMS[form](ROWS))
    with http_server(tmp_path, ranges=ranges) as (url, faults):
        for form in ("jsonl", "parquet"):
            faults.add(f"data.{form}", cut=2000)
            built(f"{url}/data.{form}?signature=secret", tmp_path / f"remote-{form}")
            built(tmp_path / f"data.{form}", tmp_path / f"local-{form}")
            assert packs_of(tmp_path / f"remote-{form}") == packs_of(tmp_path / f"local-{form}")
            (source,) = read_manifest(tmp_path / f"remote-{form}").sources
            assert source.path == f"{url}/data.{form}", "no secret is written down"
        assert faults.waiting == []


def test_an_address_of_this_machine_is_a_path(tmp_path: Path) -> None:
    built(f"file://{DEMO}", tmp_path / "remote")
    built(DEMO, tmp_path / "local")
    assert files_of(tmp_path / "remote") == files_of(tmp_path / "local")


def test_sources_here_and_there_go_together(s3: S3, tmp_path: Path) -> None:
    local = write_lines(tmp_path / "here.jsonl", ROWS[:10])
    s3.system.pipe_file("bucket/mixed/there.jsonl", as_lines(ROWS[10:20]))
    found = built(local, tmp_path / "out", "s3://bucket/mixed/there.jsonl")
    assert found["records"] == 20
    assert sequence_table(tmp_path / "out")["source"] == [0] * 10 + [1] * 10


# -- a second run --------------------------------------------------------------------------------------


def test_a_second_run_knows_a_source_by_its_mark_and_notices_another(s3: S3, tmp_path: Path) -> None:
    url = "s3://bucket/again/data.jsonl"
    s3.system.pipe_file("bucket/again/data.jsonl", as_lines(ROWS))
    built(url, tmp_path / "out")
    before = files_of(tmp_path / "out")
    s3.faults.requests.clear()
    built(url, tmp_path / "out")
    assert files_of(tmp_path / "out") == before
    assert s3.faults.asked("GET", "data.jsonl") == 0, "nothing is read for that"
    s3.system.pipe_file("bucket/again/data.jsonl", as_lines(ROWS[:-1]))
    run = build(url, tmp_path / "out")
    assert run.code == 2
    assert f"{url} has changed" in run.err
    built(url, tmp_path / "out", "--force")


def test_a_source_without_a_mark_is_read_again_to_see_whether_it_is_the_same(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for _ in range(2):  # written anew, with the same content
        system.pipe_file("/unmarked/data.jsonl", as_lines(ROWS))
        built("memory://unmarked/data.jsonl", tmp_path / "out")
    (source,) = read_manifest(tmp_path / "out").sources
    assert (source.path, source.revision) == ("memory://unmarked/data.jsonl", None)
    system.pipe_file("/unmarked/data.jsonl", as_lines(ROWS[::-1]))
    assert "has changed" in build("memory://unmarked/data.jsonl", tmp_path / "out").err


def test_a_build_whose_source_stops_coming_goes_on_with_the_same_command(s3: S3, tmp_path: Path) -> None:
    """BR-124 for input: chunks that were finished are kept, and the bytes are those of a calm run."""
    rows = [{**row, "instruction": f"{row['instruction']} ({n})"} for n in range(24) for row in demo_rows()]
    for name, part in (("a", rows), ("b", ROWS)):
        s3.system.pipe_file(f"bucket/long/{name}.jsonl", as_lines(part))
    url = "s3://bucket/long/*.jsonl"
    built(url, tmp_path / "calm")
    fault = s3.faults.add("b.jsonl", status=503, times=10**9)
    with workers_in("processes"):
        run = build(url, tmp_path / "out", "--workers", 1)
    assert run.code == 2
    assert "s3://bucket/long/b.jsonl cannot be read" in run.err
    assert "the same command goes on" in run.err
    assert (tmp_path / "out" / ".work" / "journal.jsonl").read_bytes().count(b"\n") > 1
    s3.faults.waiting.remove(fault)
    built(url, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "calm")


# -- failures ------------------------------------------------------------------------------------------


def test_a_source_that_changes_during_the_build_is_noticed(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from padless.packer.sources import urls

    name, url = "bucket/changing/data.jsonl", "s3://bucket/changing/data.jsonl"
    s3.system.pipe_file(name, as_lines(ROWS))
    read = urls.UrlFile.readinto

    def changed_on_the_way(self: Any, buffer: Any) -> int:
        count = read(self, buffer)
        if not count:
            s3.system.pipe_file(name, as_lines(ROWS[:-1]))
        return count

    monkeypatch.setattr(urls.UrlFile, "readinto", changed_on_the_way)
    run = build(url, tmp_path / "out")
    assert run.code == 2
    assert f"{url} changed during the build" in run.err
    assert "build again once it is complete" in run.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("s3://bucket/none.jsonl", "there is no s3://bucket/none.jsonl"),
        ("s3://bucket/none/*.jsonl", "nothing matches s3://bucket/none/*.jsonl"),
        ("s3://no-such-bucket/a.jsonl", "there is no s3://no-such-bucket/a.jsonl"),
        ("s3://bucket/odd/data.bin", "cannot be told from its extension"),
        ("s3://bucket/odd/empty.jsonl", "is empty (0 bytes)"),
        ("s3://bucket/odd/blank.jsonl", "has no records"),
        ("s3://bucket/odd/tokens.npy", "copy them here"),
        ("s3://bucket/odd/torn.parquet", "cannot be read as a table"),
        ("s3://bucket/odd/torn.jsonl.gz", "cannot be decompressed"),
        ("s3://bucket/packed", "holds packed data"),
        ("s3://bucket/saved", "save_to_disk"),
        ("nowhere://bucket/data.jsonl", "nowhere"),
        ("hf://spaces/a/b", "is no address of data on the Hub"),
    ],
)
def test_what_cannot_be_a_source_is_told_with_its_address(
    s3: S3, spec: str, message: str, tmp_path: Path
) -> None:
    for name, data in {
        "odd/data.bin": b"x",
        "odd/empty.jsonl": b"",
        "odd/blank.jsonl": b"\n \n",
        "odd/tokens.npy": b"x",
        "odd/torn.parquet": as_parquet(ROWS)[:-9],
        "odd/torn.jsonl.gz": gzip.compress(as_lines(ROWS))[:-9],
        "packed/manifest.json": b"{}",
        "packed/shard-00000-00000000.arrow": b"x",
        "saved/state.json": b"{}",
        "saved/dataset_info.json": b"{}",
        "saved/data-00000-of-00001.arrow": b"x",
    }.items():
        s3.system.pipe_file(f"bucket/{name}", data)
    run = build(spec, tmp_path / "out")
    assert run.code == 2
    assert message in run.err
    assert len(run.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_refused_source_names_the_credentials(s3: S3, tmp_path: Path) -> None:
    s3.system.pipe_file("bucket/secret/data.jsonl", as_lines(ROWS))
    s3.faults.add("secret/data.jsonl", method="HEAD", status=403, times=10**9)
    run = build("s3://bucket/secret/data.jsonl", tmp_path / "out")
    assert run.code == 2
    assert "credentials" in run.err


def test_a_record_at_fault_is_named_by_its_address_and_line(s3: S3, tmp_path: Path) -> None:
    s3.system.pipe_file("bucket/bad/data.jsonl", as_lines(ROWS[:3]) + b"{\n")
    run = build("s3://bucket/bad/data.jsonl", tmp_path / "out")
    assert run.code == 2
    assert "s3://bucket/bad/data.jsonl, record 3 (line 4)" in run.err


def test_a_table_that_finds_no_room_is_told_with_the_folder(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "file"))
    s3.system.pipe_file("bucket/room/data.parquet", as_parquet(ROWS))
    run = build("s3://bucket/room/data.parquet", tmp_path / "out")
    assert run.code == 2
    assert f"cannot be kept in {tmp_path / 'file'}" in run.err
    assert "PADLESS_CACHE" in run.err
