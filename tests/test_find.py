"""inspect finds packs by what is in them, walks through them, and writes them as a page."""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from building import built, demo_rows, pack, sequence_table, write_lines
from packed import Folder, count_up, write_folder
from test_report_page import NASTY, Reader, assert_alone

from padless.packer.find import find_pack
from padless.packer.inspect import describe_pack


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, a record too long among them."""
    folder = tmp_path_factory.mktemp("find")
    rows = demo_rows()
    long = {**rows[0], "output": "word " * 3000}
    first = write_lines(folder / "a.jsonl", rows[:100])
    second = write_lines(folder / "b.jsonl", [rows[100], long, *rows[101:180]])
    built(first, folder / "packed", second, "--overflow", "drop")
    return folder / "packed"


def test_every_sequence_and_row_is_found(packed: Path) -> None:
    table = sequence_table(packed)
    for number in (0, 57, 99, 100, 150):
        wanted = table["pack"][number]
        assert find_pack(packed, sequence=number) == wanted
        source = "ab"[table["source"][number]]
        assert find_pack(packed, row=table["row"][number], source=f"{source}.jsonl") == wanted


def test_words_are_found_in_the_first_pack_that_has_them(packed: Path) -> None:
    packs = [describe_pack(packed, number) for number in range(describe_pack(packed, 0)["packs"])]
    texts = [[sequence["text"] for sequence in one["sequences"]] for one in packs]
    words = texts[3][1][5:60]
    having = [number for number, some in enumerate(texts) if any(words in text for text in some)]
    assert find_pack(packed, text=words) == having[0]
    assert pack("inspect", packed, "--text", words, "--json").json["pack"] == having[0]
    later = find_pack(packed, text="<|im_end|>", first=2)
    assert later == 2


def test_words_are_looked_for_from_a_pack_on_that_may_count_from_the_end(packed: Path) -> None:
    last = pack("inspect", packed, "--pack", -1, "--json").json
    words = last["sequences"][0]["text"][:20]
    assert pack("inspect", packed, "--text", words, "--pack", -1, "--json").json == last


def test_a_plan_is_searched_by_its_own_packs(packed: Path) -> None:
    assert pack("repack", packed, "--plan-only", "twice", "--max-length", 2048).code == 0
    found = find_pack(packed, sequence=57, plan="twice")
    shown = describe_pack(packed, found, plan="twice")
    assert 57 in [sequence["sequence_id"] for sequence in shown["sequences"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--browse", "--json"), "leave --html and --json out"),
        (("--source", "a.jsonl"), "give --row too"),
        (("--sequence", 10**6), "there is no sequence 1000000"),
        (("--sequence", -1), "there is no sequence -1"),
        (("--row", 3), "there are 2 sources with a row 3: give --source"),
        (("--row", 3, "--source", "c.jsonl"), "no sources end in 'c.jsonl'"),
        (("--row", 1, "--source", "b.jsonl"), "is in no pack: its record was dropped (too-long)"),
        (("--row", 999, "--source", "b.jsonl"), "has no row 999"),
        (("--text", "words that nobody wrote"), "is in no pack"),
        (("--text", ""), "--text is empty"),
        (("--text", "x", "--row", 1), "give one of --sequence, --row and --text"),
        (("--text", "x", "--pack", -(10**6)), "there is no pack -1000000"),
        (("--text", "x", "--pack", 1, "--pack", 2), "several were given"),
        (("--sequence", 1, "--pack", 2), "leave --pack out"),
    ],
)
def test_what_is_not_there_is_told(packed: Path, options: tuple[object, ...], words: str) -> None:
    run = pack("inspect", packed, *options)
    assert run.code == 2, run.out
    assert words in " ".join(run.err.split()), run.err


def test_words_of_a_pipe_lead_through_the_packs(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\np\np\n3\n9999\nwhat\n/nobody wrote\nq\n"))
    run = pack("inspect", packed, "--browse")
    assert run.code == 0, run.err
    assert re.findall(r"pack (\d+) of \d+: ", run.out) == ["0", "1", "0", "3"]
    assert run.out.count("there are packs 0 to") == 2
    assert "'nobody wrote' is in no pack from 4 on" in run.out
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert pack("inspect", packed, "--browse").code == 0  # the input ends


def test_keys_act_at_once_in_a_terminal_and_leave_it_as_it_was(packed: Path) -> None:
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = "import sys; from padless.packer.cli import main; sys.argv[0] = 'pack-dataset'; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", command, "inspect", str(packed), "--browse"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    )
    shown = b""

    def until(wanted: bytes) -> None:
        nonlocal shown
        while wanted not in shown:
            assert select.select([ours], [], [], 120)[0], shown
            shown += os.read(ours, 2**16)
        shown = shown[shown.index(wanted) + len(wanted) :]

    try:
        for keys, wanted in (
            (b"", b"pack 0 of"),
            (b"n", b"pack 1 of"),
            (b"p", b"pack 0 of"),
            (b"p", b"there are packs 0 to"),
            (b"\x1b[C", b"pack 1 of"),
            (b"3\n", b"pack 3 of"),
            (b"0\n", b"pack 0 of"),
            (b"/nobody wrote\n", b"is in no pack from 1 on"),
            (b"/<|im_end|>\n", b"pack 1 of"),
            ("é".encode(), b"n next, p previous"),
        ):
            os.write(ours, keys)
            until(wanted)
        os.write(ours, b"q")
        assert child.wait(120) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        child.kill()
        child.wait()
        os.close(ours)
        os.close(theirs)


def test_several_packs_are_a_list_and_a_page(packed: Path, tmp_path: Path) -> None:
    both = pack("inspect", packed, "--pack", 2, "--pack", 0, "--pack", 2, "--json").json
    assert [one["pack"] for one in both["packs"]] == [2, 0]
    run = pack("inspect", packed, "--pack", 2, "--pack", 0, "--html", tmp_path / "packs.html")
    assert run.code == 0, run.err
    content = (tmp_path / "packs.html").read_text()
    page = Reader(content)
    assert_alone(page)
    for sequence in both["packs"][0]["sequences"]:
        assert f"{sequence['source']} row {sequence['row']:,}" in page.seen
        assert f"tokens {sequence['offset']:,} to" in page.seen
    trained = both["packs"][0]["sequences"][0]["segments"][1]
    assert trained["trained"]
    assert " ".join(trained["text"].split())[:40] in page.seen


def test_a_page_of_markup_is_inert_and_of_endless_text_is_small(tmp_path: Path) -> None:
    rows = [{"text": NASTY}, {"text": "<b>&" * 250_000}, {"text": "\u202e" * 50_000}]
    source = write_lines(tmp_path / "nasty.jsonl", rows)
    built(source, tmp_path / "packed", "--max-length", 2_000_000)
    run = pack("inspect", tmp_path / "packed", "--html", tmp_path / "page.html")
    assert run.code == 0, run.err
    content = (tmp_path / "page.html").read_text()
    assert len(content.encode()) < 5_000_000
    assert_alone(Reader(content))
    assert "<script" not in content and "\u202e" not in content and "\x1b" not in content


def test_packs_without_text_are_found_by_number_only(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(3), count_up(2)], tokenizer={}))
    assert find_pack(tmp_path / "packed", sequence=1) == 1
    run = pack("inspect", tmp_path / "packed", "--text", "x")
    assert run.code == 2 and "has no tokenizer" in run.err
