"""Packed folders on object storage and behind plain http: right packs, or an error with a way out."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from building import pack as run_command
from object_storage import S3, http_server, s3_server, spoil
from packed import Folder, count_up, write_folder, write_numbered, write_splits
from ranks import numbers
from torch.utils.data import DataLoader

from padless.runtime import storage
from padless.runtime.errors import (
    ChecksumError,
    FormatError,
    MissingFileError,
    NotPackedError,
    PlanError,
    RemoteError,
    StreamError,
    TruncatedFileError,
)
from padless.runtime.reader import PackedReader
from padless.runtime.storage import Storage
from padless.runtime.stream import PackedDataset, PackedStream

PACKS = 12
LONG = 3 << 20
"""Tokens of the pack that makes one shard larger than a piece of a download."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of two packs, each pack one sequence."""
    path = write_numbered(tmp_path_factory.mktemp("storage") / "packed", PACKS)
    assert run_command("repack", path, "--plan-only", "long", "--strategy", "ordered").code == 0
    return path


@pytest.fixture
def url(s3: S3, packed: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The folder in the bucket, under a name of its own."""
    name = f"packed-{abs(hash(request.node.name))}"
    yield s3.upload(packed, name)
    s3.faults.waiting.clear()
    s3.faults.requests.clear()


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and little patience between tries."""
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.001)


def ids(packs: Any) -> list[list[int]]:
    return [pack.input_ids.tolist() for pack in packs]


def first_shard(reader: PackedReader) -> str:
    return reader.manifest.shards[0].file


def test_packs_in_a_bucket_are_those_of_the_folder(s3: S3, url: str, packed: Path) -> None:
    remote = PackedReader(url, storage_options=s3.options, verify=True)
    local = PackedReader(packed)
    assert ids(remote) == ids(local)
    assert remote.sequence_table().equals(local.sequence_table())
    dataset = PackedDataset(url, storage_options=s3.options)
    assert ids(dataset[number] for number in range(PACKS)) == ids(local)


def test_a_bucket_is_reached_by_the_environment(
    s3: S3, url: str, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ENDPOINT_URL", s3.endpoint), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    assert ids(PackedReader(url)) == ids(PackedReader(packed))


def test_a_bucket_is_reached_by_the_configuration_of_fsspec(
    s3: S3, url: str, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", s3.options)
    assert ids(PackedReader(url)) == ids(PackedReader(packed))


def test_a_stream_from_a_bucket_has_the_batches_of_the_folder(s3: S3, url: str, packed: Path) -> None:
    options: dict[str, Any] = {"packs_per_batch": 3, "remainder": "pad", "rank": 0, "world_size": 1}
    local = PackedStream(packed, shuffle="shards", **options)
    remote = PackedStream(url, storage_options=s3.options, **options)
    assert [numbers(batch) for batch in remote] == [numbers(batch) for batch in local]
    assert s3.faults.asked("GET", ".arrow") == 6, "each shard is fetched once, into the cache"
    remote.set_epoch(0)
    local.set_epoch(0)
    assert [numbers(batch) for batch in remote] == [numbers(batch) for batch in local]
    assert s3.faults.asked("GET", ".arrow") == 6


def test_forked_loader_workers_read_from_a_bucket(s3: S3, url: str) -> None:
    """Their connections are their own, and they end at once: what is read ahead does not hold them."""
    stream = PackedStream(url, rank=0, world_size=1, storage_options=s3.options)
    wanted = [numbers(batch) for batch in stream]
    stream.set_epoch(0)
    shutil.rmtree(Path(storage.cache_folder()))
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120)
    assert [numbers(batch) for batch in loader] == wanted


def test_a_split_in_a_bucket_is_asked_for(s3: S3, tmp_path: Path) -> None:
    splits = {name: Folder(packs=[count_up(1 + size)]) for size, name in enumerate(("train", "validation"))}
    write_splits(tmp_path / "splits", splits)
    url = s3.upload(tmp_path / "splits", "splits")
    assert PackedReader(url, split="validation", storage_options=s3.options)[0].num_tokens == 2


# -- plans ---------------------------------------------------------------------------------------------


def test_packs_come_by_a_plan_from_a_bucket(s3: S3, url: str, packed: Path) -> None:
    local = PackedReader(packed, plan="long")
    remote = PackedReader(url, plan="long", storage_options=s3.options)
    assert len(remote) == len(local) < PACKS
    assert ids(remote) == ids(local)
    options: dict[str, Any] = {"plan": "long", "rank": 0, "world_size": 1, "seed": 3}
    wanted = [numbers(batch) for batch in PackedStream(packed, **options)]
    found = PackedStream(url, storage_options=s3.options, **options)
    assert [numbers(batch) for batch in found] == wanted


def test_a_plan_that_is_not_there_or_another_folders_is_refused(s3: S3, url: str, tmp_path: Path) -> None:
    for name in ("short", "../plans/long"):
        with pytest.raises(PlanError, match=f"{url} has no plan '{name}'"):
            PackedReader(url, plan=name, storage_options=s3.options)
    other = tmp_path / "other"
    write_folder(other, Folder(packs=[count_up(3)]))
    assert run_command("repack", other, "--plan-only", "foreign").code == 0
    data = (other / "plans" / "foreign.parquet").read_bytes()
    s3.system.pipe_file(f"{url.removeprefix('s3://')}/plans/foreign.parquet", data)
    s3.system.pipe_file(f"{url.removeprefix('s3://')}/plans/torn.parquet", data[:-9])
    for name, why in (("foreign", "other sequences"), ("torn", "is no plan")):
        with pytest.raises(PlanError, match=f"{url}/plans/{name}.parquet .*{why}.*copy the folder here"):
            PackedReader(url, plan=name, storage_options=s3.options)


# -- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error"),
    [("missing", MissingFileError), ("cut", TruncatedFileError), ("changed", ChecksumError)],
)
def test_a_bad_object_is_an_error_that_names_it_and_leaves_nothing(
    s3: S3, url: str, how: str, error: type[FormatError]
) -> None:
    """BR-128, BR-129."""
    reader = PackedReader(url, storage_options=s3.options)
    path = f"{url.removeprefix('s3://')}/{first_shard(reader)}"
    spoil(s3.system, path, how)
    with pytest.raises(error, match=f"{url}/{first_shard(reader)} .*; .*copy the folder there again"):
        reader[0]
    assert reader.remote is not None
    assert list(reader.remote.cache.folder.iterdir()) == []
    assert reader[2].input_ids.tolist() == [2] * 3


def test_throttling_and_broken_connections_are_tried_again(s3: S3, url: str, packed: Path) -> None:
    reader = PackedReader(url, storage_options=s3.options)
    for fault in ({"status": 503, "times": 3}, {"cut": 100, "times": 2}, {"status": 500}):
        s3.faults.add(first_shard(reader), **fault)
    assert reader[0].input_ids.tolist() == [0]
    assert s3.faults.waiting == []


def test_a_store_that_never_answers_rightly_is_an_error_with_a_way_out(
    s3: S3, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    options = {**s3.options, "config_kwargs": {"retries": {"max_attempts": 0}}}
    reader = PackedReader(url, storage_options=options)
    s3.faults.add(first_shard(reader), status=503, times=10**9)
    with pytest.raises(
        RemoteError, match=f"{url}/{first_shard(reader)} .*tried {storage.TRIES} times.*address"
    ):
        reader[0]


def test_refused_access_is_told_at_once_with_the_credentials(s3: S3, url: str) -> None:
    s3.faults.add("manifest.json", status=403)
    with pytest.raises(
        RemoteError, match=f"{url}/manifest.json may not be read.*credentials.*storage_options"
    ):
        PackedReader(url, storage_options=s3.options)
    assert s3.faults.asked("GET", "manifest.json") == 1


def test_missing_credentials_are_told(s3: S3, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(RemoteError, match="without credentials"):
        PackedReader(url, storage_options={"endpoint_url": s3.endpoint})


def test_what_takes_folders_alone_says_so_of_a_url(s3: S3, url: str) -> None:
    for command in (
        ("repack", url, "--output", "z"),
        ("repack", url, "--plan-only", "z"),
        ("push", url, "a/b"),
    ):
        run = run_command(*command)
        assert run.code == 2
        assert f"{url} is a URL: copy it here" in run.err
    with pytest.raises(StreamError, match=f"{url} is a URL: copy it here"):
        PackedDataset(url, storage_options=s3.options).to_hf()


def test_a_bucket_without_the_folder_or_no_bucket_is_told(s3: S3) -> None:
    for url in ("s3://bucket/none", "s3://no-such-bucket/packed"):
        with pytest.raises(NotPackedError, match=f"{url} has no manifest.json"):
            PackedReader(url, storage_options=s3.options)


# -- http ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of several pieces of a download."""
    path = tmp_path_factory.mktemp("http") / "packed"
    write_folder(path, Folder(packs=[count_up(LONG), count_up(5)]))
    assert next(path.glob("shard-*")).stat().st_size > 2 * (8 << 20)
    return path


@pytest.mark.parametrize("ranges", [True, False])
def test_packs_behind_http_are_those_of_the_folder(packed: Path, large: Path, ranges: bool) -> None:
    for folder in (packed, large):
        with http_server(folder, ranges=ranges) as (url, faults):
            reader = PackedReader(url, verify=True)
            for one, other in zip(reader, PackedReader(folder), strict=True):
                assert (one.input_ids == other.input_ids).all()
            assert faults.asked("GET", first_shard(reader)) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_broke(large: Path, ranges: bool) -> None:
    with http_server(large, ranges=ranges) as (url, faults):
        reader = PackedReader(url)
        faults.add(first_shard(reader), cut=9 << 20)
        faults.add(first_shard(reader), status=503)
        assert reader[1].num_tokens == 5
        assert faults.waiting == []


def test_http_errors_are_told_as_what_they_are(packed: Path) -> None:
    with http_server(packed) as (url, faults):
        reader = PackedReader(url)
        shard = first_shard(reader)
        faults.add(shard, status=403, times=2)
        with pytest.raises(RemoteError, match=f"{url}/{shard} may not be read.*403"):
            reader[0]
        faults.waiting.clear()
        faults.add(shard, status=503, times=10**9)
        with pytest.raises(RemoteError, match=f"{url}/{shard} cannot be read.*503.*tried 5 times"):
            reader[0]
        faults.waiting.clear()
        faults.add(shard, status=404, times=10**9)
        with pytest.raises(MissingFileError, match=f"{url}/{shard} is in the manifest and not there"):
            reader[0]


def test_a_server_that_does_not_answer_is_given_up(packed: Path) -> None:
    import aiohttp

    gate = threading.Event()
    patience = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.2)}}
    with http_server(packed) as (url, faults):
        for method in ("GET", "HEAD"):
            faults.add("manifest.json", method=method, gate=gate, times=10**9)
        try:
            with pytest.raises(RemoteError, match=f"{url}/manifest.json cannot be read .*TimeoutError"):
                PackedReader(url, storage_options=patience)
        finally:
            gate.set()


def test_an_address_that_nobody_listens_at_is_told() -> None:
    with pytest.raises(RemoteError, match="tried 5 times.*can be reached"):
        PackedReader("http://127.0.0.1:9/packed")


# -- the storage itself --------------------------------------------------------------------------------


def test_a_stamp_changes_with_the_content_and_a_listing_has_all_files(s3: S3) -> None:
    here = Storage("s3://bucket/stamps", s3.options)
    assert here.listing() == {}
    for name, data in (("a", b"1"), ("deep/er", b"22")):
        s3.system.pipe_file(f"bucket/stamps/{name}", data)
    assert {name: stamp.size for name, stamp in here.listing().items()} == {"a": 1, "deep/er": 2}
    before = here.stamp("a")
    s3.system.pipe_file("bucket/stamps/a", b"3")
    assert here.stamp("a") == here.listing()["a"] != before
    assert json.loads(here.read("deep/er")) == 22
