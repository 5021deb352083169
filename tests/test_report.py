"""The report's shares are what batching really costs, and its names are those of the design."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from building import build_arguments, pack, write_lines
from packed import Folder, Seq, count_up, edit_manifest, write_folder, write_splits
from rich.console import Console

from padless.packer.lengths import Lengths
from padless.packer.report import build_report, padding_of
from padless.packer.report_view import print_report
from padless.runtime.format import SplitError

NAMES = (
    *("packs", "sequences", "tokens", "capacity", "utilization", "bound_packs", "padding"),
    *("records", "tokens_by_fate", "by_source", "warnings"),
)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    masked = Seq([9] * 6, [False] * 3 + [True] * 3, source=1)
    folder = Folder(packs=[count_up(8, 2), [masked], count_up(3, 3, 3)], max_length=10)
    write_folder(tmp_path / "packed", folder)
    return tmp_path / "packed"


def shown(report: dict[str, object], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_report_has_the_designs_names_and_is_json(packed: Path) -> None:
    report = build_report(packed)
    assert set(NAMES) <= set(report)
    assert json.loads(json.dumps(report)) == report
    assert list(report["padding"]["random"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert list(report["padding"]) == ["random", "grouped"]
    assert set(report["records"]) == {"in", "whole", "truncated", "split", "dropped"}


def test_the_report_counts_what_is_packed(packed: Path) -> None:
    report = build_report(packed, batch_sizes=(1, 6))
    counts = {name: report[name] for name in ("packs", "sequences", "tokens", "capacity")}
    assert counts == {"packs": 3, "sequences": 6, "tokens": 25, "capacity": 30}
    assert report["utilization"] == 25 / 30
    assert report["padding"]["random"] == {"1": 0.0, "6": pytest.approx(1 - 25 / 48)}
    assert report["tokens_by_fate"] == {"trained": 17, "masked": 8, "cut": 0}
    assert report["sequences_per_pack"] == {"min": 1, "p10": 1, "median": 2, "p90": 3, "max": 3}
    assert report["max_seqlen"]["max"] == 8 and report["max_seqlen"]["min"] == 3
    assert [source["tokens"] for source in report["by_source"]] == [19, 6]
    assert [source["records"] for source in report["by_source"]] == [5, 1]


@pytest.mark.shared
def test_alpaca_pads_as_was_measured(shared: Path) -> None:
    table = pq.read_table(shared / "data" / "alpaca" / "token_lengths.parquet")
    for name, column, wanted in (
        ("alpaca_data.json", "qwen3_chatml_total", {"1": 0.0, "2": 0.251, "8": 0.524, "32": 0.670}),
        # What was claimed of alpaca-cleaned: near half padding at 8, by format 52 to 56 %.
        ("alpaca_cleaned_first5000.json", "qwen3_alpaca_total", {"8": 0.52}),
        ("alpaca_cleaned_first5000.json", "qwen3_chatml_total", {"8": 0.56}),
    ):
        rows = np.array([file.endswith(name) for file in table["file"].to_pylist()])
        lengths = Lengths.of(table[column].to_numpy()[rows])
        shares = padding_of(lengths, [int(size) for size in wanted])["random"]
        near = 0.001 if name == "alpaca_data.json" else 0.02
        assert shares == {size: pytest.approx(share, abs=near) for size, share in wanted.items()}


@pytest.mark.shared
@pytest.mark.parametrize(("template", "padding"), [("alpaca", 0.52), ("chatml", 0.56)])
def test_packing_ends_what_alpaca_pads(shared: Path, tmp_path: Path, template: str, padding: float) -> None:
    """Near half of a batch of 8 is padding before; packs are full whatever a batch has of them."""
    source = shared / "data" / "alpaca" / "alpaca_cleaned_first5000.json"
    words = ("--tokenizer", shared / "tokenizers" / "qwen3", "--template", template, "--max-length", 2048)
    run = pack("build", source, *words, "--output", tmp_path / "packed")
    assert run.code == 0, run.err
    report = build_report(tmp_path / "packed")
    assert report["padding"]["random"]["8"] == pytest.approx(padding, abs=0.02)
    assert report["padding"]["random"]["64"] > 0.65
    assert report["utilization"] > 0.99
    text = shown(report)
    assert f"{report['utilization']:.1%} of a batch is tokens now" in text
    assert f"{1 - report['padding']['random']['8']:.1%} in batches of 8" in text


def test_a_folder_of_splits_asks_for_one(tmp_path: Path) -> None:
    write_splits(tmp_path / "packed", {"train": Folder(packs=[count_up(3)])})
    with pytest.raises(SplitError, match="train"):
        build_report(tmp_path / "packed")
    assert build_report(tmp_path / "packed", split="train")["packs"] == 1


def test_the_gain_comes_first_and_eighty_columns_are_enough(packed: Path) -> None:
    text = shown(build_report(packed))
    assert text.startswith("83.3% of a batch is tokens now, 16.7% is padding")
    assert "52.1% in batches of 8 padded to their longest: now 1.60 times as much" in text
    assert max(map(len, text.splitlines())) <= 80
    # A table that did not fit would have lost letters.
    assert "…" not in text


def test_a_narrow_terminal_loses_no_digits(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = pack("report", packed).out
    monkeypatch.setenv("COLUMNS", "40")
    assert pack("report", packed).out == wide and "…" not in wide


def test_output_that_nobody_reads_is_no_failed_check(packed: Path) -> None:
    edit_manifest(packed, lambda content: content["statistics"].update(trained_tokens=1))  # which verify sees
    for command, code in (("report", 0), ("verify", 1)):
        read, write = os.pipe()
        os.close(read)  # as `| head` does, only sooner
        words = [sys.executable, "-m", "padless.packer.cli", command, str(packed)]
        run = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=300, check=False)
        os.close(write)
        assert (run.returncode, run.stderr) == (code, b"")


def test_names_of_sources_are_no_markup(packed: Path) -> None:
    edit_manifest(packed, lambda content: content["sources"][1].update(path="[red]x[/].jsonl"))
    text = shown(build_report(packed))
    line = next(line for line in text.splitlines() if line.startswith("[red]x[/].jsonl  "))
    assert line.split()[1:] == ["1", "0", "6", "24.0%", "50.0%", "0"]


def test_what_was_lost_is_warned_of(tmp_path: Path) -> None:
    folder = Folder(packs=[[Seq([1, 1, 1], [False] * 3)]], dropped=1, max_length=4)
    write_folder(tmp_path / "packed", folder)
    report = build_report(tmp_path / "packed")
    text = shown(report, width=200)
    for words in (
        "1 of 2 records (50.00%) dropped",
        "5 tokens (62.50%) cut",
        "no token is trained",
    ):
        assert any(words in warning for warning in report["warnings"])
        assert words in text
    assert report["dropped_by_reason"] == {"too long": 1}


def test_loose_packs_are_warned_of_unless_they_were_asked_for(packed: Path) -> None:
    assert any("83.3% full" in warning for warning in build_report(packed)["warnings"])
    edit_manifest(packed, lambda content: content["options"].update(strategy="none"))
    assert build_report(packed)["warnings"] == []


def test_advice_names_what_would_fill_the_packs(tmp_path: Path) -> None:
    """One short sequence in a long pack asks for a shorter pack, and there is nothing to balance."""
    write_folder(tmp_path / "one", Folder(packs=[count_up(3)], max_length=16))
    (advice,) = build_report(tmp_path / "one")["warnings"]
    assert advice.startswith("the packs are 18.8% full; with --max-length 8 --strategy ")
    assert advice.endswith("they would be 37.5% full")
    write_folder(tmp_path / "two", Folder(packs=[count_up(8), count_up(2)], max_length=10))
    fewer, waiting = build_report(tmp_path / "two")["warnings"]
    assert "would make 1 pack of the same sequences, 50.0% fewer" in fewer
    assert "2 ranks would wait" in waiting and "balance=" not in waiting


def test_a_full_folder_has_no_warnings(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(2, 2)], max_length=4))
    assert build_report(tmp_path / "packed")["warnings"] == []


def test_a_folder_without_packs_has_a_report(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[], dropped=2))
    report = build_report(tmp_path / "packed")
    assert report["utilization"] == 0 and report["packs"] == 0
    assert "there are no packs" in shown(report)


def test_packs_that_flash_attention_2_cannot_take_backward_are_warned_of(tmp_path: Path) -> None:
    """With 64 heads of 128, tokens and 128 a sequence are to stay below 2**18."""
    for sequences, warned in ((2032, False), (2033, True)):
        packed = tmp_path / str(sequences)
        write_folder(packed, Folder(packs=[[Seq([1])] * sequences, count_up(2)], max_length=4096))
        report = build_report(packed)
        assert report["flash_attention_2_backward"]["rows"] == 129 * sequences
        assert (129 * sequences * 64 * 128 >= 2**31) == warned
        assert any("FlashAttention-2" in warning for warning in report["warnings"]) == warned


def test_a_builds_summary_warns_of_packs_that_flash_attention_2_cannot_take(tmp_path: Path) -> None:
    rows = [{"text": f"{number}"} for number in range(2100)]
    source = write_lines(tmp_path / "short.jsonl", rows)
    common = ("--max-length", 131072, "--max-sequences-per-pack")
    run = pack(*build_arguments(source, tmp_path / "many", *common, 2100))
    assert run.code == 0, run.err
    (line,) = [line for line in run.out.splitlines() if line.startswith("warning:")]
    (warning,) = [
        words for words in build_report(tmp_path / "many")["warnings"] if "FlashAttention-2" in words
    ]
    assert line == f"warning: {warning}"
    assert "warning" not in pack(*build_arguments(source, tmp_path / "few", *common, 1000)).out
