"""Packed folders packed again without tokenizing: the same bytes as a fresh build, or a reason why not."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import (
    DEMO,
    Run,
    assert_verified,
    build,
    built,
    demo_rows,
    files_of,
    pack,
    sequence_table,
    sequences_of,
    state_of,
    write_lines,
)

from padless.packer import repack as repack_module
from padless.packer.repack_config import RepackConfig
from padless.runtime.reader import PackedReader

TEXT = ("--format", "text")


def repack(*arguments: object) -> Run:
    return pack("repack", *arguments, "--json")


def repacked(*arguments: object) -> dict[str, Any]:
    """A repack that must succeed; its summary."""
    run = repack(*arguments)
    assert run.code == 0, run.err
    found: dict[str, Any] = run.json
    return found


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of 1 to some 2,000 tokens."""
    words = " ".join(row["output"] for row in demo_rows()).split()
    rows = [{"text": " ".join(words[i * 7 : i * 7 + 1 + (i * 37) % 900])} for i in range(60)]
    return write_lines(tmp_path_factory.mktemp("texts") / "texts.jsonl", rows)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens with masks: of every third record only the last two are trained."""
    rows = []
    for i in range(60):
        ids = [(i * 31 + k * 7) % 900 + 3 for k in range(5 + (i * 37) % 300)]
        untrained = len(ids) - 2 if i % 3 == 0 else 3
        rows.append({"input_ids": ids, "labels": [-100] * untrained + ids[untrained:]})
    return write_lines(tmp_path_factory.mktemp("masked") / "masked.jsonl", rows)


def assert_like_fresh(
    tmp_path: Path,
    source: Path,
    before: Sequence[object],
    now: Sequence[object],
    common: Sequence[object] = (),
) -> None:
    """`now` over a folder built with `before` gives what a build with `before` and then `now` gives."""
    built(source, tmp_path / "old", *common, *before)
    built(source, tmp_path / "fresh", *common, *before, *now)
    repacked(tmp_path / "old", "--output", tmp_path / "again", *now)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "fresh")
    assert_verified(tmp_path / "again")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((), ("--max-length", 2048)),
        (("--max-length", 4096), ("--max-length", 800)),
        ((), ("--strategy", "spread", "--seed", 5)),
        ((), ("--strategy", "none", "--max-sequences-per-pack", 3)),
        ((), ("--shard-size", 60_000)),
        (("--shard-size", 40_000), ("--compression", "zstd")),
        (("--compression", "lz4"), ("--compression", "none", "--align", 8)),
        (("--train-on", "all", "--labels", "always"), ("--labels", "auto")),
        (("--train-on", "all"), ("--labels", "always", "--packs-multiple", 7)),
        (("--on-empty-reply", "drop", "--overflow", "drop"), ("--max-length", 300)),
        (("--overflow", "drop", "--max-length", 300), ("--strategy", "ordered", "--plan-window", 16)),
        (("--overflow", "truncate", "--max-length", 300), ("--strategy", "spread")),
        (("--eval-fraction", 0.2), ("--max-length", 2048, "--eval-strategy", "bfd")),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_chats_packed_again_are_a_fresh_build(
    tmp_path: Path, before: tuple[object, ...], now: tuple[object, ...]
) -> None:
    assert_like_fresh(tmp_path, DEMO, before, now)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (("--overflow", "split", "--max-length", 100), ("--max-length", 4096)),
        (("--overflow", "split", "--max-length", 100), ("--max-length", 64)),
        (("--overflow", "split", "--max-length", 300), ("--max-length", 170, "--strategy", "spread")),
        (("--overflow", "split", "--max-length", 100), ("--strategy", "none")),
        (("--overflow", "split", "--max-length", 64), ("--overflow", "truncate", "--max-length", 90)),
        (("--overflow", "split", "--max-length", 64), ("--overflow", "drop", "--max-length", 90)),
        (("--overflow", "split", "--compression", "lz4"), ("--max-length", 90)),
        (("--max-length", 8192), ("--overflow", "split", "--max-length", 128)),
        (("--overflow", "truncate", "--max-length", 128), ("--max-length", 64)),
        (("--overflow", "truncate", "--max-length", 128), ("--overflow", "drop", "--max-length", 100)),
        (("--overflow", "drop", "--max-length", 400), ("--max-length", 100)),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_texts_are_joined_before_they_are_cut_again(
    tmp_path: Path, texts: Path, before: tuple[object, ...], now: tuple[object, ...]
) -> None:
    assert_like_fresh(tmp_path, texts, before, now, TEXT)


def test_a_table_of_many_groups_is_counted_once(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a later group shows that records change, and it is read from its start again."""
    monkeypatch.setattr("padless.packer.repack_tables.LINES_PER_GROUP", 7)
    assert_like_fresh(tmp_path / "same", DEMO, (), ("--max-length", 2048))
    cut = ("--overflow", "split", "--max-length", 400)
    assert_like_fresh(tmp_path / "joined", texts, cut, ("--max-length", 4096), TEXT)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((), ("--overflow", "truncate", "--max-length", 100)),
        (("--overflow", "truncate", "--max-length", 150), ("--max-length", 40)),
        (("--overflow", "truncate", "--max-length", 150), ("--strategy", "spread")),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_cut_that_leaves_no_target_drops_the_record(
    tmp_path: Path, masked: Path, before: tuple[object, ...], now: tuple[object, ...]
) -> None:
    assert_like_fresh(tmp_path, masked, before, now)
    dropped = [reason for reason in sequence_table(tmp_path / "again")["reason"] if reason == "too-long"]
    assert dropped


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (("--overflow", "drop", "--max-length", 300), ("--max-length", 1024), "build once at the longest"),
        (
            ("--overflow", "truncate", "--max-length", 300),
            ("--max-length", 1024),
            "build once at the longest",
        ),
        ((), ("--max-length", 300), "have more than max_length 300"),
        ((), ("--max-length", 300, "--overflow", "truncate"), "end of a turn"),
        (("--train-on", "all"), ("--max-length", 300, "--overflow", "split"), "in mid-conversation"),
        ((), ("--overflow", "split"), "is for text"),
        (("--train-on", "all"), ("--strategy", "wrapped"), "in mid-conversation"),
        (("--eval-fraction", 0.2), ("--seed", 1), "another validation split"),
        ((), ("--align", 2000), "align"),
        ((), ("--strategy", "best"), "strategy"),
    ],
    ids=lambda words: " ".join(map(str, words)) if isinstance(words, tuple) else "",
)
def test_what_no_folder_can_tell_is_refused_with_the_reason(
    tmp_path: Path, before: tuple[object, ...], now: tuple[object, ...], said: str
) -> None:
    built(DEMO, tmp_path / "old", *before)
    run = repack(tmp_path / "old", "--output", tmp_path / "again", *now)
    assert (run.code, run.out) == (2, "")
    assert said in run.err
    assert not (tmp_path / "again").exists()


def test_texts_with_a_mask_are_not_split(tmp_path: Path, masked: Path) -> None:
    built(masked, tmp_path / "old")
    run = repack(tmp_path / "old", "--output", tmp_path / "again", "--max-length", 8, "--overflow", "split")
    assert run.code == 2 and "loss mask" in run.err
    assert not (tmp_path / "again").exists()


def test_the_same_repack_again_does_nothing_and_another_is_refused(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "old")
    words = (tmp_path / "old", "--output", tmp_path / "again", "--max-length", 2048)
    assert repacked(*words)["was_finished"] is False
    before = state_of(tmp_path / "again")
    assert repacked(*words)["was_finished"] is True
    assert built(DEMO, tmp_path / "again", "--max-length", 2048)["was_finished"] is True
    assert state_of(tmp_path / "again") == before
    run = repack(*words, "--seed", 3)
    assert run.code == 2 and "seed 0, now 3" in run.err and "--force" in run.err
    assert state_of(tmp_path / "again") == before
    assert repacked(*words, "--seed", 3, "--force")["was_finished"] is False
    assert_verified(tmp_path / "again")


def test_a_folder_is_never_packed_into_itself(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "old")
    before = state_of(tmp_path / "old")
    for output in (tmp_path / "old", tmp_path / "old" / "again"):
        run = repack(tmp_path / "old", "--output", output, "--max-length", 2048, "--force")
        assert run.code == 2 and "lie in each other" in run.err
    assert state_of(tmp_path / "old") == before


@pytest.mark.parametrize("column", ["input_ids", "seq_lengths", "sequence_ids"])
def test_a_damaged_shard_is_not_copied(tmp_path: Path, column: str) -> None:
    """Whatever the damage leads to until the checksums are known: their difference is what is told."""
    built(DEMO, tmp_path / "old")
    shard = next((tmp_path / "old").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    values = next(PackedReader(tmp_path / "old").batches()).flat(column)
    place = data.index(values.tobytes())
    data[place + values.itemsize] ^= 64  # of the second value; a number of no line, or of another sequence
    data[place + 2 * values.itemsize - 1] ^= 64
    shard.write_bytes(data)
    run = repack(tmp_path / "old", "--output", tmp_path / "again")
    assert run.code == 2 and shard.name in run.err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("place", ["while it plans", "while it compares"])
def test_an_interrupted_repack_compares_no_further_files(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What takes as long as reading all of a folder would hold whoever pressed Ctrl-C."""
    source = tmp_path / "packed"
    built(texts, source, *TEXT, "--max-length", "2048", "--shard-size", "4kB")
    interrupted, compared = threading.Event(), []

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def compare(reader: PackedReader, shard: int) -> None:
        compared.append(shard)
        if threading.current_thread() is threading.main_thread():
            interrupt()
        assert interrupted.wait(60)

    monkeypatch.setattr(repack_module, "_check_shard", compare)
    if place == "while it plans":
        monkeypatch.setattr(repack_module, "plan_splits", interrupt)
    shards = len(PackedReader(source).manifest.shards)
    with pytest.raises(KeyboardInterrupt):
        repack_module.repack(
            RepackConfig(folders=(str(source),), output=str(tmp_path / "again"), max_length=4096, workers=2)
        )
    assert shards > 5 and len(compared) < shards // 2
    assert not (tmp_path / "again" / "manifest.json").exists()


def test_several_folders_are_packed_together(tmp_path: Path, texts: Path) -> None:
    built(DEMO, tmp_path / "chats", "--labels", "always")
    built(texts, tmp_path / "texts", *TEXT, "--max-length", 4096, "--compression", "zstd")
    found = repacked(
        tmp_path / "chats", tmp_path / "texts", "--output", tmp_path / "both", "--max-length", 4096,
        "--labels", "auto", "--compression", "none",
    )  # fmt: skip
    assert_verified(tmp_path / "both")
    first, second, both = (sequences_of(tmp_path / name) for name in ("chats", "texts", "both"))
    assert [both[n] for n in sorted(both)] == [
        *(first[n] for n in sorted(first)),
        *(second[n] for n in sorted(second)),
    ]
    assert found["records"] == len(demo_rows()) + 60
    assert sequence_table(tmp_path / "both")["record"] == list(range(found["records"]))


def test_folders_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        built(DEMO, tmp_path / name)
    manifest = tmp_path / "two" / "manifest.json"
    content = json.loads(manifest.read_bytes())
    content["tokenizer"]["fingerprint"] = "sha256:" + "0" * 64
    manifest.write_text(json.dumps(content))
    run = repack(tmp_path / "one", tmp_path / "two", "--output", tmp_path / "both")
    assert run.code == 2 and "another tokenizer" in run.err


def test_excluded_records_stay_in_the_account(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "old", "--on-empty-reply", "drop")
    (tmp_path / "out.txt").write_bytes(b"\xef\xbb\xbf3\r\n0\r\n\r\n")  # as Windows writes it
    found = repacked(tmp_path / "old", "--output", tmp_path / "new", "--exclude", tmp_path / "out.txt")
    assert found["dropped_by_reason"]["excluded"] == 2
    table, before = sequence_table(tmp_path / "new"), sequence_table(tmp_path / "old")
    assert [table["reason"][n] for n in (0, 3)] == ["excluded", "excluded"]
    assert [table["cut"][n] for n in (0, 3)] == [before["length"][n] for n in (0, 3)]
    kept, old = sequences_of(tmp_path / "new"), sequences_of(tmp_path / "old")
    assert kept == {number: tokens for number, tokens in old.items() if number not in (0, 3)}
    assert_verified(tmp_path / "new")


@pytest.mark.parametrize(
    ("lines", "said"),
    [("3\nx y\n", "line 2 is 'x y', no whole number"), ("999999\n", "999,999"), ("9" * 23, "one a line")],
)
def test_a_bad_exclude_file_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    built(DEMO, tmp_path / "old")
    (tmp_path / "out.txt").write_text(lines)
    run = repack(tmp_path / "old", "--output", tmp_path / "new", "--exclude", tmp_path / "out.txt")
    assert run.code == 2 and said in run.err


def test_a_build_names_the_way_to_pack_a_packed_folder_again(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "old")
    run = build(tmp_path / "old", tmp_path / "new")
    assert run.code == 2 and "pack-dataset repack" in run.err


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (("--strategy", "wrapped"), ("--max-length", 2048)),
        (("--strategy", "wrapped", "--max-length", 4096), ("--strategy", "bfd")),
        (("--strategy", "wrapped", "--overflow", "split"), ("--max-length", 90, "--strategy", "spread")),
        (("--strategy", "wrapped", "--overflow", "split"), ("--strategy", "none")),
        (("--strategy", "wrapped", "--overflow", "split"), ("--overflow", "drop")),
        (("--strategy", "wrapped", "--overflow", "truncate"), ("--strategy", "bfd")),
        (("--strategy", "wrapped", "--overflow", "drop"), ("--max-length", 300)),
        (("--strategy", "wrapped", "--max-length", 4096, "--labels", "always"), ("--seed", 3)),
        (("--overflow", "split", "--max-length", 100), ("--strategy", "wrapped")),
        (("--overflow", "split", "--max-length", 4096), ("--strategy", "wrapped", "--max-length", 64)),
        (
            (
                "--overflow",
                "truncate",
            ),
            ("--strategy", "wrapped"),
        ),
        (
            ("--strategy", "wrapped", "--overflow", "split", "--eval-fraction", 0.3),
            ("--max-length", 200),
        ),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_what_was_cut_where_packs_ended_is_joined_first(
    tmp_path: Path, texts: Path, before: tuple[object, ...], now: tuple[object, ...]
) -> None:
    longest = () if "--overflow" in before else ("--max-length", 4096)
    assert_like_fresh(tmp_path, texts, (*longest, *before), now, TEXT)


def test_masked_tokens_are_not_cut_where_packs_end(tmp_path: Path, masked: Path) -> None:
    built(masked, tmp_path / "old")
    run = repack(tmp_path / "old", "--output", tmp_path / "out", "--strategy", "wrapped")
    assert run.code == 2 and "are masked" in " ".join(run.err.split())
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs and answers with a label, of 20 to some 300 tokens, and conversations with weighed turns."""
    folder = tmp_path_factory.mktemp("judged")
    words = " ".join(row["output"] for row in demo_rows()).split()

    def turn(role: str, start: int, count: int) -> dict[str, Any]:
        return {"role": role, "content": " ".join(words[start : start + count])}

    pairs: list[Any] = []
    weighed: list[Any] = []
    for n in range(40):
        ask = [turn("user", n, 5 + n % 7)]
        better, worse = turn("assistant", n + 9, 3 + n * 3 % 70), turn("assistant", n + 50, 2 + n * 5 % 60)
        if n % 3:
            pairs.append({"prompt": ask, "chosen": [better], "rejected": [worse]})
        else:
            pairs.append({"messages": [*ask, better], "label": bool(n % 2)})
        weighed.append({"messages": [*ask, {**better, "weight": 0.5 + n}, turn("user", n + 3, 4), worse]})
    write_lines(folder / "pairs.jsonl", [row for row in pairs if "prompt" in row])
    write_lines(folder / "rated.jsonl", [row for row in pairs if "label" in row])
    write_lines(folder / "weighed.jsonl", weighed)
    return folder


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((), ("--max-length", 4096, "--strategy", "spread")),
        ((), ("--strategy", "none", "--labels", "always")),
        (("--compression", "zstd"), ("--compression", "none", "--packs-multiple", 4)),
        (("--overflow", "drop"), ("--max-length", 150)),
        (("--overflow", "drop", "--max-length", 150), ("--max-length", 90)),
        (("--overflow", "drop", "--max-length", 200), ("--align", 8)),
        (("--eval-fraction", 0.3), ("--seed", 0, "--max-length", 2048)),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_further_columns_go_along_and_pairs_stay_together(
    tmp_path: Path, judged: Path, before: tuple[object, ...], now: tuple[object, ...]
) -> None:
    assert_like_fresh(tmp_path, judged, before, now, ("--template", "chatml", "--on-empty-reply", "drop"))
    table = "train/sequences.parquet" if "--eval-fraction" in before else "sequences.parquet"
    assert pq.read_table(tmp_path / "again" / table).num_rows


def test_pairs_that_no_longer_fit_a_pack_are_told(tmp_path: Path, judged: Path) -> None:
    built(judged / "pairs.jsonl", tmp_path / "old", "--template", "chatml")
    run = repack(tmp_path / "old", "--output", tmp_path / "new", "--max-length", 150)
    said = " ".join(run.err.split())
    assert run.code == 2 and "pairs together" in said and "--overflow drop" in said
    built(
        judged / "pairs.jsonl",
        tmp_path / "short",
        "--template",
        "chatml",
        "--max-length",
        150,
        "--overflow",
        "drop",
    )
    run = repack(tmp_path / "short", "--output", tmp_path / "new", "--max-length", 300)
    assert run.code == 2 and "build once at the longest" in " ".join(run.err.split())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((), ("--max-length", 4096)),
        (("--overflow", "drop"), ("--max-length", 100)),
        (("--overflow", "drop", "--max-length", 120), ("--max-length", 60, "--strategy", "ordered")),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_turns_stay_sequences_of_their_own(
    tmp_path: Path, judged: Path, before: tuple[object, ...], now: tuple[object, ...]
) -> None:
    common = ("--template", "chatml", "--expand-turns", "--on-empty-reply", "drop")
    assert_like_fresh(tmp_path, judged / "weighed.jsonl", before, now, common)


def test_a_plan_keeps_pairs_together_and_says_so(tmp_path: Path, judged: Path) -> None:
    built(judged, tmp_path / "old", "--template", "chatml")
    run = repack(tmp_path / "old", "--plan-only", "other", "--strategy", "spread", "--max-length", 600)
    assert run.code == 0, run.err
    reader = PackedReader(tmp_path / "old", plan="other")
    assert reader.plan is not None and reader.plan.facts["grouped_by"] == "pair_id"
    packs_of_pair: dict[int, set[int]] = {}
    for number, one in enumerate(reader):
        for pair in one.extras["pair_id"].tolist():
            packs_of_pair.setdefault(pair, set()).add(number)
    packs_of_pair.pop(-1)
    assert packs_of_pair and all(len(packs) == 1 for packs in packs_of_pair.values())


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LONG = "words " * 60
WEIGHED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": LONG, "weight": 0.5}]


@pytest.mark.parametrize(
    "rows",
    [
        [CHAT, {"prompt": "a", "chosen": LONG, "rejected": LONG}],
        [CHAT, {"prompt": "a", "completion": LONG, "label": True}],
        [CHAT, {"messages": WEIGHED}],
        [
            {"prompt_ids": [9], "response_ids": [7, 6], "advantages": 1.0},
            {"prompt_ids": [9], "response_ids": [7] * 90, "advantages": 1.0, "group_id": 3},
        ],
    ],
    ids=["pair_id", "label", "loss_weight", "group_id"],
)
def test_a_column_whose_sequences_are_all_dropped_is_as_in_a_fresh_build(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    sources = [write_lines(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    now = ("--max-length", 64, "--overflow", "drop")
    if "response_ids" in rows[0]:
        sources = [write_lines(tmp_path / "all.jsonl", rows)]
    for number, source in enumerate(sources):
        built(source, tmp_path / str(number), "--template", "chatml")
    built(sources[0], tmp_path / "fresh", *sources[1:], "--template", "chatml", *now)
    repacked(*(tmp_path / str(n) for n in range(len(sources))), "--output", tmp_path / "again", *now)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "fresh")
    assert_verified(tmp_path / "again")


def test_folders_with_and_without_further_columns_go_together(tmp_path: Path, judged: Path) -> None:
    built(DEMO, tmp_path / "chats", "--template", "chatml")
    built(judged, tmp_path / "judged", "--template", "chatml")
    repacked(tmp_path / "chats", tmp_path / "judged", "--output", tmp_path / "both")
    assert_verified(tmp_path / "both")
    count = len(demo_rows())
    for one in PackedReader(tmp_path / "both"):
        pair = dict(zip(one.sequence_ids.tolist(), one.extras["pair_id"].tolist(), strict=True))
        assert all(
            value == -1 if line < count else value == -1 or value >= count for line, value in pair.items()
        )
        weights, trained = one.extras["loss_weight"], one.labels != -100
        ends = np.cumsum(one.seq_lengths)
        for line, end, length in zip(one.sequence_ids, ends, one.seq_lengths, strict=True):
            if line < count:
                here = slice(int(end - length), int(end))
                assert (weights[here] == trained[here]).all()


def test_a_build_onto_a_folder_with_excluded_records_is_another_build(tmp_path: Path) -> None:
    options = ("--on-empty-reply", "drop")
    built(DEMO, tmp_path / "whole", *options)
    (tmp_path / "out.txt").write_text("0\n5\n")
    repacked(tmp_path / "whole", "--exclude", tmp_path / "out.txt", "--output", tmp_path / "less")
    before = state_of(tmp_path / "less")
    run = build(DEMO, tmp_path / "less", *options)
    assert run.code == 2 and "another build" in " ".join(run.err.split()) and "excluded" in run.err
    assert state_of(tmp_path / "less") == before


def test_an_empty_list_leaves_nothing_out(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "whole", "--on-empty-reply", "drop")
    (tmp_path / "none.txt").write_text("\n")
    repacked(tmp_path / "whole", "--exclude", tmp_path / "none.txt", "--output", tmp_path / "same")
    assert files_of(tmp_path / "same") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("column", [["1"], [1.7], [1, None]], ids=["text", "fractions", "a null"])
def test_a_parquet_list_of_anything_but_numbers_is_refused(tmp_path: Path, column: list[Any]) -> None:
    built(DEMO, tmp_path / "whole")
    pq.write_table(pa.table({"record": column}), tmp_path / "out.parquet")
    run = repack(tmp_path / "whole", "--exclude", tmp_path / "out.parquet", "--output", tmp_path / "less")
    assert run.code == 2 and "give record numbers" in " ".join(run.err.split())


def test_a_folder_given_twice_is_refused(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "whole")
    run = repack(tmp_path / "whole", tmp_path / "whole" / ".", "--output", tmp_path / "both")
    assert run.code == 2 and "given twice" in run.err


@pytest.mark.parametrize("option", [("--overflow", "drop"), ("--shard-size", "1MB")])
def test_a_plan_takes_no_option_that_it_would_not_follow(tmp_path: Path, option: tuple[str, str]) -> None:
    built(DEMO, tmp_path / "whole")
    run = repack(tmp_path / "whole", "--plan-only", "other", *option)
    assert run.code == 2 and option[0] in run.err and "--output" in run.err
    assert not (tmp_path / "whole" / "plans").exists()
