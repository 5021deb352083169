"""Plans that cut stored sequences into fragments: nothing is written anew, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import DEMO, assert_verified, built, files_of, pack, sequences_of, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Folder, count_up, write_folder
from reference_packing import reference_wrapped

from padless.packer import plan_file
from padless.packer.plan import PackPlan
from padless.packer.plan_file import write_plan
from padless.packer.strategies import STRATEGIES
from padless.runtime.format import PlanError
from padless.runtime.plans import tables_hash
from padless.runtime.reader import PackedReader

LENGTH, SHORT = 256, 64


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{'some words and more ' * (n * 7 % 23 + 1)}{n}\n" for n in range(90)))
    return path


@pytest.fixture(scope="module")
def folder(text: Path) -> Path:
    """Texts in packs of LENGTH, and plans of SHORT: concatenated and cut, and split where too long."""
    path = text.parent / "packed"
    built(text, path, "--max-length", LENGTH)
    for name, words in (("wrapped", ("--strategy", "wrapped")), ("split", ("--overflow", "split"))):
        run = pack("repack", path, "--plan-only", name, "--max-length", SHORT, *words)
        assert run.code == 0, run.err
    return path


@pytest.fixture(scope="module")
def fresh(text: Path, folder: Path) -> dict[str, Path]:
    """The folders that builds of the same kind give."""
    found = {name: text.parent / name for name in ("wrapped", "split")}
    more = ("--max-length", SHORT, "--overflow", "split")
    built(text, found["wrapped"], *more, "--strategy", "wrapped")
    built(text, found["split"], *more)
    return found


each_way = pytest.mark.parametrize("name", ["wrapped", "split"])


@each_way
def test_a_plan_gives_the_packs_of_a_folder_cut_that_way(
    name: str, folder: Path, fresh: dict[str, Path]
) -> None:
    ours, theirs = PackedReader(folder, plan=name), PackedReader(fresh[name])
    assert len(ours) == len(theirs) and ours.plan is not None and ours.plan.starts is not None
    for one, other in zip(ours, theirs, strict=True):
        for column in ("input_ids", "labels", "seq_lengths"):
            assert np.array_equal(getattr(one, column), getattr(other, column)), column
            assert getattr(one, column).dtype == getattr(other, column).dtype, column
        for column in ("num_tokens", "num_targets", "max_seqlen", "attention_cost"):
            assert getattr(one, column) == getattr(other, column), column


@each_way
def test_every_token_of_every_sequence_is_in_one_fragment(name: str, folder: Path) -> None:
    reader = PackedReader(folder, plan=name)
    assert reader.plan is not None and reader.plan.starts is not None
    parts: dict[int, list[tuple[int, list[int]]]] = {}
    entry = 0
    for one in reader:
        ends = np.cumsum(one.seq_lengths)
        for number, end, length in zip(one.sequence_ids, ends, one.seq_lengths, strict=True):
            ids = one.input_ids[end - length : end].tolist()
            labels = one.labels[end - length : end].tolist()
            assert labels == [-100, *ids[1:]]
            parts.setdefault(int(number), []).append((int(reader.plan.starts[entry]), ids))
            entry += 1
    joined = {number: [i for _, ids in sorted(found) for i in ids] for number, found in parts.items()}
    assert joined == {number: ids for number, (ids, _) in sequences_of(folder).items()}


@each_way
def test_report_verify_and_inspect_go_by_the_fragments(
    name: str, folder: Path, fresh: dict[str, Path]
) -> None:
    ours = pack("report", folder, "--plan", name, "--json").json
    theirs = pack("report", fresh[name], "--json").json
    own = ("path", "plan", "notable", "duplicates", "warnings")  # fragments have no lines in our table
    assert {**ours, **dict.fromkeys(own)} == {**theirs, **dict.fromkeys(own)}
    assert ours["records"]["split"] > 0 and ours["notable"]["longest"][0]["length"] <= SHORT
    run = pack("verify", folder, "--plan", name)
    assert run.code == 0 and "of them fragments" in run.out
    reader = PackedReader(folder, plan=name)
    assert reader.plan is not None and reader.plan.starts is not None
    entry = int(np.flatnonzero(reader.plan.starts)[0])
    number = int(np.searchsorted(reader.plan.offsets, entry, side="right")) - 1
    found = pack("inspect", folder, "--plan", name, "--pack", number, "--json").json["sequences"]
    assert found[entry - int(reader.plan.offsets[number])]["start"] == reader.plan.starts[entry]
    assert f"from its token {reader.plan.starts[entry]}" in " ".join(
        pack("inspect", folder, "--plan", name, "--pack", number).out.split()
    )


@pytest.mark.parametrize("target", ["unpacked", "nemo", "torchtitan"])
def test_exports_by_a_plan_are_those_of_a_folder_cut_that_way(
    target: str, folder: Path, fresh: dict[str, Path], tmp_path: Path
) -> None:
    run = pack("export", folder, "--plan", "wrapped", "--to", target, "--output", tmp_path / "ours")
    assert run.code == 0, run.err
    assert pack("export", fresh["wrapped"], "--to", target, "--output", tmp_path / "theirs").code == 0
    data = [
        {n: b for n, b in files_of(tmp_path / who).items() if n.endswith((".arrow", ".parquet"))}
        for who in ("ours", "theirs")
    ]
    tables = [
        [
            pa.ipc.open_stream(b).read_all() if n.endswith(".arrow") else pq.read_table(pa.BufferReader(b))
            for n, b in sorted(files.items())
        ]
        for files in data
    ]
    assert tables[0] == tables[1] and tables[0]


def test_a_stream_by_a_plan_is_the_stream_of_a_folder_cut_that_way(
    folder: Path, fresh: dict[str, Path]
) -> None:
    stream = pytest.importorskip("padless.runtime.stream")
    options = {"packs_per_batch": 2, "rank": 0, "world_size": 2, "balance": "attention"}
    ours = stream.PackedStream(folder, plan="wrapped", **options)
    theirs = stream.PackedStream(fresh["wrapped"], **options)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"):
            assert one[name].equal(other[name]), name


def test_a_plan_of_several_lengths_may_cut_too(folder: Path) -> None:
    for name, words in (("a", ("--strategy", "wrapped")), ("b", ("--overflow", "split"))):
        run = pack("repack", folder, "--plan-only", name, "--max-length", "32,64", "--force", *words)
        assert run.code == 0, run.err
        assert pack("verify", folder, "--plan", name).code == 0
        reader = PackedReader(folder, plan=name)
        assert [bucket.max_length for bucket in reader.buckets] == [32, 64]
        assert sum(one.num_tokens for one in reader) == reader.manifest.statistics["tokens"]
        (folder / "plans" / f"{name}.parquet").unlink()


def test_a_plan_in_which_nothing_had_to_be_cut_is_one_of_whole_sequences(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "text.jsonl", [{"text": "a b c"}, {"text": "d e"}])
    built(source, tmp_path / "out")
    for name, words in (("a", ("--strategy", "wrapped")), ("b", ("--overflow", "split"))):
        assert pack("repack", tmp_path / "out", "--plan-only", name, *words).code == 0
        table = pq.read_table(tmp_path / "out" / "plans" / f"{name}.parquet")
        assert table["starts"].null_count == len(table) > 0
        plan = PackedReader(tmp_path / "out", plan=name).plan
        assert plan is not None and plan.starts is None


def test_two_runs_that_write_one_plan_leave_the_later_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "out", Folder(packs=[count_up(4), count_up(3), count_up(5)]))
    path = tmp_path / "out" / "plans" / "x.parquet"
    manifest = PackedReader(tmp_path / "out").manifest

    def write(order: list[int]) -> None:
        plan = PackPlan(np.array(order), np.arange(4))
        write_plan(path, plan, np.arange(3), manifest, {"max_length": 8})

    made = plan_file.list_array

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(plan_file, "list_array", made)
        write([2, 1, 0])
        return made(*arguments)

    monkeypatch.setattr(plan_file, "list_array", meanwhile)
    write([1, 0, 2])
    plan = PackedReader(tmp_path / "out", plan="x").plan
    assert plan is not None and plan.sequences.tolist() == [1, 0, 2]
    assert [one.name for one in path.parent.iterdir()] == ["x.parquet"]


def test_the_weight_of_a_fragments_first_token_is_that_of_an_untrained_one(tmp_path: Path) -> None:
    rows = [{"input_ids": [*range(5, 35)], "loss_weight": [0.5] * 30} for _ in range(3)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    built(source, tmp_path / "out", "--format", "tokenized", "--max-length", 64)
    run = pack("repack", tmp_path / "out", "--plan-only", "cut", "--strategy", "wrapped", "--max-length", 20)
    assert run.code == 0, run.err
    for one in PackedReader(tmp_path / "out", plan="cut"):
        expected = np.where(one.labels == -100, 0, 0.5)
        assert one.extras["loss_weight"].tolist() == expected.tolist()
        assert (one.labels == -100).sum() == len(one.seq_lengths)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--strategy", "wrapped"), "in mid-conversation"),
        (("--overflow", "split", "--max-length", 100), "in mid-conversation"),
        (("--overflow", "truncate", "--max-length", 100), "--overflow split"),
        (("--overflow", "drop", "--max-length", 100), "--output"),
        (("--labels", "always"), "--labels"),
    ],
)
def test_what_a_plan_cannot_do_is_refused(words: tuple[object, ...], said: str, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--limit", 50, "--train-on", "all")
    before = files_of(tmp_path / "out")
    run = pack("repack", tmp_path / "out", "--plan-only", "new", *words)
    assert run.code == 2 and said in run.err, run.err
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("words", [("--strategy", "wrapped"), ("--overflow", "split")])
def test_a_plan_cuts_no_mask(words: tuple[str, str], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"input_ids": [*range(5, 35)], "loss_mask": [0, 1] * 15}])
    built(source, tmp_path / "out", "--format", "tokenized")
    before = files_of(tmp_path / "out")
    run = pack("repack", tmp_path / "out", "--plan-only", "new", *words, "--max-length", 20)
    assert run.code == 2 and "loss mask" in run.err, run.err
    assert files_of(tmp_path / "out") == before


def write_by_hand(folder: Path, columns: dict[str, Any], plan_hash: str) -> None:
    """A plan file as FORMAT.md describes it, without padless."""
    facts = {"max_length": 4, "strategy": "wrapped", "max_sequences_per_pack": 8, "align": 1}
    facts |= {"sequence_table": tables_hash(PackedReader(folder).manifest), "plan_hash": plan_hash}
    types = {"sequences": pa.int64(), "starts": pa.int32(), "lengths": pa.int32()}
    schema = pa.schema(
        [(name, pa.list_(kind)) for name, kind in types.items()], metadata={b"padless": json.dumps(facts)}
    )
    (folder / "plans").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns, schema=schema), folder / "plans" / "hand.parquet")


def test_a_plan_file_with_cuts_is_what_the_format_says(tmp_path: Path) -> None:
    import xxhash

    folder = write_folder(tmp_path / "packed", Folder(packs=[count_up(3, 1, 2), count_up(4, first=4)]))
    folder = tmp_path / "packed" if folder is None else tmp_path / "packed"
    columns = {
        "sequences": [[3, 0, 1], [0, 2, 3]],
        "starts": [[2, 0, 0], [2, 0, 0]],
        "lengths": [[2, 2, 1], [1, 2, 2]],
    }
    numbers = [3, 0, 1, 0, 2, 3, 0, 3, 6, 2, 0, 0, 2, 0, 0, 2, 2, 1, 1, 2, 2]
    digest = "xxh3:" + xxhash.xxh3_128_hexdigest(np.array(numbers, "<i8").tobytes())
    write_by_hand(folder, columns, digest)
    with pytest.raises(PlanError, match="damaged"):
        write_by_hand(folder, columns, "xxh3:" + "0" * 32)
        PackedReader(folder, plan="hand")
    write_by_hand(folder, columns, digest)
    reader = PackedReader(folder, plan="hand")
    whole = sequences_of(folder)
    first, second = reader[0], reader[1]
    assert first.sequence_ids.tolist() == [3, 0, 1] and first.seq_lengths.tolist() == [2, 2, 1]
    assert first.input_ids.tolist() == whole[3][0][2:] + whole[0][0][:2] + whole[1][0]
    assert first.labels.tolist() == [-100, whole[3][0][3], *whole[0][1][:2], *whole[1][1]]
    assert second.input_ids.tolist() == whole[0][0][2:] + whole[2][0] + whole[3][0][:2]
    packs, lengths = reader.pack_sizes()
    assert sorted(zip(packs.tolist(), lengths.tolist(), strict=True)) == [
        *((0, 1), (0, 2), (0, 2)),
        *((1, 1), (1, 2), (1, 2)),
    ]
    for bad, said in (
        ({**columns, "starts": [[2, 0], [2, 0, 0]]}, "one for each"),
        ({**columns, "starts": [None, [2, 0, 0]]}, "nulls"),
        ({**columns, "starts": [[-2, 0, 0], [2, 0, 0]]}, "before"),
        ({**columns, "lengths": [[2, 2, 0], [1, 2, 2]]}, "empty"),
        ({**columns, "lengths": None}, "nulls"),
    ):
        bad = {name: values or [None, None] for name, values in bad.items()}
        write_by_hand(folder, bad, digest)
        with pytest.raises(PlanError, match=said):
            PackedReader(folder, plan="hand")


@pytest.mark.parametrize(
    ("starts", "lengths", "said"),
    [
        ([0, 30], [30, 33], "not at all"),  # of 64 the last is missing
        ([0, 31], [32, 33], "twice"),
        ([0, 32], [30, 32], "not at all"),
    ],
)
def test_verify_finds_fragments_that_are_not_the_whole(
    starts: list[int], lengths: list[int], said: str, tmp_path: Path
) -> None:
    rows = [{"input_ids": [*range(64)]}]
    built(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out", "--format", "tokenized")
    plan = PackPlan(np.zeros(2, np.int32), np.array([0, 1, 2]), np.array(starts), np.array(lengths))
    facts = {"max_length": 64, "strategy": "wrapped", "align": 1, "max_sequences_per_pack": 8}
    manifest = PackedReader(tmp_path / "out").manifest
    write_plan(tmp_path / "out" / "plans" / "bad.parquet", plan, np.arange(1), manifest, facts)
    run = pack("verify", tmp_path / "out", "--plan", "bad")
    assert run.code == 1 and said in run.out
    beyond = PackPlan(plan.order, plan.offsets, np.array([0, 32]), np.array([32, 33]))
    write_plan(tmp_path / "out" / "plans" / "bad.parquet", beyond, np.arange(1), manifest, facts)
    with pytest.raises(PlanError, match="beyond"):
        _ = PackedReader(tmp_path / "out", plan="bad")[0]


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12),
    strategy=st.sampled_from([*STRATEGIES]),
    max_lengths=st.sampled_from([(8,), (5, 10), (4, 8, 16)]),
    seed=st.integers(0, 3),
)
def test_packs_by_any_plan_are_the_slices_that_it_names(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    strategy: str,
    max_lengths: tuple[int, ...],
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("any")
    rows = [{"input_ids": [*range(100 * n, 100 * n + length)]} for n, length in enumerate(lengths, 1)]
    rows = [{"input_ids": [i % 1000 for i in row["input_ids"]]} for row in rows]
    source = write_lines(path / "rows.jsonl", rows)
    built(source, path / "out", "--format", "tokenized", "--max-length", 30)
    words = ("--strategy", strategy, "--overflow", "split", "--seed", seed)
    given_lengths = ",".join(map(str, max_lengths))
    run = pack("repack", path / "out", "--plan-only", "any", "--max-length", given_lengths, *words)
    assert run.code == 0, run.err
    run = pack("verify", path / "out", "--plan", "any")
    assert run.code == 0, run.out
    reader = PackedReader(path / "out", plan="any")
    plan = reader.plan
    assert plan is not None
    limits = [bucket.max_length for bucket in reader.buckets for _ in range(bucket.packs)]
    whole = sequences_of(path / "out")
    for number in range(len(reader)):
        expected: list[int] = []
        for entry in range(int(plan.offsets[number]), int(plan.offsets[number + 1])):
            ids = whole[int(plan.sequences[entry])][0]
            start = 0 if plan.starts is None else int(plan.starts[entry])
            expected += ids if plan.lengths is None else ids[start : start + int(plan.lengths[entry])]
        assert reader[number].input_ids.tolist() == expected and len(expected) <= limits[number]
    if strategy == "wrapped" and len(max_lengths) == 1:
        packs = reference_wrapped(lengths, max_lengths[0], 1024)
        found = [one.seq_lengths.tolist() for one in reader]
        assert sorted(found) == sorted([taken for _, _, taken in one] for one in packs)
    assert_verified(path / "out")
