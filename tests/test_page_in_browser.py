"""Pages in headless Chromium: nothing on the console, nothing asked for, no overflow, axe-core's rules (AA).

At desktop and phone width, light and dark. Runs where `scripts/check-page` has installed what it needs, and
is skipped elsewhere, unless PADLESS_REQUIRE_BROWSER is set, as CI sets it once that is done. Pictures of
pages: `scripts/check-page report.html`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from building import TOKENIZER, built, demo_rows, pack, write_lines
from conftest import ROOT
from packed import Folder, Seq, count_up, edit_manifest, write_folder
from test_report_page import NASTY

NEEDED = (
    any(Path("/usr/bin", name).exists() for name in ("chromium", "chromium-headless-shell")),
    (ROOT / "build" / "pages" / "installed").is_file(),
)

Make = Callable[[Path, Path], Path]


def page_of(page: Path, *arguments: object) -> Path:
    run = pack(*arguments, "--html", page)
    assert run.code == 0, run.err
    return page


def mixed(work: Path, shared: Path) -> Path:
    """Sources of several formats, records cut and dropped, a model."""
    data = shared / "data"
    sources = (
        data / "alpaca" / "alpaca_cleaned_first5000.json",
        data / "chat" / "glaive_toolcall_en_demo.json",
        data / "multilingual" / "xquad_hi_messages.jsonl",
        data / "pretrain" / "c4_demo.jsonl",
    )
    how = ("--overflow", "truncate", "--on-bad-record", "drop", "--max-length", 512)
    built(sources[0], work / "mixed", *sources[1:], *how, "--max-drop-share", 1, "--limit", 7000)
    model = work / "config.json"
    model.write_text(
        '{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, '
        '"num_attention_heads": 4}'
    )
    return page_of(work / "mixed.html", "report", work / "mixed", "--model", model)


def alpaca(work: Path, shared: Path) -> Path:
    source = shared / "data" / "alpaca" / "alpaca_data.json"
    built(source, work / "alpaca", "--overflow", "drop")
    return page_of(work / "alpaca.html", "report", work / "alpaca")


def one_record(work: Path, _: Path) -> Path:
    built(write_lines(work / "one.jsonl", demo_rows()[:1]), work / "one")
    return page_of(work / "one.html", "report", work / "one")


def all_dropped(work: Path, _: Path) -> Path:
    write_folder(work / "none", Folder(packs=[], dropped=4))
    return page_of(work / "none.html", "report", work / "none")


def markup(work: Path, _: Path) -> Path:
    """Names that are markup and endless."""
    write_folder(work / "markup", Folder(packs=[[Seq([1, 2], source=n) for n in range(42)]], max_length=200))

    def spoil(content: dict[str, list[dict[str, str]]]) -> None:
        for source in content["sources"]:
            source["path"] = NASTY + "x" * 100_000

    edit_manifest(work / "markup", spoil)
    return page_of(work / "markup.html", "report", work / "markup")


def two_folders(work: Path, _: Path) -> Path:
    write_folder(work / "a", Folder(packs=[count_up(8, 2)], max_length=10))
    write_folder(work / "b", Folder(packs=[count_up(8), count_up(2)], max_length=10))
    return page_of(work / "both.html", "report", work / "a", work / "b")


def packs(work: Path, _: Path) -> Path:
    rows = [*demo_rows()[:200], {"instruction": NASTY, "output": "<b>&" * 20}]
    built(write_lines(work / "p.jsonl", rows), work / "packs", "--overflow", "drop", "--seed", 1)
    return page_of(work / "packs.html", "inspect", work / "packs", "--text", "alert(1)")


def an_estimate(work: Path, shared: Path) -> Path:
    source = shared / "data" / "alpaca" / "alpaca_data.json"
    return page_of(work / "estimate.html", "estimate", source, "--tokenizer", TOKENIZER)


PAGES: list[Make] = [an_estimate, alpaca, mixed, one_record, all_dropped, markup, two_folders, packs]


@pytest.fixture
def browser() -> None:
    """Skips where pages cannot be opened, and fails where they must be."""
    if all(NEEDED):
        return
    reason = "no Chromium, or nothing to drive it: run scripts/check-page once, which installs both"
    if os.environ.get("PADLESS_REQUIRE_BROWSER", "") not in ("", "0"):
        pytest.fail(f"{reason}; they are required here", pytrace=False)
    pytest.skip(reason)


@pytest.mark.shared
@pytest.mark.usefixtures("browser")
def test_pages_are_sound_at_both_widths_and_in_both_colours(tmp_path: Path, shared: Path) -> None:
    pages = [make(tmp_path, shared) for make in PAGES]
    assert max(page.stat().st_size for page in pages) < 5_000_000
    run = subprocess.run(
        [ROOT / "scripts" / "check-page", "--quick", *pages],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ok  ") == 4 * len(PAGES)
