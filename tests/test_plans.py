"""Further plans over the tokens of a folder: written beside them, read through every reader."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from building import DEMO, assert_verified, built, files_of, pack, state_of
from packed import Folder, count_up, rewrite_table, write_folder

from padless.runtime.format import PlanError
from padless.runtime.reader import PackedReader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan `long`, and one with a further length."""
    path = tmp_path_factory.mktemp("plans") / "packed"
    built(DEMO, path)
    run = pack("repack", path, "--plan-only", "long", "--max-length", 2048, "--strategy", "spread", "--json")
    assert run.code == 0, run.err
    assert run.json == {"plans": [str(path / "plans" / "long.parquet")]}
    return path


def test_a_plan_gives_the_packs_of_a_folder_packed_that_way(folder: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "fresh", "--max-length", 2048, "--strategy", "spread")
    planned, stored = PackedReader(folder, plan="long"), PackedReader(tmp_path / "fresh")
    assert len(planned) == len(stored) and len(list(planned)) == len(stored)
    for ours, theirs in zip(planned, stored, strict=True):
        for name in ("input_ids", "labels", "seq_lengths", "sequence_ids"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype, name
        for name in ("num_tokens", "num_targets", "max_seqlen", "attention_cost"):
            assert getattr(ours, name) == getattr(theirs, name), name
    again = pickle.loads(pickle.dumps(planned))
    assert np.array_equal(again[-1].input_ids, stored[-1].input_ids)


def test_a_stream_by_a_plan_is_the_stream_of_a_folder_packed_that_way(folder: Path, tmp_path: Path) -> None:
    stream = pytest.importorskip("padless.runtime.stream")
    built(DEMO, tmp_path / "fresh", "--max-length", 2048, "--strategy", "spread")
    options = {"packs_per_batch": 2, "rank": 0, "world_size": 2, "balance": "attention"}
    ours = stream.PackedStream(folder, plan="long", **options)
    theirs = stream.PackedStream(tmp_path / "fresh", **options)
    for one, other in zip(ours, theirs, strict=True):
        assert one["input_ids"].equal(other["input_ids"])
    state = stream.PackedStream(folder, **options).state_dict()
    with pytest.raises(ValueError, match="other"):
        ours.load_state_dict(state)


def test_plans_are_in_nobodys_way(folder: Path) -> None:
    before = state_of(folder)
    assert_verified(folder)
    assert built(DEMO, folder)["was_finished"] is True
    assert state_of(folder) == before


def test_each_split_gets_its_plan(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--eval-fraction", 0.2)
    assert pack("repack", tmp_path / "out", "--plan-only", "two", "--max-length", 2048).code == 0
    for split in ("train", "validation"):
        reader = PackedReader(tmp_path / "out", split=split, plan="two")
        kept = sorted(int(n) for one in reader for n in one.sequence_ids)
        assert kept == sorted(
            int(n) for one in PackedReader(tmp_path / "out", split=split) for n in one.sequence_ids
        )
    assert built(DEMO, tmp_path / "out", "--eval-fraction", 0.2)["was_finished"] is True


def test_an_unknown_plan_names_those_there_are(folder: Path) -> None:
    with pytest.raises(PlanError, match="'longer'.*long"):
        PackedReader(folder, plan="longer")
    with pytest.raises(PlanError, match="no plan"):
        PackedReader(folder, plan="../plans/long")


def test_a_plan_over_other_sequences_is_refused(folder: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "other", "--limit", 100)
    (tmp_path / "other" / "plans").mkdir()
    data = (folder / "plans" / "long.parquet").read_bytes()
    (tmp_path / "other" / "plans" / "long.parquet").write_bytes(data)
    with pytest.raises(PlanError, match="other sequences"):
        PackedReader(tmp_path / "other", plan="long")


def test_a_file_that_is_no_plan_is_refused(folder: Path) -> None:
    (folder / "plans" / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(PlanError, match="is no plan"):
        PackedReader(folder, plan="bad")
    (folder / "plans" / "bad.parquet").unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plan-only", "long"), "--force"),
        (("--plan-only", "a/b"), "is no name"),
        (("--plan-only", "n" * 101), "up to 100 letters"),
        (("--plan-only", "short", "--max-length", 100), "longer than --max-length 100 (the longest has "),
        (("--plan-only", "short", "--max-length", 100), "--overflow split"),
        (("--plan-only", "new", "--output", "elsewhere"), "--output"),
        ((), "--plan-only"),
    ],
    ids=lambda words: " ".join(map(str, words)) if isinstance(words, tuple) else "",
)
def test_plans_that_cannot_be_are_refused(folder: Path, words: tuple[object, ...], said: str) -> None:
    before = files_of(folder)
    run = pack("repack", folder, *words)
    assert run.code == 2 and said in run.err
    assert files_of(folder) == before


def test_report_inspect_and_verify_go_by_a_plan(folder: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "fresh", "--max-length", 2048, "--strategy", "spread")
    ours = pack("report", folder, "--plan", "long", "--json").json
    theirs = pack("report", tmp_path / "fresh", "--json").json
    assert (ours["plan"], theirs["plan"]) == ("long", None)
    assert {**ours, "path": "", "plan": None} == {**theirs, "path": ""}
    ours = pack("inspect", folder, "--plan", "long", "--pack", -1, "--json").json
    theirs = pack("inspect", tmp_path / "fresh", "--pack", -1, "--json").json
    assert ours["sequences"] == theirs["sequences"]
    run = pack("verify", folder, "--plan", "long", "--json")
    assert run.code == 0 and [check["name"] for check in run.json["checks"]][-1] == "plan long"
    for command in ("report", "inspect", "verify"):
        run = pack(command, folder, "--plan", "nope")
        assert (run.code, run.out) == (2, "") and "long" in run.err


def test_verify_finds_a_plan_that_leaves_a_sequence_out(folder: Path, tmp_path: Path) -> None:
    from padless.packer.plan import PackPlan
    from padless.packer.plan_file import write_plan

    built(DEMO, tmp_path / "out")
    plan = PackPlan(np.arange(3), np.array([0, 2, 3]))
    facts = {"max_length": 4096, "strategy": "none", "align": 1, "max_sequences_per_pack": 8}
    manifest = PackedReader(tmp_path / "out").manifest
    write_plan(tmp_path / "out" / "plans" / "few.parquet", plan, np.arange(3), manifest, facts)
    run = pack("verify", tmp_path / "out", "--plan", "few")
    assert run.code == 1 and "not at all" in run.out


def test_a_plan_over_a_table_that_leaves_its_packs_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(3, 1, 2), count_up(4, first=4)]))
    rewrite_table(tmp_path / "packed", lambda lines: lines[1].update({"offset": 6}))
    assert pack("repack", tmp_path / "packed", "--plan-only", "again").code == 0
    reader = PackedReader(tmp_path / "packed", plan="again")
    with pytest.raises(PlanError, match="of a pack of"):
        list(reader)
