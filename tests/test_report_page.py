"""The page stands alone, says what the report says, and nothing in the data can act in it."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from building import DEMO, built, pack
from packed import Folder, Seq, count_up, edit_manifest, write_folder

from padless.packer.charts import brief
from padless.packer.meanings import MEANINGS
from padless.packer.page import text, write_page
from padless.packer.report import build_report
from padless.packer.report_page import report_page

NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e\x1b[2J</style></title>"


class Reader(HTMLParser):
    """Tags, attributes and visible words of a page; open tags must be closed in their order.

    Words apart in the text are apart here, but for those that only a style or a break parts.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.is_inside_word = False
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.is_inside_word = tag == "wbr" or ("class", "option") in attrs
        if tag not in ("meta", "wbr"):
            self.open.append("option" if ("class", "option") in attrs else tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        opened = self.open.pop()
        self.is_inside_word = opened == "option"
        assert opened == tag or opened == "option" and tag == "span"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            return
        if self.is_inside_word and self.words:
            self.words[-1] += data
        else:
            self.words.append(data)
        self.is_inside_word = False

    @property
    def seen(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("page") / "packed"
    built(DEMO, folder)
    return build_report(folder)


def assert_alone(page: Reader) -> None:
    """Nothing is loaded, run or sent."""
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "a", "base"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "href", "style"), (name, value)
    assert any("default-src 'none'" in value for name, value in page.attributes if name == "content")


def test_the_page_needs_nothing_else(report: dict[str, Any]) -> None:
    page = report_page(report)
    assert_alone(Reader(page))
    assert "url(" not in page and "@import" not in page
    assert len(page) < 100_000


def test_every_section_has_its_numbers_and_their_meaning(report: dict[str, Any]) -> None:
    seen = Reader(report_page(report)).seen
    for title, meaning in MEANINGS.values():
        # These are told only where there are some.
        if title not in (MEANINGS["duplicates"][0], MEANINGS["mix"][0]):
            assert meaning in seen
    for number in (
        f"{report['utilization']:.1%}",
        f"{1 - report['padding']['random']['8']:.1%}",
        f"{report['padding']['random']['64']:.1%}",
        f"{report['speed_up']['linear']:.2f} times fewer places for tokens",
        f"{report['packs']:,} packs of {report['max_length']:,}",
        f"{report['per_pack']['attention_cost']['p95']:,}",
        f"{report['steps']['32']['rows_per_step']:,.1f}",
        f"{report['idle']['8']['random']:.1%}",
        f"trained {report['tokens_by_fate']['trained']:,}",
        f"{report['sequence_lengths']['p99']:,}",
        *(f"{row['packs']:,}" for row in report["alternatives"]),
        *report["warnings"],
    ):
        assert number in seen, number


def test_charts_are_told_in_words_and_names_are_unique(report: dict[str, Any]) -> None:
    page = Reader(report_page(report))
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert any(label.startswith("Share of padding by batch size. random: 1 0.0%") for label in labels)
    assert any(label.startswith("Sequences by their length") for label in labels)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    pictures = sum(1 for tag in page.tags if tag == "svg")
    assert pictures == sum(
        1 for name, value in page.attributes if (name, value) in (("role", "img"), ("aria-hidden", "true"))
    )


def test_data_are_inert_and_cut_to_size(tmp_path: Path) -> None:
    sources = [Seq([1, 2, 3], source=number) for number in range(60)]
    write_folder(tmp_path / "packed", Folder(packs=[sources], max_length=1000, dropped=3))

    def spoil(content: dict[str, Any]) -> None:
        for source in content["sources"]:
            source["path"] = NASTY + "x" * 1_000_000
        content["statistics"]["dropped_by_reason"] = {NASTY * 1000: 3}

    edit_manifest(tmp_path / "packed", spoil)
    page = report_page(build_report(tmp_path / "packed"))
    assert_alone(Reader(page))
    assert not {"\x1b", "\u202e"} & set(page)
    assert "<script" not in page and len(page.encode()) < 5_000_000


@pytest.mark.parametrize(
    "folder",
    [
        Folder(packs=[count_up(1)], max_length=1),
        Folder(packs=[count_up(9)], max_length=16),
        Folder(packs=[], dropped=4),
        Folder(packs=[[Seq([1] * 5, [False] * 5)], count_up(16)], dropped=1),
    ],
    ids=["one token", "one record", "all dropped", "untrained"],
)
def test_odd_folders_have_a_page(tmp_path: Path, folder: Folder) -> None:
    write_folder(tmp_path / "packed", folder)
    run = pack("report", tmp_path / "packed", "--html", tmp_path / "page.html")
    assert run.code == 0, run.err
    page = (tmp_path / "page.html").read_text()
    assert_alone(Reader(page))
    assert "nan" not in page.lower().replace("font-variant-numeric", "")
    for words in build_report(tmp_path / "packed")["warnings"]:
        assert words in Reader(page).seen


def test_folders_of_several_lengths_are_compared_length_by_length(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "a", "--max-length", "256,1024")
    built(DEMO, tmp_path / "b")
    of_a = {one["max_length"]: one for one in build_report(tmp_path / "a")["buckets"]}
    (of_b,) = build_report(tmp_path / "b")["buckets"]
    out = pack("report", tmp_path / "a", tmp_path / "b").out
    page = tmp_path / "page.html"
    assert pack("report", tmp_path / "a", tmp_path / "b", "--html", page).code == 0
    assert "pack length" not in out
    for shown in (out, Reader(page.read_text()).seen):
        words = " ".join(shown.split())
        assert f"packs of 256 {of_a[256]['packs']} 0 -{of_a[256]['packs']}" in words
        assert f"packs of 1,024 {of_a[1024]['packs']} {of_b['packs']}" in words
        assert f"useful share of those {of_a[1024]['utilization']:.2%} {of_b['utilization']:.2%}" in words
    assert pack("report", tmp_path / "a", "--html", page).code == 0
    seen = Reader(page.read_text()).seen
    assert "this folder's are of 256 and 1,024" in seen and '<tr class="here">' not in page.read_text()
    assert f"pack length packs sequences full 256 {of_a[256]['packs']}" in seen


def test_two_folders_are_put_side_by_side(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", Folder(packs=[count_up(8, 2)], max_length=10))
    write_folder(tmp_path / "b", Folder(packs=[count_up(8), count_up(2)], max_length=10))
    run = pack("report", tmp_path / "a", tmp_path / "b")
    assert run.code == 0
    assert re.search(r"\n *packs +1 +2 +\+1 *\n", run.out)
    assert re.search(r"\n *useful share +100\.00% +50\.00% +-50\.00% *\n", run.out)
    both = pack("report", tmp_path / "a", tmp_path / "b", "--json").json
    assert [report["packs"] for report in both["reports"]] == [1, 2]
    assert pack("report", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "page.html").code == 0
    page = Reader((tmp_path / "page.html").read_text())
    assert_alone(page)
    assert "packs 1 2 +1" in page.seen
    third = pack("report", tmp_path / "a", tmp_path / "b", tmp_path / "a")
    assert third.code == 2 and "compares two folders, 3 were given" in third.err


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(3)]))
    run = pack("report", tmp_path / "packed", "--html", tmp_path / "nowhere" / "page.html")
    assert run.code == 2 and "nowhere" in run.err
    for folder in ("", "."):
        run = pack("report", tmp_path / "packed", "--html", folder)
        assert run.code == 2 and "is a folder; give the name of a file" in run.err
    (tmp_path / "page.html").mkdir()
    assert pack("report", tmp_path / "packed", "--html", tmp_path / "page.html").code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "page.html"]


def test_a_page_goes_through_links_and_into_pipes(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to("page.html")
    for words in ("new", "again"):
        write_page(tmp_path / "link.html", words)
        assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").read_text() == words
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_page(tmp_path / "pipe", "words")
    assert os.read(reader, 100) == b"words" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html", "pipe"]


def test_long_texts_keep_both_ends(tmp_path: Path) -> None:
    shown = text("begin" + "x" * 10_000 + "end")
    assert len(shown) < 310 and shown.startswith("begin") and shown.endswith("end")
    assert text("<a & 'b'>") == "&lt;a &amp; &#x27;b&#x27;&gt;"
    write_page(tmp_path / "page.html", "\ud800")
    assert (tmp_path / "page.html").read_text() == "\\ud800"


def test_numbers_are_brief() -> None:
    assert [brief(n) for n in (0, 7, 999, 1000, 34_567, 1.2e6, 5e9)] == [
        *("0", "7", "999", "1 k", "34.6 k", "1.2 M", "5 G")
    ]
