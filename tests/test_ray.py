"""`--engine ray`: the local engine's bytes from a cluster of three nodes, through every loss."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from building import (
    DEMO,
    assert_verified,
    build,
    build_arguments,
    built,
    demo_rows,
    files_of,
    write_lines,
    write_many,
)
from conftest import ROOT
from object_storage import environment_of, s3_server
from ray.cluster_utils import Cluster
from raying import Gate, cluster_of, wait_until

from padless.packer import commit, ray_engine, ray_tasks

RAY = ("--engine", "ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of(3) as made:
        yield made


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "many.jsonl")


SHARDS = ("--shard-size", 1_000_000, "--labels", "always")
"""So that `many` gives several shards."""


@pytest.fixture(scope="module")
def local(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the local engine makes of `many`."""
    output = tmp_path_factory.mktemp("local") / "out"
    built(many, output, *SHARDS)
    found = files_of(output)
    assert len([name for name in found if name.endswith(".arrow")]) >= 4
    return found


# -- the same bytes -----------------------------------------------------------------------------------


def chats(folder: Path) -> Path:
    """An array of conversations with weights, whose strings look like the borders of records."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f'{number} "}},\n{{" {row["instruction"]}'},
                {"role": "assistant", "content": row["output"], "weight": 0.5 * (number % 3)},
                {"role": "user", "content": "And then?"},
                {"role": "assistant", "content": row["output"][::-1]},
            ]
        }
        for number, row in enumerate(demo_rows() * 8)
    ]
    folder.mkdir()
    (folder / "chats.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return folder


def rollouts(folder: Path) -> Path:
    rows = [
        {
            "prompt_ids": [10 + n % 80] * (1 + n % 4),
            "response_ids": [11 + n % 80] * (2 + n % 5),
            "old_logprobs": [-n / 8] * (2 + n % 5),
            "advantages": n / 4 - 1,
            "reward": -float(n),
            "group_id": n // 3,
        }
        for n in range(4000)
    ]
    return write_lines(folder / "rollouts.jsonl", rows)


def texts(folder: Path) -> Path:
    folder.mkdir()
    lines = [f"{row['instruction']} {row['output']}".replace("\n", " ") for row in demo_rows() * 10]
    (folder / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("buckets_from", [2**28, 0], ids=["mapped", "in buckets"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (chats, ("--eval-fraction", 0.2, "--template", "chatml", "--overflow", "truncate")),
        (rollouts, ("--shard-size", 100_000)),
        (texts, ("--strategy", "wrapped", "--overflow", "split", "--shard-size", 200_000)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_kind_of_data_gives_the_local_engines_bytes(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    options: tuple[object, ...],
    buckets_from: int,
) -> None:
    source = make(tmp_path / "in")
    facts = built(source, tmp_path / "local", *options)
    monkeypatch.setattr(commit, "BUCKETS_FROM", buckets_from)
    on_ray = built(source, tmp_path / "ray", *options, *RAY)
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")
    changing = ("output", "seconds", "profile")
    assert {k: v for k, v in on_ray.items() if k not in changing} == {
        k: v for k, v in facts.items() if k not in changing
    }
    assert_verified(tmp_path / "ray")


def test_a_bucket_takes_the_same_bytes_from_nodes_that_share_no_folder(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: Path, local: dict[str, bytes]
) -> None:
    named: list[object] = []
    source = ray_engine._source
    monkeypatch.setattr(ray_engine, "_source", lambda *about: (named.append(source(*about)), named[-1])[1])
    monkeypatch.setattr(ray_engine, "write", None)  # nobody writes elsewhere
    with s3_server() as s3, environment_of(s3, tmp_path / "cache"):
        s3.system.pipe_file("bucket/in/many.jsonl", many.read_bytes())
        found = built("s3://bucket/in/many.jsonl", "s3://bucket/out", *SHARDS, *RAY)
        files = s3.files("out")
    assert found["output"] == "s3://bucket/out" and len(named) > 3 and {*named} == {None}
    assert {**files, "manifest.json": b""} == {**local, "manifest.json": b""}
    packs = [json.loads(folder["manifest.json"]) for folder in (files, local)]
    assert packs[0]["shards"] == packs[1]["shards"] and packs[0]["plan_hash"] == packs[1]["plan_hash"]


def test_small_files_go_out_together(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = demo_rows()
    for number in range(60):
        write_lines(tmp_path / "in" / f"{number:02}.jsonl", rows[number * 6 : number * 6 + 6])
    asked: list[int] = []
    ask = ray_engine.RayEngine._ask
    monkeypatch.setattr(
        ray_engine.RayEngine, "_ask", lambda self, *values: (asked.append(1), ask(self, *values))[1]
    )
    built(tmp_path / "in", tmp_path / "ray", *RAY)
    built(tmp_path / "in", tmp_path / "local")
    assert len(asked) == 2  # all chunks, and one shard
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")


def test_a_bad_record_is_told_as_on_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    rows: list[Any] = demo_rows() * 4
    rows[700] = {"instruction": 3, "output": "x"}
    source = write_lines(tmp_path / "rows.jsonl", rows)
    runs = [build(source, tmp_path / name, *more) for name, more in (("local", ()), ("ray", RAY))]
    assert [run.code for run in runs] == [2, 2]
    assert runs[1].err == runs[0].err and "record 700 (line 701)" in runs[1].err
    assert not (tmp_path / "ray").exists()


def test_a_folder_that_one_engine_made_is_finished_for_the_other(
    cluster: Cluster, tmp_path: Path, many: Path, local: dict[str, bytes]
) -> None:
    output = tmp_path / "out"
    assert built(many, output, *SHARDS, *RAY, "--workers", 2)["was_finished"] is False
    assert files_of(output) == local
    assert built(many, output, *SHARDS)["was_finished"] is True


# -- a driver that was stopped ------------------------------------------------------------------------


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from object_storage import environment_of, s3_server
from raying import Gate
with Gate(Path({gate!r}), {first}).holding({stage!r}):
    from padless.packer.cli import main
    main()
"""


def driver(cluster: Cluster, gate: Gate, stage: str, arguments: list[str]) -> subprocess.Popen[str]:
    """The command in a process of its own, whose tasks of a stage wait at the gate."""
    code = DRIVER.format(tests=str(ROOT / "tests"), gate=str(gate.folder), first=gate.first, stage=stage)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments, *RAY, "--ray-address", cluster.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("stage", "first", "stop"),
    [("tokenize", 3, signal.SIGKILL), ("write", 2, signal.SIGINT)],
    ids=["tokenize-SIGKILL", "write-SIGINT"],
)
def test_a_stopped_driver_goes_on_where_it_was(
    cluster: Cluster,
    tmp_path: Path,
    many: Path,
    local: dict[str, bytes],
    stage: str,
    first: int,
    stop: signal.Signals,
) -> None:
    gate = Gate(tmp_path / "gate", first)
    output = tmp_path / "out"
    journal = output / ".work" / ("journal.jsonl" if stage == "tokenize" else "shards.jsonl")
    with driver(cluster, gate, stage, build_arguments(many, output, *SHARDS)) as process:

        def is_halfway() -> bool:
            assert process.poll() is None, process.communicate()
            done = journal.read_bytes().count(b"\n") if journal.exists() else 0
            return done >= first + (stage == "tokenize") and any(mark.number >= first for mark in gate.marks)

        wait_until(is_halfway)
        process.send_signal(stop)
        out, err = process.communicate(timeout=300)
    if stop == signal.SIGINT:
        assert process.returncode == 130 and "the same command goes on" in err, err
    assert "Traceback" not in err
    pids = {mark.pid for mark in gate.marks}
    wait_until(lambda: not any(is_running(pid) for pid in pids))  # nobody opened the gate
    assert not (output / "manifest.json").exists()
    facts = built(many, output, *SHARDS, *RAY)
    assert facts["resumed_chunks"] >= 3
    assert files_of(output) == local


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- nodes that are not fit ---------------------------------------------------------------------------


def test_other_versions_on_a_node_are_told(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {**ray_tasks.versions(), "tokenizers": "0.0.1"}
    with monkeypatch.context() as patched:
        patched.setattr(ray_engine, "versions", lambda: mine)
        run = build(DEMO, tmp_path / "out", *RAY)
    assert run.code == 2 and "tokenizers " in run.err and "the driver 0.0.1" in run.err, run.err
    assert "same versions on every node" in run.err
    built(DEMO, tmp_path / "out", *RAY)
    assert_verified(tmp_path / "out")


def test_the_code_of_padless_counts_as_its_version() -> None:
    assert ray_tasks.versions()["padless"].partition("code ")[2].strip(")").isalnum()


@pytest.mark.parametrize("what", ["output", "source"])
def test_a_node_that_does_not_see_the_storage_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    elsewhere = str(tmp_path / "not-mounted")

    def blind(run: dict[str, Any], *packed: Any) -> Any:
        return ray_tasks.tokenize({**run, "work": elsewhere}, *packed)

    if what == "output":
        monkeypatch.setattr(ray_engine, "tokenize", blind)
    else:
        monkeypatch.setattr(ray_engine, "_source", lambda chunk, seen: (elsewhere, 1, 1))
    run = build(DEMO, tmp_path / "out", *RAY)
    assert run.code == 2 and "does not see the driver's" in run.err and elsewhere in run.err, run.err
    assert "every node has at the same path" in run.err and "No such file" in run.err


def test_a_source_that_is_another_file_on_a_node_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "_source", lambda chunk, seen: (chunk.path, 1, 1))
    run = build(DEMO, tmp_path / "out", *RAY)
    assert run.code == 2 and f"{DEMO} (another file of that name)" in run.err, run.err


# -- losses; last, since a node that is gone stays so -------------------------------------------------


@pytest.mark.parametrize(("stage", "lost"), [("tokenize", "node"), ("write", "node"), ("tokenize", "worker")])
def test_what_was_lost_is_done_again_and_the_bytes_are_the_same(
    cluster: Cluster, tmp_path: Path, many: Path, local: dict[str, bytes], stage: str, lost: str
) -> None:
    gate = Gate(tmp_path / "gate")
    head = cluster.head_node.node_id if lost == "node" else ""
    trouble: list[BaseException] = []
    lost_tasks: list[int] = []

    def strike() -> None:
        try:
            wait_until(lambda: any(mark.node != head for mark in gate.marks))
            mark = next(mark for mark in gate.marks if mark.node != head)
            if lost == "worker":
                os.kill(mark.pid, signal.SIGKILL)
            else:
                node = next(node for node in cluster.worker_nodes if node.node_id == mark.node)
                cluster.remove_node(node, allow_graceful=False)
            wait_until(lambda: not is_running(mark.pid))  # it never came through the gate
            lost_tasks.append(mark.number)
        except BaseException as error:
            trouble.append(error)
        finally:
            gate.open()

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        with driver(cluster, gate, stage, build_arguments(many, tmp_path / "out", *SHARDS, "--json")) as one:
            out, err = one.communicate(timeout=600)
    finally:
        gate.open()
        striking.join()
    assert not trouble, trouble
    assert len([mark for mark in gate.marks if mark.number in lost_tasks]) == 2
    assert one.returncode == 0, err
    assert json.loads(out)["packs"] > 0  # and nothing of what Ray says of nodes
    assert files_of(tmp_path / "out") == local


# -- a cluster of one's own, or none ------------------------------------------------------------------


def test_without_an_address_a_cluster_is_started_and_ended(tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(prefix="ray-")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        run = subprocess.run(
            [sys.executable, "-m", "padless.packer.cli", *build_arguments(DEMO, tmp_path / "out", *RAY)],
            env={**environment, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr == "" and "400 records: 400 kept" in run.stdout
        assert os.listdir(folder), "its sessions would lie here"
        wait_until(lambda: not processes_with(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    built(DEMO, tmp_path / "local")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "local")


def processes_with(word: str) -> list[int]:
    """Processes that have a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_without_ray_the_way_to_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    run = build(DEMO, tmp_path / "out", *RAY)
    assert run.code == 2 and "pip install 'padless[ray]'" in run.err
    assert not (tmp_path / "out").exists()


def test_no_cluster_at_the_address_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    run = build(DEMO, tmp_path / "out", *RAY, "--ray-address", "127.0.0.1:1")
    assert run.code == 2 and "no Ray cluster at 127.0.0.1:1 (" in run.err and "ray start --head" in run.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ray-address", "10.0.0.1:6379"), "--ray-address 10.0.0.1:6379 is for engine ray"),
        ((*RAY, "--ray-address", "ray://head:10001"), "ray://head:10001 is of Ray Client"),
        ((*RAY, "--ray-address", "head"), "--ray-address head has no port; give HOST:PORT"),
    ],
    ids=["local engine", "ray client", "no port"],
)
def test_an_address_that_cannot_be_used_is_told(
    tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    run = build(DEMO, tmp_path / "out", *options)
    assert run.code == 2 and said in run.err, run.err
    assert not (tmp_path / "out").exists()
