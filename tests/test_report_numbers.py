"""Every number of a report equals one computed from the shards and the table, line by line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import MAX_LENGTH, built, demo_rows, pack, write_lines
from packed import Folder, count_up, write_folder
from slow_report import (
    before_cutting,
    labels_of,
    lengths_of,
    lines_of,
    nearest,
    rank,
    repeated,
    rows_of,
    tokens_by_id,
)

from padless.packer import measure as measuring
from padless.packer.cost import cost_of
from padless.packer.measure import measure
from padless.packer.report import BATCH_SIZES, build_report
from padless.packer.strategies import STRATEGIES
from padless.runtime.reader import PackedReader

MODEL = cost_of(
    {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 50,
    }
)


def build_mixed(folder: Path) -> Path:
    """Two sources, of which one has a long record, a malformed and a repeated one."""
    rows = demo_rows()
    first = write_lines(folder / "a.jsonl", rows[:150])
    long = {**rows[150], "output": "word " * 3000}
    second = write_lines(folder / "b.jsonl", [rows[150], long, {"instruction": 5}, *rows[151:220], rows[0]])
    built(first, folder / "packed", second, "--overflow", "drop", "--on-bad-record", "drop", "--seed", 3)
    return folder / "packed"


def build_split(folder: Path) -> Path:
    """Texts that are cut into fragments."""
    texts = [{"text": f"number {number} " * (40 + 90 * (number % 13))} for number in range(60)]
    built(
        write_lines(folder / "t.jsonl", texts), folder / "packed", "--overflow", "split", "--max-length", 256
    )
    return folder / "packed"


@pytest.fixture(scope="module", params=[build_mixed, build_split])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = request.param(tmp_path_factory.mktemp("report"))
    return folder


@pytest.fixture(scope="module")
def report(packed: Path) -> dict[str, Any]:
    return build_report(packed, model=MODEL)


def test_packs_and_tokens(packed: Path, report: dict[str, Any]) -> None:
    packs = rows_of(packed)
    tokens = sum(len(one["input_ids"]) for one in packs)
    assert report["packs"] == len(packs)
    assert report["tokens"] == tokens
    assert report["sequences"] == len(lengths_of(packs))
    assert report["utilization"] == tokens / (len(packs) * report["max_length"])
    trained = sum(label != -100 for one in packs for label in labels_of(one))
    cut = sum(line["cut"] for line in lines_of(packed))
    assert report["tokens_by_fate"] == {"trained": trained, "masked": tokens - trained, "cut": cut}
    tenths = [0] * 20
    for one in packs:
        share = len(one["input_ids"]) / report["max_length"]
        tenths[next(k for k in range(20) if share <= (k + 1) / 20 + 1e-12)] += 1
    assert report["pack_utilization"]["packs"] == tenths
    full = sum(len(one["input_ids"]) == report["max_length"] for one in packs)
    assert report["pack_utilization"]["full"] == full
    names = ("max_length", "packs", "sequences", "tokens", "utilization")
    of_one_length = {name: report[name] for name in names}
    assert report["buckets"] == [of_one_length]


def test_a_pack_at_its_marks(packed: Path, report: dict[str, Any]) -> None:
    packs = rows_of(packed)
    of_packs = {
        "sequences": [len(one["seq_lengths"]) for one in packs],
        "tokens": [len(one["input_ids"]) for one in packs],
        "trained_tokens": [sum(label != -100 for label in labels_of(one)) for one in packs],
        "longest": [max(one["seq_lengths"]) for one in packs],
        "attention_cost": [sum(length**2 for length in one["seq_lengths"]) for one in packs],
    }
    marks = {"p5": 0.05, "median": 0.5, "p95": 0.95}
    for name, values in of_packs.items():
        wanted = {mark: nearest(values, share) for mark, share in marks.items()}
        assert report["per_pack"][name] == wanted, name
    rows = max(sum(one["seq_lengths"]) + 128 * len(one["seq_lengths"]) for one in packs)
    flash = {"rows": rows, "heads_times_head_size": (2**31 - 1) // rows}
    assert report["flash_attention_2_backward"] == flash


def test_lengths_before_and_after(packed: Path, report: dict[str, Any]) -> None:
    for name, lengths in (
        ("sequence_lengths", lengths_of(rows_of(packed))),
        ("record_lengths", before_cutting(lines_of(packed))),
    ):
        found = report[name]
        shares = {
            "min": 0,
            "p5": 0.05,
            "p25": 0.25,
            "median": 0.5,
            "p75": 0.75,
            "p95": 0.95,
            "p99": 0.99,
            "max": 1,
        }
        assert {mark: found[mark] for mark in shares} == {m: rank(lengths, s) for m, s in shares.items()}
        assert found["mean"] == pytest.approx(sum(lengths) / len(lengths))
        histogram = found["histogram"]
        for begin, end, sequences, tokens in zip(
            histogram["edges"],
            histogram["edges"][1:],
            histogram["sequences"],
            histogram["tokens"],
            strict=False,
        ):
            inside = [length for length in lengths if begin <= length < end]
            assert (sequences, tokens) == (len(inside), sum(inside))
        assert sum(histogram["sequences"]) == len(lengths)


def test_padding_and_gain(packed: Path, report: dict[str, Any]) -> None:
    lengths = lengths_of(rows_of(packed))
    generator = np.random.default_rng(1)
    tokens, squares, pairs = (np.zeros(300) for _ in range(3))
    padding = {size: np.zeros(300) for size in BATCH_SIZES}

    def attention(length: int) -> float:
        near = sum(min(place + 1, 50) for place in range(length))
        return MODEL.full * length * (length + 1) / 2 + MODEL.sliding * near

    for trial in range(300):
        order = generator.permutation(lengths).tolist()
        for size in BATCH_SIZES:
            batches = [order[at : at + size] for at in range(0, len(order), size)]
            padded = sum(max(batch) * len(batch) for batch in batches)
            padding[size][trial] = 1 - sum(lengths) / padded
            if size == 8:
                tokens[trial] = padded
                squares[trial] = sum(max(batch) ** 2 * len(batch) for batch in batches)
                if trial < 30:
                    pairs[trial] = sum(attention(max(batch)) * len(batch) for batch in batches)
    for size in BATCH_SIZES:
        assert report["padding"]["random"][str(size)] == pytest.approx(padding[size].mean(), abs=0.004)
        ordered = sorted(lengths)
        batches = [ordered[at : at + size] for at in range(0, len(ordered), size)]
        padded = sum(max(batch) * len(batch) for batch in batches)
        assert report["padding"]["grouped"][str(size)] == pytest.approx(1 - sum(lengths) / padded)
    gain = report["speed_up"]
    assert gain["linear"] == pytest.approx(tokens.mean() / report["capacity"], rel=0.01)
    assert gain["quadratic"] == pytest.approx(squares.mean() / sum(n * n for n in lengths), rel=0.02)
    now = sum(map(attention, lengths))
    before = MODEL.linear * tokens.mean() + pairs[:30].mean()
    assert gain["total"] == pytest.approx(before / (MODEL.linear * report["capacity"] + now), rel=0.02)
    assert gain["attention_share"] == pytest.approx(now / (MODEL.linear * report["capacity"] + now))


def test_steps_keep_the_rows(packed: Path, report: dict[str, Any]) -> None:
    packs = rows_of(packed)
    sequences = len(lengths_of(packs))
    for size in BATCH_SIZES:
        row = report["steps"][str(size)]
        assert row["unpacked_steps"] == len(range(0, sequences, size))
        rows = {k: k * sequences / len(packs) for k in range(1, 100)}
        closest = min(rows, key=lambda k: abs(rows[k] - size))
        assert row["packs_per_step"] == closest
        assert row["rows_per_step"] == pytest.approx(rows[closest])
        assert row["packed_steps"] == len(range(0, len(packs), closest))


def test_fates_by_source(packed: Path, report: dict[str, Any]) -> None:
    lines = lines_of(packed)
    for number, found in enumerate(report["by_source"]):
        mine = [line for line in lines if line["source"] == number]
        firsts = [line for line in mine if line["part"] == 0]
        for word, status in (("whole",) * 2, ("truncated",) * 2, ("split", "fragment"), ("dropped",) * 2):
            assert found[word] == sum(line["status"] == status for line in firsts)
        assert found["records"] == len(firsts)
        assert found["tokens"] == sum(line["length"] for line in mine)
        assert found["sequences"] == sum(line["length"] > 0 for line in mine)
        assert found["trained_tokens"] == sum(line["num_targets"] for line in mine)
        assert found["cut_tokens"] == sum(line["cut"] for line in mine)
        assert found["share"] == found["tokens"] / report["tokens"]
        reasons = {line["reason"] for line in mine if line["reason"]}
        assert set(found["examples"]) == reasons
        for reason in reasons:
            rows = [line["row"] for line in firsts if line["reason"] == reason]
            assert found["examples"][reason] == rows[:3]
            gone = [line for line in firsts if (line["reason"], line["status"]) == (reason, "dropped")]
            assert found["dropped_by_reason"].get(reason, 0) == len(gone)
            cut = sum(line["cut"] for line in mine if line["reason"] == reason)
            assert found["cut_by_reason"].get(reason, 0) == cut


def test_other_plans_are_those_that_the_strategies_make(packed: Path, report: dict[str, Any]) -> None:
    lengths = [line["length"] for line in lines_of(packed) if line["length"]]
    assert {row["max_length"] for row in report["alternatives"]} >= {
        report["max_length"] * k for k in (1, 2, 4)
    }
    for row in report["alternatives"]:
        fit = [length for length in lengths if length <= row["max_length"]]
        plan = STRATEGIES[row["strategy"]](fit, row["max_length"], max_sequences_per_pack=1024)
        assert row["packs"] == len(plan)
        assert row["bound_packs"] == slow_bound(fit, row["max_length"])
        assert row["utilization"] == pytest.approx(sum(fit) / (len(plan) * row["max_length"]))
        assert row["sequences_per_pack"] == len(fit) / len(plan)
        assert row["too_long"] == len(lengths) - len(fit)
    here = next(
        r for r in report["alternatives"] if (r["strategy"], r["max_length"]) == ("bfd", report["max_length"])
    )
    assert here["packs"] == report["packs"]


def test_the_ends_of_the_scale(packed: Path, report: dict[str, Any]) -> None:
    lines = [dict(line, sequence_id=number) for number, line in enumerate(lines_of(packed))]
    kept = [line for line in lines if line["length"]]
    for name, among, key in (
        (
            "longest",
            [line for line in lines if line["length"] + line["cut"]],
            lambda x: -x["length"] - x["cut"],
        ),
        ("shortest", kept, lambda x: x["length"]),
        ("least_trained", [x for x in kept if x["length"] >= 16], lambda x: x["num_targets"] / x["length"]),
        ("most_cut", [line for line in lines if line["cut"]], lambda x: -x["cut"]),
    ):
        wanted = sorted(among, key=lambda line: (key(line), line["sequence_id"]))[:5]
        found = report["notable"][name]
        assert [line["sequence_id"] for line in found] == [line["sequence_id"] for line in wanted]
        for shown, line in zip(found, wanted, strict=True):
            same = ("source", "row", "part", "length", "num_targets", "cut")
            names = [source["source"] for source in report["by_source"]]
            assert [shown[key] for key in same] == [names[line["source"]], *(line[key] for key in same[1:])]
            assert shown["pack"] == (-1 if line["pack"] is None else line["pack"])


def test_duplicates(packed: Path, report: dict[str, Any]) -> None:
    counted = repeated(rows_of(packed))
    found = report["duplicates"]
    assert found["sequences"] == sum(count - 1 for count in counted.values())
    assert found["tokens"] == sum((count - 1) * len(tokens) for tokens, count in counted.items())
    copies = sorted((count for count in counted.values() if count > 1), reverse=True)
    assert [group["copies"] for group in found["groups"]] == copies[:5]
    lines, tokens_of = lines_of(packed), tokens_by_id(rows_of(packed))
    at = {(line["source"], line["row"]): number for number, line in enumerate(lines) if line["part"] == 0}
    for group in found["groups"]:
        same = {tokens_of[at[source, row]] for source, row in group["rows"]}
        assert len(same) == 1 and {len(tokens) for tokens in same} == {group["length"]}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("balance", [None, "attention"])
def test_ranks_wait_for_the_costliest_pack(packed: Path, ranks: int, balance: str | None) -> None:
    """The order is the runtime's own, seen through streams; the waiting is computed anew."""
    stream = pytest.importorskip("padless.runtime.stream")
    lines = lines_of(packed)
    packs = rows_of(packed)
    shares = build_report(packed)["idle"]
    if ranks > len(packs):
        assert str(ranks) not in shares
        return
    costs = [24576 * len(one["input_ids"]) + sum(n * n for n in one["seq_lengths"]) for one in packs]
    batches = [
        [
            batch["sequence_ids"].tolist()
            for batch in stream.PackedStream(packed, rank=rank, world_size=ranks, balance=balance)
        ]
        for rank in range(ranks)
    ]
    busy = waited = 0.0
    for step in zip(*batches, strict=True):
        of_ranks = [costs[lines[ids[0]]["pack"]] for ids in step]
        busy += sum(of_ranks)
        waited += ranks * max(of_ranks)
    assert shares[str(ranks)]["balanced" if balance else "random"] == pytest.approx(1 - busy / waited)


def test_a_model_weighs_what_a_pack_costs(packed: Path, report: dict[str, Any]) -> None:
    """The random order is the same whatever a pack costs, so only the costs differ."""
    stream = pytest.importorskip("padless.runtime.stream")
    lines = lines_of(packed)
    costs = [0.0] * report["packs"]
    for line in lines:
        if line["length"]:
            costs[line["pack"]] += float(MODEL.total(np.array([float(line["length"])]))[0])
    streams = [stream.PackedStream(packed, rank=rank, world_size=2) for rank in range(2)]
    busy = waited = 0.0
    for step in zip(*streams, strict=True):
        of_ranks = [costs[lines[int(batch["sequence_ids"][0])]["pack"]] for batch in step]
        busy += sum(of_ranks)
        waited += 2 * max(of_ranks)
    assert report["idle"]["2"]["random"] == pytest.approx(1 - busy / waited)
    assert report["model"]["flops_a_pair"] == MODEL.full + MODEL.sliding
    assert report["model"]["flops_a_token"] == MODEL.linear


def test_a_pack_of_more_flops_than_64_bits_hold_is_the_costliest(tmp_path: Path) -> None:
    """As those of 405 billion parameters on a sequence of a million tokens."""
    write_folder(tmp_path / "packed", Folder(packs=[count_up(9), count_up(1)], max_length=10))
    small = MODEL.total(np.array([9.0, 1.0]))
    factor = 2**62 // int(small[1])
    large = replace(
        MODEL, linear=MODEL.linear * factor, full=MODEL.full * factor, sliding=MODEL.sliding * factor
    )
    shares = build_report(tmp_path / "packed", model=large)["idle"]["2"]
    assert shares["random"] == pytest.approx(1 - float(small.sum()) / (2 * float(small[0])))


def test_records_and_packs_as_a_whole(packed: Path, report: dict[str, Any]) -> None:
    lines, packs = lines_of(packed), rows_of(packed)
    firsts = [line for line in lines if line["part"] == 0]
    of_status = Counter(line["status"] for line in firsts)
    assert report["records"] == {
        "in": len(firsts),
        "split": of_status["fragment"],
        **{name: of_status[name] for name in ("whole", "truncated", "dropped")},
    }
    gone = Counter(line["reason"] for line in firsts if line["status"] == "dropped")
    assert report["dropped_by_reason"] == gone
    cut: Counter[str] = Counter()
    for line in lines:
        if line["cut"]:
            cut[line["reason"]] += line["cut"]
    assert report["cut_by_reason"] == cut
    records = [
        json.loads(line)
        for source in sorted(packed.parent.glob("*.jsonl"))
        for line in source.read_text().splitlines()
    ]
    assert report["empty_replies"] == sum(record.get("output") == "" for record in records)
    assert report["capacity"] == len(packs) * report["max_length"]
    assert report["bound_packs"] == slow_bound(lengths_of(packs), report["max_length"])
    marks = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
    for name, values in (
        ("sequences_per_pack", [len(one["seq_lengths"]) for one in packs]),
        ("max_seqlen", [max(one["seq_lengths"]) for one in packs]),
    ):
        assert report[name] == {mark: nearest(values, share) for mark, share in marks.items()}
    assert report["lengths_tried"] == {"every": 1, "sequences": len(lengths_of(packs))}


def slow_bound(lengths: list[int], max_length: int) -> int:
    """What each length up to half a pack, all shorter ones forgotten, asks for (Martello and Toth's L2)."""
    found = math.ceil(sum(lengths) / max_length)
    for least in {length for length in lengths if length <= max_length // 2} | {max_length // 2}:
        alone = [length for length in lengths if length > max_length - least]
        halves = [length for length in lengths if max_length / 2 < length <= max_length - least]
        small = [length for length in lengths if least <= length <= max_length / 2]
        room = len(halves) * max_length - sum(halves)
        more = max(0, math.ceil((sum(small) - room) / max_length))
        found = max(found, len(alone) + len(halves) + more)
    return found


def test_no_number_goes_unchecked(report: dict[str, Any]) -> None:
    """What the tests above look at is all that a report has; a new number needs a test of its own."""
    checked = {
        *("packs", "tokens", "sequences", "utilization", "tokens_by_fate", "pack_utilization", "capacity"),
        *(
            "per_pack",
            "flash_attention_2_backward",
            "sequence_lengths",
            "record_lengths",
            "padding",
            "speed_up",
        ),
        *("steps", "by_source", "alternatives", "notable", "duplicates", "idle", "model", "records"),
        *("dropped_by_reason", "cut_by_reason", "empty_replies", "bound_packs", "sequences_per_pack"),
        *("max_seqlen", "lengths_tried", "buckets", "mix"),
    }
    given = {"path", "plan", "max_length", "strategy"}
    told_from_those = {"warnings"}
    assert set(report) == checked | given | told_from_those


def test_a_further_plan_is_counted_by_its_own_packs(packed: Path) -> None:
    folder = packed
    assert pack("repack", folder, "--plan-only", "twice", "--max-length", 2 * MAX_LENGTH).code == 0
    found = build_report(folder, plan="twice")
    reader = PackedReader(folder, plan="twice")
    packs = [reader[number] for number in range(len(reader))]
    assert (found["packs"], found["tokens"]) == (len(packs), sum(one.num_tokens for one in packs))
    assert found["max_length"] == 2 * MAX_LENGTH
    for name, values in (
        ("trained_tokens", [one.num_targets for one in packs]),
        ("attention_cost", [one.attention_cost for one in packs]),
        ("longest", [one.max_seqlen for one in packs]),
    ):
        assert found["per_pack"][name]["median"] == nearest(values, 0.5)


@pytest.mark.parametrize("by", ["records", "tokens", "trained"])
def test_shares_of_a_mix_stand_beside_those_that_were_asked_for(tmp_path: Path, by: str) -> None:
    """An argument may be several files; a record that is packed again counts again."""
    rows = demo_rows()
    (tmp_path / "many").mkdir()
    for name, some in (("many/a", rows[:40]), ("many/b", rows[40:80]), ("few", rows[80:90])):
        write_lines(tmp_path / f"{name}.jsonl", some)
    many, few = tmp_path / "many" / "*.jsonl", tmp_path / "few.jsonl"
    shares = ("--weight", f"{many}=3", "--weight", f"{few}=1", "--mix-by", by, "--max-repeats", 4)
    built(many, tmp_path / "packed", few, *shares)
    report = build_report(tmp_path / "packed")
    names = [source["source"] for source in report["by_source"]]
    packed = [line for line in lines_of(tmp_path / "packed") if line["length"]]
    amounts = [
        sum(
            {"records": 1, "tokens": line["length"], "trained": line["num_targets"]}[by]
            for line in packed
            if (names[line["source"]] == "few.jsonl") == is_few
        )
        for is_few in (False, True)
    ]
    assert report["mix"] == {
        "by": by,
        "target": None,
        "max_repeats": 4,
        "arguments": [
            {
                "sources": sources,
                "files": len(sources),
                "weight": weight,
                "asked": weight / 4,
                "amount": amount,
                "share": amount / sum(amounts),
            }
            for sources, weight, amount in (
                (["many/a.jsonl", "many/b.jsonl"], 3.0, amounts[0]),
                (["few.jsonl"], 1.0, amounts[1]),
            )
        ],
    }
    assert amounts[1] / sum(amounts) == pytest.approx(0.25, abs=0.03)
    # What the shares leave out, and repeat, is what a mix is for.
    assert not [words for words in report["warnings"] if "dropped" in words or "repeat" in words]
    words = pack("report", tmp_path / "packed").out
    assert f"many/a.jsonl and 1 more       3  75.0%  {amounts[0] / sum(amounts):.1%}" in words


def test_packs_of_several_lengths_are_counted_by_theirs(tmp_path: Path) -> None:
    built(write_lines(tmp_path / "d.jsonl", demo_rows()), tmp_path / "packed", "--max-length", "256,1024")
    report, packs = build_report(tmp_path / "packed"), rows_of(tmp_path / "packed")
    lengths = [bucket["max_length"] for bucket in report["buckets"] for _ in range(bucket["packs"])]
    assert lengths == sorted(lengths) and set(lengths) == {256, 1024}
    for bucket in report["buckets"]:
        mine = [one for one, length in zip(packs, lengths, strict=True) if length == bucket["max_length"]]
        tokens = sum(len(one["input_ids"]) for one in mine)
        assert bucket["tokens"] == tokens
        assert bucket["sequences"] == sum(len(one["seq_lengths"]) for one in mine)
        assert bucket["utilization"] == tokens / (len(mine) * bucket["max_length"])
    assert report["capacity"] == sum(lengths)
    assert report["utilization"] == sum(len(one["input_ids"]) for one in packs) / sum(lengths)
    shares = [len(one["input_ids"]) / length for one, length in zip(packs, lengths, strict=True)]
    bins = Counter(next(k for k in range(20) if share <= (k + 1) / 20 + 1e-12) for share in shares)
    assert report["pack_utilization"]["packs"] == [bins[k] for k in range(20)]
    assert report["pack_utilization"]["full"] == shares.count(1.0)
    # Packs of the longest length alone are fewer by their number only.
    assert not [words for words in report["warnings"] if "fewer" in words]


def test_a_table_read_in_pieces_counts_the_same(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_report(packed)
    lines = PackedReader.sequence_lines

    def in_pieces(self: PackedReader, columns: Sequence[str], *, lines_: int = 7, **_: int) -> Iterator[Any]:
        return lines(self, columns, lines=lines_)

    monkeypatch.setattr(PackedReader, "sequence_lines", in_pieces)
    assert build_report(packed) == whole


def test_lengths_for_other_plans_are_thinned_evenly(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SAMPLE", 20)
    reader = PackedReader(packed)
    found = measure(reader)
    lengths = [line["length"] for line in lines_of(packed) if line["length"]]
    assert 20 <= len(found.sample) <= 40
    assert found.sample.tolist() == lengths[:: found.thinned]
