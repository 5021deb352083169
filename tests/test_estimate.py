"""An estimate is what a build of all records would give, up to the error that it names."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from building import DEMO, MAX_LENGTH, TOKENIZER, build_arguments, built, demo_rows, pack, write_lines
from test_report_page import Reader, assert_alone

from padless.packer import estimate, sample
from padless.packer.report import build_report


@pytest.fixture(autouse=True)
def few_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of a thousand sequences are as good here as those of ten thousand."""
    monkeypatch.setattr(estimate, "_FOR_PLANS", 1000)


OPTIONS = ("--tokenizer", TOKENIZER, "--max-length", MAX_LENGTH)


def test_all_records_give_what_the_build_gives(tmp_path: Path) -> None:
    found = pack("estimate", DEMO, *OPTIONS, "--json").json
    built(DEMO, tmp_path / "packed")
    report = build_report(tmp_path / "packed")
    assert not found["is_sample"]
    assert (found["sequences"], found["tokens"]) == (report["sequences"], report["tokens"])
    assert found["sequence_lengths"] == report["sequence_lengths"]
    assert found["trained_share"] == report["tokens_by_fate"]["trained"] / report["tokens"]
    for size, share in report["padding"]["random"].items():
        assert found["padding"][size] == {"value": share, "error": 0.0}
    tried = {(row["strategy"], row["max_length"]): row for row in found["plans"]}
    assert set(tried) == {(row["strategy"], row["max_length"]) for row in report["alternatives"]}
    for row in report["alternatives"]:
        plan = tried[row["strategy"], row["max_length"]]
        assert plan["too_long"] == pytest.approx(row["too_long"] / report["sequences"])
        assert (plan["utilization"], plan["utilization_error"]) == (row["utilization"], 0)
        assert plan["packs"] == row["packs"]
    assert found["of_tokens"] == {"value": report["tokens"], "error": 0.0}
    assert tried["none", MAX_LENGTH]["packs"] == report["sequences"]


def test_what_is_wrong_with_a_source_is_told_by_its_own_name(tmp_path: Path) -> None:
    """The build behind an estimate reads files of its own, which are gone when one reads of them."""
    odd = write_lines(tmp_path / "odd.jsonl", [{"foo": 1}])
    for sources in ([odd], [DEMO, odd]):
        run = pack("estimate", *sources, *OPTIONS)
        assert run.code == 2
        assert run.err.startswith(f"error: the sample of {odd}: cannot tell its format from its columns")


def test_no_sample_is_so_small_that_it_looks_sure() -> None:
    found = pack("estimate", DEMO, *OPTIONS, "--limit", 1, "--json").json
    assert found["records"] == 2
    assert found["tokens_per_sequence"]["error"] > 0


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": [{"role": "user", "content": "a b"}]}, ["--template-arg", "more=9"]),
        ({"text": "a b"}, ["--bos", "<|im_start|>"]),
        ({"text": "a b"}, ["--eos", "none"]),
        ({"text": "a b <|im_end|>"}, ["--allow-special"]),
    ],
)
def test_options_that_change_the_tokens_are_those_of_a_build(
    tmp_path: Path, row: dict[str, object], options: list[str]
) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}{{ more | default('') }}")
    source = write_lines(tmp_path / "t.jsonl", [row] * 3)
    plain = (*OPTIONS, "--template", tmp_path / "t.jinja", "--train-on", "all")
    found = pack("estimate", source, *plain, *options, "--json").json["tokens"]
    assert found == built(source, tmp_path / "packed", *plain, *options)["tokens"]
    assert found != pack("estimate", source, *plain, "--json").json["tokens"]


def test_a_sample_says_how_sure_it_is() -> None:
    whole = pack("estimate", DEMO, *OPTIONS, "--json").json
    some = pack("estimate", DEMO, *OPTIONS, "--limit", 150, "--json").json
    assert some["is_sample"] and some["records"] == 150
    for size in ("2", "8", "32"):
        error = some["padding"][size]["error"]
        assert 0.001 < error < 0.2
        assert abs(some["padding"][size]["value"] - whole["padding"][size]["value"]) < 2 * error
    for name in ("tokens_per_sequence", "of_tokens"):
        found, error = some[name]["value"], some[name]["error"]
        assert 0 < abs(found - whole[name]["value"]) < 2 * error
    (source,) = some["sources"]
    assert (source["how"], source["of_records"]) == ("random", whole["records"])
    for row, true in zip(some["plans"], whole["plans"], strict=True):
        assert abs(row["packs"] - true["packs"]) <= 2 * row["packs_error"] + 1


def test_a_file_sorted_by_length_is_not_judged_by_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first records are the shortest; the file is sought through in blocks, as a large one."""
    texts = [{"text": f"{number} " * (1 + number // 20)} for number in range(2000)]
    source = write_lines(tmp_path / "sorted.jsonl", texts)
    whole = pack("estimate", source, *OPTIONS, "--json").json
    monkeypatch.setattr(sample, "SEEK_FROM", 1)
    monkeypatch.setattr(sample, "BLOCK_BYTES", (2**11, 2**14))
    monkeypatch.setattr(sample, "BLOCKS", 60)
    some = pack("estimate", source, *OPTIONS, "--limit", 200, "--json").json
    mean, true = some["tokens_per_sequence"], whole["tokens_per_sequence"]["value"]
    assert abs(mean["value"] - true) < 2 * mean["error"] < true
    assert abs(some["of_tokens"]["value"] - whole["of_tokens"]["value"]) < 2 * some["of_tokens"]["error"]


def test_sources_count_by_what_they_hold(tmp_path: Path) -> None:
    """Of a source ten times as large as many records are drawn as of the other, and each stands for more."""
    short = write_lines(tmp_path / "short.jsonl", [{"text": f"{n}"} for n in range(1000)])
    long = write_lines(tmp_path / "long.jsonl", [{"text": f"word {n} " * 30} for n in range(100)])
    whole = pack("estimate", short, long, *OPTIONS, "--json").json
    some = pack("estimate", short, long, *OPTIONS, "--limit", 100, "--json").json
    assert [source["records"] for source in some["sources"]] == [100, 100]
    assert [source["of_records"] for source in some["sources"]] == [1000, 100]
    for name in ("of_tokens", "tokens_per_sequence"):
        assert some[name]["value"] == pytest.approx(whole[name]["value"], rel=0.02)
    assert some["trained_share"] == pytest.approx(whole["trained_share"], abs=0.01)


def test_the_same_command_says_the_same() -> None:
    first, second = (pack("estimate", DEMO, *OPTIONS, "--limit", 50, "--json").json for _ in range(2))
    assert first == second


def test_each_source_has_its_sample_and_faults_are_counted(tmp_path: Path) -> None:
    rows = demo_rows()
    a = write_lines(tmp_path / "a.jsonl", rows[:60])
    b = write_lines(tmp_path / "b.jsonl", [*rows[60:79], {"instruction": 5}, rows[79]])
    found = pack("estimate", a, b, *OPTIONS, "--limit", 40, "--json").json
    counted = [(source["records"], source["dropped"], source["is_sample"]) for source in found["sources"]]
    assert counted == [(40, 0, True), (21, 1, False)]
    assert found["sequences"] == 60


def test_records_over_the_length_are_counted_at_each_length(tmp_path: Path) -> None:
    long = {**demo_rows()[0], "output": "word " * 3000}
    source = write_lines(tmp_path / "long.jsonl", [long, *demo_rows()[:3]])
    found = pack("estimate", source, *OPTIONS, "--json").json
    shares = {row["max_length"]: row["too_long"] for row in found["plans"]}
    assert shares[MAX_LENGTH] == 0.25 and shares[4 * MAX_LENGTH] == 0


def test_it_fits_a_terminal_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = pack("estimate", DEMO, *OPTIONS, "--limit", 100)
    assert run.code == 0, run.err
    assert max(map(len, run.out.splitlines())) <= 80
    said = " ".join(run.out.split())  # lines are folded where the path of the source has them at their ends
    assert "of a batch of 8 would be padding" in said and "drawn at random" in said and "±" in said
    assert list(tmp_path.iterdir()) == []


def test_its_page_says_the_same_and_stands_alone(tmp_path: Path) -> None:
    words = ("estimate", DEMO, *OPTIONS, "--limit", 100, "--json", "--html", tmp_path / "page.html")
    found = pack(*words).json
    page = Reader((tmp_path / "page.html").read_text())
    assert_alone(page)
    for share in found["padding"].values():
        error = f" ± {share['error']:.1%}" if share["error"] else ""
        assert f"{share['value']:.1%}{error}" in page.seen
    for row in found["plans"]:
        full = f"{row['max_length']:,} {row['strategy']} {row['utilization']:.1%}"
        assert full in page.seen
    assert f"mean {found['tokens_per_sequence']['value']:,.0f} ± " in page.seen
    assert f"100 of about {found['sources'][0]['of_records']:,} records, drawn at random" in page.seen


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--limit", 0), "--limit must be at least 1 record"),
        (("--split", "train,test"), "an estimate is of one split"),
        (("--align", 2 * MAX_LENGTH), "--align"),
    ],
)
def test_wrong_use_is_told(more: tuple[object, ...], words: str) -> None:
    run = pack("estimate", DEMO, *OPTIONS, *more)
    assert run.code == 2 and words in run.err, run.err


def test_a_source_that_is_not_there_is_told_as_by_build(tmp_path: Path) -> None:
    run = pack("estimate", tmp_path / "nowhere.jsonl", *OPTIONS)
    assert run.code == 2
    assert run.err == pack(*build_arguments(tmp_path / "nowhere.jsonl", tmp_path / "out")).err
