"""Packs of several lengths: short sequences in short packs, long ones in long packs, from plan to reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from building import DEMO, assert_verified, build, built, files_of, pack, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_packing import reference_bfd, reference_ffd, reference_lengths

from padless.packer.errors import InputError
from padless.packer.plan import PackPlan, check_plan, lower_bound, plan_hash
from padless.packer.strategies import CUTS, STRATEGIES
from padless.packer.strategies.by_length import SAMPLE, plan_lengths
from padless.packer.strategies.counting import random_order
from padless.runtime.format import ManifestError, PlanError
from padless.runtime.reader import PackedReader

each_strategy = pytest.mark.parametrize("name", STRATEGIES)

inputs = st.tuples(
    st.lists(st.integers(1, 40), max_size=60),
    st.sampled_from([(40, 80), (8, 16, 48), (4, 12, 40), (16, 40)]),
    st.none() | st.integers(2, 6),
)
Input = tuple[list[int], tuple[int, ...], int | None]


def planned(name: str, lengths: list[int], max_lengths: tuple[int, ...], **constraints: Any) -> PackPlan:
    return plan_lengths(STRATEGIES[name], lengths, max_lengths, cuts=name in CUTS, **constraints)


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [plan.order[a:b].tolist() for a, b in zip(plan.offsets, plan.offsets[1:], strict=False)]


@each_strategy
@settings(max_examples=40, deadline=None)
@given(inputs, st.sampled_from([1, 4]), st.sampled_from([1, 3]), st.sampled_from([None, 7]), st.booleans())
def test_every_token_is_packed_once_within_the_limits_of_its_length(
    name: str, given_input: Input, align: int, multiple: int, window: int | None, shuffle: bool
) -> None:
    lengths, max_lengths, cap = given_input
    constraints = {"align": align, "packs_multiple": multiple, "plan_window": window, "shuffle": shuffle}
    try:
        plan = planned(name, lengths, max_lengths, max_sequences_per_pack=cap, **constraints)
    except InputError as problem:
        assert "packs_multiple" in str(problem)
        return
    check_plan(plan, lengths, max_lengths[-1], cap)
    assert plan.buckets is not None and tuple(length for length, _ in plan.buckets) == max_lengths
    below = 0
    for length, part in plan.by_bucket(0):
        assert len(part) % multiple == 0
        for number, one in enumerate(packs_of(part)):
            padded = [-(-size // align) * align for size in sizes_of(part, lengths, number)]
            assert sum(padded) <= length
            if window is not None and name not in CUTS:
                assert max(one) - min(one) < window
            if multiple == 1 and name not in CUTS:
                assert max(padded) > below
        below = length
    again = planned(name, lengths, max_lengths, max_sequences_per_pack=cap, **constraints)
    assert plan_hash(again, lengths, max_lengths[-1]) == plan_hash(plan, lengths, max_lengths[-1])


def sizes_of(part: PackPlan, lengths: list[int], number: int) -> list[int]:
    entries = range(int(part.offsets[number]), int(part.offsets[number + 1]))
    if part.lengths is not None:
        return [int(part.lengths[entry]) for entry in entries]
    return [lengths[int(part.order[entry])] for entry in entries]


@each_strategy
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10)), max_size=20), st.sampled_from([1, 2]))
def test_groups_share_a_pack_of_the_shortest_length_that_holds_them(
    name: str, pairs: list[tuple[int, int]], multiple: int
) -> None:
    lengths = [length for pair in pairs for length in pair]
    groups = [number for number in range(len(pairs)) for _ in range(2)]
    if name in CUTS:
        with pytest.raises(InputError, match="kept together"):
            planned(name, lengths or [1], (10, 20), groups=groups or [0])
        return
    try:
        plan = planned(name, lengths, (10, 20), groups=groups, packs_multiple=multiple)
    except InputError as problem:
        assert "packs_multiple" in str(problem) and "0 tokens, the next multiple" in str(problem)
        return
    check_plan(plan, lengths, 20)
    assert plan.buckets is not None and all(packs % multiple == 0 for _, packs in plan.buckets)
    short = plan.buckets[0][1]
    for number, one in enumerate(packs_of(plan)):
        assert sorted(groups[n] for n in one[::2]) == sorted(groups[n] for n in one[1::2])
        if multiple == 1 and number >= short:
            assert max(sum(pairs[groups[n]]) for n in one) > 10


@pytest.mark.parametrize(("name", "loop"), [("bfd", reference_bfd), ("ffd", reference_ffd)])
@settings(max_examples=60, deadline=None)
@given(given_input=inputs, seed=st.integers(0, 3))
def test_packs_of_several_lengths_are_those_of_the_loop(
    name: str, loop: Any, given_input: Input, seed: int
) -> None:
    lengths, max_lengths, cap = given_input
    plan = planned(name, lengths, max_lengths, max_sequences_per_pack=cap, seed=seed)
    expected = reference_lengths(
        lengths,
        max_lengths,
        lambda some, length: loop(some, length, cap),
        lambda count: random_order(count, seed).tolist(),
        SAMPLE,
    )
    assert [packs_of(part) for _, part in plan.by_bucket(0)] == expected


def test_the_picture_of_the_docstring() -> None:
    plan = planned("bfd", [7, 3, 1, 2, 2], (4, 8), seed=1)
    assert sum(length * packs for length, packs in plan.buckets or ()) == 16


def test_long_packs_are_as_full_as_packs_of_one_length_where_there_is_enough_to_fill_them() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(727), 1.4, 30_000).clip(1, 32768).astype(int)
    for name in ("bfd", "spread"):
        plan = planned(name, lengths.tolist(), (2048, 8192, 32768), max_sequences_per_pack=1024)
        capacity = sum(length * packs for length, packs in plan.buckets or ())
        assert lengths.sum() / capacity > 0.998, name


LENGTHS = "256,512,1024"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("buckets") / "packed"
    built(DEMO, path, "--max-length", LENGTHS)
    return path


def test_a_folder_of_several_lengths_says_which_packs_are_of_which(folder: Path) -> None:
    assert_verified(folder)
    reader = PackedReader(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    statistics = manifest["statistics"]
    assert manifest["options"]["max_length"] == [256, 512, 1024] and statistics["max_length"] == 1024
    listed = statistics["buckets"]
    assert [(one["max_length"], one["packs"]) for one in listed] == [
        (bucket.max_length, bucket.packs) for bucket in reader.buckets
    ]
    for name in ("packs", "sequences", "tokens", "bound_packs"):
        assert sum(one[name] for one in listed) == statistics[name], name
    number = 0
    below = 0
    for bucket in reader.buckets:
        assert bucket.packs > 0
        for _ in range(bucket.packs):
            assert below < reader[number].max_seqlen
            assert reader[number].num_tokens <= bucket.max_length
            number += 1
        below = bucket.max_length
    report = pack("report", folder, "--json").json
    assert report["capacity"] == sum(one["max_length"] * one["packs"] for one in listed)
    assert report["utilization"] == report["tokens"] / report["capacity"] > 0.97
    for row, one in zip(report["buckets"], listed, strict=True):
        assert all(row[name] == one[name] for name in ("max_length", "packs", "sequences", "tokens"))
        assert row["utilization"] == one["tokens"] / (one["packs"] * one["max_length"])
    assert sum(report["pack_utilization"]["packs"]) == report["packs"]
    last = pack("inspect", folder, "--pack", -1, "--json").json
    first = pack("inspect", folder, "--pack", 0, "--json").json
    assert (first["max_length"], last["max_length"]) == (256, 1024)
    printed = pack("report", folder).out
    assert "packs of 256, 512 and 1,024" in " ".join(printed.split())


def test_packs_of_one_length_are_shuffled_and_not_by_length(folder: Path) -> None:
    reader = PackedReader(folder)
    longest = [reader[number].max_seqlen for number in range(reader.buckets[0].packs)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_repack_to_several_lengths_equals_a_fresh_build(strategy: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{'word ' * (n * 7 % 60 + 1)}\n" for n in range(120)))
    more = ("--strategy", strategy, "--overflow", "split", "--packs-multiple", 2)
    built(text, tmp_path / "one", "--max-length", 128)
    built(text, tmp_path / "fresh", "--max-length", "16,32", *more)
    assert_verified(tmp_path / "fresh")
    run = pack("repack", tmp_path / "one", "--output", tmp_path / "again", "--max-length", "32,16", *more)
    assert run.code == 0, run.err
    assert files_of(tmp_path / "again") == files_of(tmp_path / "fresh")
    assert built(text, tmp_path / "again", "--max-length", "16,32", *more)["was_finished"]
    run = pack("repack", tmp_path / "fresh", "--output", tmp_path / "back", "--max-length", 128)
    assert run.code == 0, run.err
    buckets = PackedReader(tmp_path / "fresh").buckets
    assert all(bucket.packs % 2 == 0 for bucket in buckets)


def test_repack_of_folders_of_different_lengths_takes_the_one_that_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    rows = [{"text": "one two three"}, {"text": "four five"}]
    built(write_lines(tmp_path / "more.jsonl", rows), tmp_path / "more")
    run = pack("repack", folder, tmp_path / "more", "--output", tmp_path / "no")
    assert run.code == 2 and "--max-length" in run.err
    run = pack("repack", folder, tmp_path / "more", "--output", tmp_path / "out", "--max-length", 1024)
    assert run.code == 0, run.err
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["options"]["max_length"] == 1024
    again = pack("repack", tmp_path / "out", "--output", tmp_path / "next", "--max-length", "512,1024")
    assert again.code == 0, again.err
    assert_verified(tmp_path / "next")


def test_splits_homogeneous_packs_and_pairs_are_packed_by_length_too(tmp_path: Path) -> None:
    rows = [{"text": "word " * (n % 50 + 1)} for n in range(80)]
    one, other = (write_lines(tmp_path / f"{name}.jsonl", rows) for name in ("one", "other"))
    built(one, tmp_path / "out", other, "--max-length", "32,64", "--homogeneous", "--eval-fraction", 0.2)
    assert_verified(tmp_path / "out")
    for split in ("train", "validation"):
        assert len(PackedReader(tmp_path / "out", split=split).buckets) == 2
    pairs = [
        {"prompt": "Which?", "chosen": "this " * (n % 20 + 1), "rejected": "that " * (n % 7 + 1)}
        for n in range(30)
    ]
    source = write_lines(tmp_path / "pairs.jsonl", pairs)
    built(source, tmp_path / "pairs", "--max-length", "32,128", "--format", "preference")
    assert_verified(tmp_path / "pairs")


def test_plans_of_several_lengths_are_read_and_judged(folder: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "fresh", "--max-length", "300,900")
    run = pack("repack", folder, "--plan-only", "two", "--max-length", "300,900")
    assert run.code == 0, run.err
    ours, theirs = PackedReader(folder, plan="two"), PackedReader(tmp_path / "fresh")
    assert ours.buckets == theirs.buckets and len(ours.buckets) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.sequence_ids, other.sequence_ids)
    reports = [
        pack("report", *words, "--json").json for words in ((folder, "--plan", "two"), (tmp_path / "fresh",))
    ]
    assert {**reports[0], "path": "", "plan": None} == {**reports[1], "path": ""}
    assert pack("verify", folder, "--plan", "two").code == 0
    assert pack("inspect", folder, "--plan", "two", "--pack", -1, "--json").json["max_length"] == 900


def test_a_manifest_or_plan_whose_buckets_are_not_its_packs_is_refused(folder: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--max-length", "300,900")
    file = tmp_path / "out" / "manifest.json"
    manifest = json.loads(file.read_bytes())
    good = manifest["statistics"]["buckets"]
    for bad in (
        good[:1],
        good[::-1],
        [{**good[0], "packs": good[0]["packs"] + 1}, good[1]],
        [{**good[0], "packs": "9"}, good[1]],
        "two",
    ):
        manifest["statistics"]["buckets"] = bad
        file.write_text(json.dumps(manifest))
        with pytest.raises(ManifestError, match="buckets"):
            PackedReader(tmp_path / "out")
    moved = [{**good[0], "packs": good[0]["packs"] + 1}, {**good[1], "packs": good[1]["packs"] - 1}]
    manifest["statistics"]["buckets"] = moved
    file.write_text(json.dumps(manifest))
    run = pack("verify", tmp_path / "out")
    assert run.code == 1 and "max_length is 300" in run.out
    assert pack("repack", folder, "--plan-only", "bad", "--max-length", "300,900").code == 0
    path = folder / "plans" / "bad.parquet"
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"padless"])
    facts["buckets"][0]["packs"] += 1
    pq.write_table(table.replace_schema_metadata({b"padless": json.dumps(facts).encode()}), path)
    with pytest.raises(PlanError, match="buckets"):
        PackedReader(folder, plan="bad")
    path.unlink()


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ("256,", "'--max-length': '256,' is no length of packs"),
        ("long", "'--max-length': 'long' is no length of packs"),
        ("256,256", "twice"),
        ("0,256", "at least 1"),
        ("100,200", "200"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths: str, said: str, tmp_path: Path) -> None:
    run = build(DEMO, tmp_path / "out", "--max-length", lengths)
    assert run.code == 2 and said in run.err and "--max-length" in run.err, run.err
    assert not (tmp_path / "out").exists()


def test_an_alignment_holds_for_every_length(tmp_path: Path) -> None:
    run = build(DEMO, tmp_path / "out", "--max-length", "250,1024", "--align", 8)
    assert run.code == 2 and "--max-length 250 is no multiple of align 8" in run.err
    assert built(DEMO, tmp_path / "out", "--max-length", "256,1024", "--align", 8)["packs"] > 0
    assert_verified(tmp_path / "out")


def test_a_file_of_options_names_several_lengths(tmp_path: Path) -> None:
    for number, written in enumerate(("[1024, 512]", "512,1024")):
        config = tmp_path / f"{number}.yaml"
        config.write_text(f"max_length: {written}\n")
        words = ("build", DEMO, "--tokenizer", DEMO.parent / "tokenizer", "--config", config)
        run = pack(*words, "--output", tmp_path / f"out{number}")
        assert run.code == 0, run.err
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out1")


def test_rows_of_one_length_are_filled_up_and_the_export_says_so(folder: Path, tmp_path: Path) -> None:
    for target in ("torchtitan", "unpacked", "nemo"):
        run = pack("export", folder, "--to", target, "--output", tmp_path / target)
        assert run.code == 0, run.err
    readme = (tmp_path / "torchtitan" / "README.md").read_text()
    assert "packs of 256 and 512 tokens are filled up to 1,024" in readme
    assert "filled up" not in (tmp_path / "unpacked" / "README.md").read_text()


def test_the_bound_is_that_of_each_lengths_own_sequences() -> None:
    from padless.packer.bounds import facts_of_buckets

    lengths = np.array([7, 3, 1, 2, 2, 6, 5])
    plan = planned("bfd", lengths.tolist(), (4, 8))
    facts = facts_of_buckets(plan, lengths, max_length=8, cap=None, align=1, strategy="bfd", groups=None)
    for (length, part), bucket in zip(plan.by_bucket(8), facts, strict=True):
        assert bucket["bound_packs"] == lower_bound(lengths[part.order], length) <= bucket["packs"]


@pytest.mark.parametrize("length", [40, "30,60"])
def test_the_bound_of_a_plan_over_pairs_is_that_of_pairs(length: object, tmp_path: Path) -> None:
    rows = [{"prompt": "Which?", "chosen": "this " * 12, "rejected": "that " * 12} for _ in range(20)]
    source = write_lines(tmp_path / "pairs.jsonl", rows)
    built(source, tmp_path / "out", "--max-length", 100)
    built(source, tmp_path / "fresh", "--max-length", length)
    run = pack("repack", tmp_path / "out", "--plan-only", "short", "--max-length", length)
    assert run.code == 0, run.err
    ours = pack("report", tmp_path / "out", "--plan", "short", "--json").json
    theirs = pack("report", tmp_path / "fresh", "--json").json
    assert ours["bound_packs"] == theirs["bound_packs"] == ours["packs"] == 20
