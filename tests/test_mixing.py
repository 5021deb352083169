"""Mixing: each source gives its share to one record, by the seed alone, and nothing is lost in silence."""

from __future__ import annotations

import json
import signal
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import (
    MAX_LENGTH,
    TOKENIZER,
    Gate,
    assert_verified,
    await_chunks,
    build,
    build_arguments,
    built,
    files_of,
    pack,
    sequence_table,
    sequences_of,
    start,
    workers_in,
    write_lines,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.packer.errors import InputError
from padless.packer.mixing import Mix, draw


def text_rows(word: str, count: int) -> list[dict[str, str]]:
    return [{"text": " ".join([f"{word}{n}"] * (1 + n * 7 % 40))} for n in range(count)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for word, count in (("apple", 60), ("pear", 25), ("plum", 8)):
        write_lines(folder / f"{word}.jsonl", text_rows(word, count))
    return folder


def paths(folder: Path) -> list[Path]:
    return [folder / f"{word}.jsonl" for word in ("apple", "pear", "plum")]


def mixed(folder: Path, output: Path, *options: object) -> dict[str, Any]:
    """A build of the three sources that must succeed and verify; the manifest's counts by source."""
    first, *others = paths(folder)
    built(first, output, *others, *options)
    assert_verified(output)
    found: dict[str, Any] = json.loads((output / "manifest.json").read_bytes())
    return found


def times_by_record(output: Path) -> dict[tuple[int, int], int]:
    """(source, row) -> how often it is packed, of records of one sequence."""
    table = sequence_table(output)
    found: Counter[tuple[int, int]] = Counter()
    for source, row, length in zip(table["source"], table["row"], table["length"], strict=True):
        found[source, row] += length > 0
    return dict(found)


# What is drawn


def slow_amounts(by: str, tokens: int, trained: int) -> int:
    return {"records": 1, "tokens": tokens, "trained": trained}[by]


def test_a_record_of_no_trained_token_is_packed_no_more_often_than_allowed() -> None:
    mix = Mix(
        names=("a",), weights=None, max_records=(None,), max_tokens=(None,), by="trained", target=None,
        max_repeats=1, seed=0,
    )  # fmt: skip
    source, tokens = np.zeros(2, np.int32), np.array([1, 2])
    assert draw(mix, source, tokens, tokens - 1).tolist() == [1, 1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_source_gives_its_share_to_one_record_and_no_record_more_often_than_allowed(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 3))
    records = data.draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 30)), min_size=1, max_size=60)
    )
    weights = data.draw(
        st.none() | st.lists(st.sampled_from(["0", "0.3", "1", "2.5"]), min_size=count, max_size=count)
    )
    mix = Mix(
        names=tuple("abc"[:count]),
        weights=None if weights is None else tuple(map(Fraction, weights)),
        max_records=tuple(data.draw(st.none() | st.integers(1, 20)) for _ in range(count)),
        max_tokens=tuple(data.draw(st.none() | st.integers(1, 200)) for _ in range(count)),
        by=data.draw(st.sampled_from(["records", "tokens", "trained"])),
        target=data.draw(st.none() | st.integers(1, 500)),
        max_repeats=data.draw(st.integers(1, 4)),
        seed=data.draw(st.integers(0, 3)),
    )
    source = np.array([s for s, _ in records], np.int32)
    tokens = np.array([t for _, t in records], np.int64)
    trained = np.maximum(tokens - 1, 0)
    try:
        times = draw(mix, source, tokens, trained)
    except InputError as error:
        assert "no " in str(error) or "--max-repeats" in str(error)
        return
    assert times.tolist() == draw(mix, source, tokens, trained).tolist()
    assert not times[tokens == 0].any()
    amounts = [slow_amounts(mix.by, int(t), int(t) - 1) for t in tokens]
    gives, pool = [0] * count, [0] * count
    for n in range(len(tokens)):
        gives[source[n]] += amounts[n] * int(times[n])
    for number in range(count):
        mine = [n for n in range(len(tokens)) if source[n] == number and tokens[n]]
        drawn = [n for n in mine if times[n]]
        cap, most = mix.max_records[number], mix.max_tokens[number]
        assert cap is None or len(drawn) <= cap
        assert most is None or sum(int(tokens[n]) for n in drawn) <= most
        assert all(times[n] <= mix.max_repeats for n in mine)
        # Nobody is packed a third time before everybody who can be was packed a second time.
        assert not drawn or max(times[drawn]) - min(times[drawn]) <= 1
        pool[number] = sum(amounts[n] for n in mine)
    if mix.target is not None:
        longest = max(amounts)
        shares = mix.weights or tuple(map(Fraction, pool))
        if mix.weights is not None:
            for number in range(count):
                share = mix.target * shares[number] / sum(shares)
                assert gives[number] <= share + 1 and gives[number] > share - 1 - longest
        assert sum(gives) <= mix.target
    elif mix.weights is not None:
        held = [n for n in range(count) if mix.weights[n]]
        scale = [Fraction(gives[n]) / mix.weights[n] for n in held]
        slack = [Fraction(max(amounts) + 1) / mix.weights[n] for n in held]
        assert max(a - s for a, s in zip(scale, slack, strict=True)) <= min(
            a + s for a, s in zip(scale, slack, strict=True)
        )


def test_what_a_source_gives_does_not_hang_on_the_other_sources() -> None:
    def drawn(others: int) -> list[int]:
        mix = Mix(
            names=("a", "b"),
            weights=None,
            max_records=(10, None),
            max_tokens=(None, None),
            by="records",
            target=None,
            max_repeats=1,
            seed=3,
        )
        source = np.repeat(np.array([0, 1], np.int32), [30, others])
        tokens = np.full(len(source), 5, np.int64)
        return draw(mix, source, tokens, tokens)[:30].tolist()

    assert drawn(0) == drawn(7) and sum(drawn(7)) == 10


# What a build makes of it


def test_weights_are_shares_of_the_tokens_and_repeated_records_are_parts(
    sources: Path, tmp_path: Path
) -> None:
    apple, pear, plum = paths(sources)
    options = ("--weight", f"{apple}=0.5", "--weight", f"{pear}=0.3", "--weight", f"{plum}=0.2")
    manifest = mixed(sources, tmp_path / "out", *options, "--mix-target", 6000, "--max-repeats", 20)
    counts = manifest["statistics"]["by_source"]
    table = sequence_table(tmp_path / "out")
    longest = max(table["length"] + table["cut"])
    for here, share in zip(counts, (3000, 1800, 1200), strict=True):
        assert share - longest < here["tokens"] <= share
    times = times_by_record(tmp_path / "out")
    assert {n for (source, _), n in times.items() if source == 2} <= {3, 4, 5, 6, 7, 8, 9, 10}
    by_record: dict[int, list[Any]] = {}
    packed = sequences_of(tmp_path / "out")
    for number, record in enumerate(table["record"]):
        by_record.setdefault(record, []).append(number)
    for numbers in by_record.values():
        assert [table["part"][n] for n in numbers] == list(range(len(numbers)))
        if table["status"][numbers[0]] == "dropped":
            assert len(numbers) == 1 and table["reason"][numbers[0]] == "not-drawn"
        else:
            assert len({tuple(packed[n][0]) for n in numbers}) == 1
    assert str(sources) not in json.dumps(manifest)


def test_without_a_target_the_scarcest_source_decides_and_nothing_is_repeated(
    sources: Path, tmp_path: Path
) -> None:
    options = [word for path in paths(sources) for word in ("--weight", f"{path}=1")]
    manifest = mixed(sources, tmp_path / "out", *options, "--mix-by", "records")
    left = [here["records"] - here["dropped"] for here in manifest["statistics"]["by_source"]]
    assert left == [8, 8, 8]
    assert manifest["statistics"]["dropped_by_reason"] == {"not-drawn": 93 - 24}
    assert set(times_by_record(tmp_path / "out").values()) == {0, 1}


def test_caps_and_weights_stand_beside_their_sources_in_a_file(sources: Path, tmp_path: Path) -> None:
    apple, pear, plum = map(str, paths(sources))
    content = {
        "sources": [{"path": apple, "max_records": 12}, {"path": pear, "max_tokens": 300}, plum],
        "tokenizer": str(TOKENIZER),
        "max_length": MAX_LENGTH,
        "output": str(tmp_path / "out"),
    }
    (tmp_path / "mix.yaml").write_text(json.dumps(content))
    assert pack("build", "--config", tmp_path / "mix.yaml").code == 0
    assert_verified(tmp_path / "out")
    counts = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["statistics"]["by_source"]
    assert counts[0]["records"] - counts[0]["dropped"] == 12
    assert 170 < counts[1]["tokens"] <= 300
    assert counts[2]["dropped"] == 0
    typed = ("--max-records", f"{apple}=12", "--max-tokens", f"{pear}=300")
    mixed(sources, tmp_path / "typed", *typed)
    assert files_of(tmp_path / "typed") == files_of(tmp_path / "out")


def test_the_same_bytes_come_from_any_number_of_workers_and_from_a_resumed_build(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "many.jsonl", text_rows("word", 4000) * 12)
    other = write_lines(tmp_path / "few.jsonl", text_rows("other", 40))
    options = (other, "--weight", f"{source}=3", "--max-repeats", 2, "--mix-by", "trained")
    for way in ("threads", "processes"):
        with workers_in(way):
            built(source, tmp_path / way, *options, "--workers", 2)
    expected = files_of(tmp_path / "threads")
    assert files_of(tmp_path / "processes") == expected
    output = tmp_path / "resumed"
    gate = Gate(tmp_path / "gate")
    arguments = build_arguments(source, output, *options, "--workers", 2)
    with start(*arguments, way="processes", gate=gate) as process:
        await_chunks(output, process, gate)
        process.send_signal(signal.SIGKILL)
    assert built(source, output, *options, "--workers", 1)["resumed_chunks"] > 0
    assert files_of(output) == expected


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_copies_of_split_records_are_whole_each(strategy: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", text_rows("long", 40))
    cut = ("--max-length", 64, "--overflow", "split")
    built(source, tmp_path / "once", "--max-length", MAX_LENGTH)
    once = sequences_of(tmp_path / "once")
    built(source, tmp_path / "out", *cut, "--strategy", strategy, "--mix-target", 3 * 40, "--max-repeats", 3,
          "--mix-by", "records")  # fmt: skip
    assert_verified(tmp_path / "out")
    table, packed = sequence_table(tmp_path / "out"), sequences_of(tmp_path / "out")
    copies: dict[int, list[list[int]]] = {}
    for number, (record, start_at) in enumerate(zip(table["record"], table["start"], strict=True)):
        mine = copies.setdefault(record, [])
        if start_at == 0:
            mine.append([])
        assert len(mine[-1]) == start_at
        mine[-1] += packed[number][0]
        assert packed[number][1] == [-100, *packed[number][0][1:]]
    assert len(copies) == 40
    for record, found in copies.items():
        assert found == [once[record][0]] * 3


def test_a_copy_of_a_pair_is_a_pair_of_its_own(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} ", "chosen": "yes " * n, "rejected": "no " * n} for n in range(1, 20)]
    source = write_lines(tmp_path / "pairs.jsonl", rows)
    built(source, tmp_path / "out", "--max-length", 100, "--mix-target", 40, "--mix-by", "records",
          "--max-repeats", 3)  # fmt: skip
    assert_verified(tmp_path / "out")
    from padless.runtime.reader import PackedReader

    chosen: dict[int, list[int]] = {}
    for one in PackedReader(tmp_path / "out"):
        ids, is_chosen = one.extras["pair_id"].tolist(), one.extras["is_chosen"].tolist()
        for pair in set(ids):
            mine = [bit for bit, number in zip(is_chosen, ids, strict=True) if number == pair]
            assert pair not in chosen
            chosen[pair] = sorted(mine)
    assert len(chosen) == 40 and all(bits == [0, 1] for bits in chosen.values())
    assert len({pair % 2**40 for pair in chosen}) == 19


def test_the_validation_split_is_not_mixed(sources: Path, tmp_path: Path) -> None:
    first, *others = paths(sources)
    plain, mix = tmp_path / "plain", tmp_path / "mix"
    built(first, plain, *others, "--eval-fraction", 0.3)
    built(first, mix, *others, "--eval-fraction", 0.3, "--max-records", f"{first}=5")
    assert_verified(mix)
    assert sequence_table(mix / "validation") == sequence_table(plain / "validation")
    assert "not-drawn" in sequence_table(mix / "train")["reason"]


def joined(folder: Path) -> list[list[int]]:
    """The tokens of all copies of all records, fragments put together."""
    table, packed = sequence_table(folder), sequences_of(folder)
    found: list[list[int]] = []
    for number, begins in enumerate(table["start"]):
        if table["status"][number] != "dropped":
            if begins == 0:
                found.append([])
            found[-1] += packed[number][0]
    return found


@pytest.mark.parametrize(("before", "after"), [("bfd", "bfd"), ("bfd", "wrapped"), ("wrapped", "spread")])
def test_repack_cuts_each_copy_by_itself_and_keeps_what_was_drawn(
    before: str, after: str, sources: Path, tmp_path: Path
) -> None:
    plum = paths(sources)[2]
    options = ("--weight", f"{plum}=2", "--max-repeats", 4, "--overflow", "split", "--max-length", 128)
    mixed(sources, tmp_path / "built", *options, "--strategy", before)
    run = pack(
        "repack", tmp_path / "built", "--output", tmp_path / "out", "--max-length", 64, "--strategy", after
    )
    assert run.code == 0, run.err
    assert_verified(tmp_path / "out")
    assert joined(tmp_path / "out") == joined(tmp_path / "built")
    assert max(Counter(sequence_table(tmp_path / "built")["record"]).values()) > 3


def test_repack_of_a_mix_equals_a_build_where_nothing_is_over_the_length(
    sources: Path, tmp_path: Path
) -> None:
    options = ("--weight", f"{paths(sources)[0]}=2", "--max-repeats", 3)
    mixed(sources, tmp_path / "built", *options)
    mixed(sources, tmp_path / "fresh", *options, "--max-length", 512, "--strategy", "spread")
    run = pack(
        "repack",
        tmp_path / "built",
        "--output",
        tmp_path / "out",
        "--max-length",
        512,
        "--strategy",
        "spread",
    )
    assert run.code == 0, run.err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    run = pack(
        "repack", tmp_path / "built", "--output", tmp_path / "less", "--max-length", 64, "--overflow", "drop"
    )
    assert run.code == 2 and "is a mix, and" in run.err and not (tmp_path / "less").exists()


@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        ((), ("--seed", 5), "another mix"),
        ((), ("--max-length", 30, "--overflow", "drop"), "not drawn too"),
        ((), ("--max-length", 30, "--overflow", "truncate"), "not drawn too"),
        (("--mix-by", "trained"), ("--max-length", 30, "--overflow", "split"), "not drawn too"),
    ],
    ids=str,
)
def test_repack_of_a_mix_that_a_build_would_draw_otherwise_is_refused(
    options: tuple[object, ...], words: tuple[object, ...], said: str, tmp_path: Path
) -> None:
    rows = [{"text": f"{n} " + "word " * (60 if n % 2 else 5)} for n in range(40)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    seed = next(  # one by which a short record is drawn
        seed
        for seed in range(50)
        if mixed_lengths(source, tmp_path / str(seed), *options, "--seed", seed) < 30
    )
    words = words if "--seed" in words else (*words, "--seed", seed)
    run = pack("repack", tmp_path / str(seed), "--output", tmp_path / "out", *words)
    assert run.code == 2 and said in " ".join(run.err.split()), run.err
    assert not (tmp_path / "out").exists()


def mixed_lengths(source: Path, output: Path, *options: object) -> int:
    """Tokens of the one record that a mix draws."""
    built(source, output, "--format", "text", "--max-records", f"{source}=1", *options)
    return max(sequence_table(output)["length"])


def test_a_validation_split_beside_a_mix_is_repacked_as_any_other(sources: Path, tmp_path: Path) -> None:
    first, *others = paths(sources)
    options = (*others, "--eval-fraction", 0.3, "--max-records", f"{first}=5")
    built(first, tmp_path / "built", *options)
    built(first, tmp_path / "fresh", *options, "--max-length", 512)
    run = pack("repack", tmp_path / "built", "--output", tmp_path / "out", "--max-length", 512)
    assert run.code == 0, run.err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


@pytest.mark.parametrize("strategy", ["bfd", "spread", "ordered", "wrapped"])
def test_homogeneous_packs_hold_one_source_each_in_build_plan_and_repack(
    strategy: str, sources: Path, tmp_path: Path
) -> None:
    apple, pear, plum = paths(sources)
    options = ("--homogeneous", "--max-length", 256, "--strategy", strategy, "--packs-multiple", 2)
    mixed(sources, tmp_path / "built", *options, "--weight", f"{plum}=1", "--max-repeats", 2)

    def sources_by_pack(numbers: list[list[int]], source: list[int]) -> list[set[int]]:
        return [{source[n] for n in pack} for pack in numbers]

    from padless.runtime.reader import PackedReader

    run = pack("repack", tmp_path / "built", "--output", tmp_path / "again", "--max-length", 300)
    assert run.code == 0, run.err
    assert_verified(tmp_path / "again")
    run = pack("repack", tmp_path / "built", "--plan-only", "long", "--max-length", 400, "--strategy", "bfd")
    assert run.code == 0, run.err
    readers = [PackedReader(tmp_path / name) for name in ("built", "again")]
    for reader in (*readers, PackedReader(tmp_path / "built", plan="long")):
        table = sequence_table(reader.path)
        found = sources_by_pack([one.sequence_ids.tolist() for one in reader], table["source"])
        assert all(len(pack) == 1 for pack in found)
        assert set.union(*found) == {0, 1, 2} and len(found) % 2 == 0
    if strategy != "ordered":  # packs of a source do not follow each other
        of = sequence_table(tmp_path / "built")["source"]
        order = [of[one.sequence_ids[0]] for one in readers[0]]
        assert order != sorted(order)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weight", "{0}=0", "--weight", "{1}=0"), "--weight of all sources sum to 0"),
        (("--weight", "{0}=-1"), "a weight is 0 or more"),
        (("--weight", "{0}=heavy"), "--weight takes SOURCE=NUMBER, got"),
        (("--weight", "other.jsonl=1"), "--weight names other.jsonl, which is no source; sources are"),
        (("--max-records", "{0}=0"), "a cap is at least 1"),
        (("--max-records", "{0}=1.5"), "--max-records must give a whole number for each name"),
        (("--mix-target", 0), "--mix-target must be at least 1"),
        (("--mix-by", "bytes"), "--mix-by must be one of records, tokens, trained"),
        (("--max-repeats", 3), "--max-repeats 3 repeats nothing without"),
        (("--mix-target", 10**6), "of at most 1; allow it with --max-repeats"),
        (("--max-tokens", "{0}=1", "--weight", "{0}=1"), "and no tokens to draw from"),
        (("--max-tokens", "{0}=1", "--max-tokens", "{1}=1"), "the mix draws no record"),
    ],
)
def test_a_mix_that_cannot_be_is_told_and_leaves_nothing(
    options: tuple[object, ...], message: str, sources: Path, tmp_path: Path
) -> None:
    apple, pear, _ = paths(sources)
    filled = [str(option).format(apple, pear) for option in options]
    run = build(apple, tmp_path / "out", pear, *filled)
    assert run.code == 2 and message in " ".join(run.err.split()), run.err
    assert not (tmp_path / "out").exists()


def test_a_source_in_a_file_with_an_option_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(json.dumps({"sources": [{"path": "a.jsonl", "wait": 1}]}))
    run = pack("build", "--config", tmp_path / "mix.yaml")
    assert run.code == 2 and "has no option 'wait'; give path, and weight" in run.err
