"""Every number that the page shows is the report's, in its place; those are held to the shards elsewhere.

`test_report_numbers` computes the report anew; here the page is read as a reader sees it (tables cell by
cell, facts, headline, legends, charts in words) and formatted anew from the report.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_report_numbers import MODEL, build_mixed, build_split
from test_report_page import Reader

from padless.packer.meanings import NOTABLE
from padless.packer.report import build_report
from padless.packer.report_page import report_page


class Tables(Reader):
    """The cells of each table by its name, and terms with their values."""

    def __init__(self, page: str) -> None:
        self.tables: dict[str, list[list[str]]] = {}
        self.facts: list[str] = []
        super().__init__(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        label = dict(attrs).get("aria-label") or ""
        if label.startswith("Table: "):
            self.rows = self.tables.setdefault(label.removeprefix("Table: "), [])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag in ("dt", "dd", "small"):
            self.facts.append("")

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
        if {"dt", "dd"} & set(self.open):
            self.facts[-1] += data


@pytest.fixture(scope="module", params=[build_mixed, build_split])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_report(request.param(tmp_path_factory.mktemp("page")), model=MODEL)


@pytest.fixture(scope="module")
def page(report: dict[str, Any]) -> Tables:
    return Tables(report_page(report))


def percent(share: float, places: int = 1) -> str:
    return f"{100 * share:.{places}f}%"


def whole(*numbers: int) -> list[str]:
    return [f"{number:,}" for number in numbers]


def test_tables_of_batches_and_packs(report: dict[str, Any], page: Tables) -> None:
    padding, packed = report["padding"], percent(1 - report["utilization"])
    assert page.tables["Padding by batch size"][1:] == [
        [size, percent(share), percent(padding["grouped"][size]), packed]
        for size, share in padding["random"].items()
    ]
    before, after = report["record_lengths"], report["sequence_lengths"]
    names = ("min", "p5", "median", "mean", "p95", "p99", "max")
    assert [row[1:] for row in page.tables["Lengths in tokens"][1:]] == [
        whole(round(before[name]), round(after[name])) for name in names
    ]
    assert [row[1:] for row in page.tables["What a pack holds"][1:]] == [
        whole(*report["per_pack"][name].values())
        for name in ("sequences", "tokens", "trained_tokens", "longest", "attention_cost")
    ]
    assert page.tables["Steps of an epoch"][1:] == [
        [size, *whole(row["unpacked_steps"], row["packs_per_step"])]
        + [f"{row['rows_per_step']:,.1f}", *whole(row["packed_steps"])]
        for size, row in report["steps"].items()
    ]
    assert [row[:2] for row in page.tables["Waiting by ranks"][1:]] == [
        [f"{ranks}, {order}", percent(share)]
        for ranks, shares in report["idle"].items()
        for order, share in shares.items()
    ]
    assert page.tables["Other plans"][1:] == [
        [f"{row['max_length']:,}", row["strategy"], *whole(row["packs"], row["bound_packs"])]
        + [percent(row["utilization"], 2), "", f"{row['sequences_per_pack']:,.1f}", f"{row['too_long']:,}"]
        for row in report["alternatives"]
    ]


def test_tables_of_records(report: dict[str, Any], page: Tables) -> None:
    sources = sorted(report["by_source"], key=lambda one: -one["tokens"])
    assert page.tables["Tokens by source"][1:] == [
        [one["source"], *whole(one["records"], one["dropped"], one["tokens"]), percent(one["share"]), ""]
        for one in sources
    ]
    reasons = [
        [one["source"], reason]
        + whole(one["dropped_by_reason"].get(reason, 0), one["cut_by_reason"].get(reason, 0))
        + [", ".join(map(str, rows))]
        for one in sources
        for reason, rows in one["examples"].items()
    ]
    assert page.tables.get("Reasons", [[]])[1:] == reasons
    assert page.tables["Longest and oddest"][1:] == [
        [word.split(" (")[0], *whole(line["length"] + line["cut"], line["num_targets"], line["cut"])]
        + [line["source"], f"{line['row']:,}", "none" if line["pack"] < 0 else f"{line['pack']:,}"]
        for key, word in NOTABLE.items()
        for line in report["notable"][key][:3]
    ]
    copies = [
        whole(group["copies"], group["length"])
        + ["; ".join(f"{report['by_source'][n]['source']} row {row}" for n, row in group["rows"])]
        for group in report["duplicates"]["groups"]
    ]
    assert page.tables.get("Duplicates", [[]])[1:] == copies


def test_facts_headline_and_legends(report: dict[str, Any], page: Tables) -> None:
    fates, gain = report["tokens_by_fate"], report["speed_up"]
    dropped = f"{report['records']['dropped']:,} of them dropped"
    facts = dict(zip(page.facts[::3], zip(page.facts[1::3], page.facts[2::3], strict=True), strict=True))
    assert facts["Packs"] == (f"{report['packs']:,}", f"no plan has fewer than {report['bound_packs']:,}")
    assert facts["Trained"][0] == percent(fates["trained"] / report["tokens"])
    assert facts["Trained"][1].startswith(f"{fates['trained']:,} tokens")
    assert facts["Tokens"][1] == f"{report['tokens']:,} in all packs" and facts["Records"][1] == dropped
    for name, number in (
        ("Tokens", report["tokens"]),
        ("Records", report["records"]["in"]),
        ("Cut", fates["cut"]),
        ("Duplicates", report["duplicates"]["sequences"]),
    ):
        digits, _, unit = facts[name][0].partition(" ")
        scale = {"": 1, "k": 10**3, "M": 10**6}[unit]
        assert float(digits) * scale == pytest.approx(number, rel=0.005)
    full, loose = report["pack_utilization"]["full"], sum(report["pack_utilization"]["packs"][:-1])
    be = {True: "is", False: "are"}
    for words in (
        f"{report['sequences']:,} sequences in {report['packs']:,} packs of {report['max_length']:,} tokens",
        f"{percent(report['utilization'])} of a batch is tokens, where it was "
        + percent(1 - report["padding"]["random"]["8"]),
        f"{gain['linear']:.2f} times fewer places for tokens and {gain['quadratic']:.2f} times fewer pairs",
        f"{gain['total']:.2f} times fewer FLOPs",
        f"{percent(gain['attention_share'])} is attention",
        f"{full:,} of {report['packs']:,} packs {be[full == 1]} full to the last token, "
        f"{loose:,} {be[loose == 1]} 95 % full or less",
        *(f"{fate} {fates[fate]:,}" for fate in ("trained", "masked", "cut")),
        f"median {report['sequence_lengths']['median']:,}",
        *report["warnings"],
    ):
        # Tags part words from each other, which a reader does not see.
        assert words.replace(" ", "") in page.seen.replace(" ", ""), words


def test_charts_say_their_numbers_in_words(report: dict[str, Any], page: Tables) -> None:
    labels = [value for name, value in page.attributes if name == "aria-label"]
    (utilization,) = [label for label in labels if label.startswith("Packs by how full they are. ")]
    counts = [int(number.replace(",", "")) for number in re.findall(r": ([\d,]+\d|\d)", utilization)]
    assert counts == [count for count in report["pack_utilization"]["packs"] if count]
    (lengths,) = [label for label in labels if label.startswith("Sequences by their length in tokens. ")]
    counts = [int(number.replace(",", "")) for number in re.findall(r": ([\d,]*\d)", lengths)]
    assert counts == [count for count in report["sequence_lengths"]["histogram"]["sequences"] if count]
    (padding,) = [label for label in labels if label.startswith("Share of padding by batch size. ")]
    for name in ("random", "grouped"):
        told = ", ".join(f"{size} {percent(share)}" for size, share in report["padding"][name].items())
        assert f"{name}: {told}" in padding
    for source in report["by_source"]:
        told = f"{source['trained_tokens']:,} trained, {source['masked_tokens']:,} masked, "
        assert told + f"{source['cut_tokens']:,} cut" in labels
