"""Very long and very many records: memory goes by what is worked on, and by a few bytes a sequence.

Peaks are the kernel's own (VmHWM of a process with one worker) or numpy's (tracemalloc), never sampled; sizes
are those of the faults, scaled down to seconds.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from building import DEMO, TOKENIZER, build, build_arguments, built, sequence_table, sequences_of

from padless.packer import tables
from padless.packer.chunk import ChunkResult
from padless.packer.elements import gather_of, lay_elements
from padless.packer.lines import LINE
from padless.packer.plan import PackPlan, check_plan
from padless.packer.reference import load_reference
from padless.packer.strategies import STRATEGIES
from padless.packer.table_writer import Places
from padless.packer.tables import collect
from padless.packer.token_store import ChunkStore, Counter, Reserved
from padless.packer.write import Layout, cut_shards

MB = 10**6
PEAK = """
import sys
from padless.packer import buckets, commit, tokenizing
from padless.packer.commands import run
buckets.WINDOW_TOKENS, buckets.RUN_TOKENS = 2**17, 1
tokenizing.SHADOW_BYTES = 2**19  # hold little while the tokenizer loads: how long that takes is chance
commit.BUCKETS_FROM = 2**20
code = run()
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


def peak_of(source: Path, output: Path, *options: object) -> int:
    """Bytes that a build in one process had at its peak, what was mapped of files among them."""
    arguments = build_arguments(source, output, "--workers", 1, "--quiet", *options)
    run = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return int(run.stderr.split()[-1]) * 1024


def prose(size: int, first: int = 0) -> str:
    """So many letters, about, of words that are not all the same."""
    words = (f"the word {number % 9973} came before" for number in range(first, first + size // 25))
    return " ".join(words)


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_memory_grows_by_a_few_times_a_line_that_is_larger_than_any_block(tmp_path: Path) -> None:
    """BR-096."""
    peaks = []
    for size in (2 * MB, 10 * MB):
        texts = ["five words make a row", prose(size), "and five words again here"]
        source = write_texts(tmp_path / "in.jsonl", texts)
        peaks.append(peak_of(source, tmp_path / f"out-{size}", "--overflow", "split"))
    table = sequence_table(tmp_path / f"out-{10 * MB}")
    assert sorted(set(table["record"])) == [0, 1, 2]
    assert sum(table["length"]) > 2 * MB
    assert peaks[1] - peaks[0] < 12 * 8 * MB, peaks


def test_a_long_document_has_the_tokens_that_it_has_in_one_piece(tmp_path: Path) -> None:
    """BR-097: nothing is cut before it is tokenized, so nothing can be joined wrongly."""
    text = prose(60_000)
    source = write_texts(tmp_path / "in.jsonl", [text])
    built(source, tmp_path / "out", "--overflow", "split", "--max-length", 8192, "--eos", "none")
    ids = [token for _, (tokens, _) in sorted(sequences_of(tmp_path / "out").items()) for token in tokens]
    assert ids == load_reference(str(TOKENIZER)).encode(text, add_special_tokens=False).ids


def test_one_letter_a_million_times_is_a_record_like_another(tmp_path: Path) -> None:
    """BR-098."""
    source = write_texts(tmp_path / "in.jsonl", ["a short one", "a" * 1_000_000, "and another"])
    told = built(source, tmp_path / "out", "--overflow", "split")
    assert told["kept_records"] == 3
    assert told["dropped_records"] == told["cut_tokens"] == 0


def test_what_is_kept_of_long_strings_is_bounded(tmp_path: Path) -> None:
    """BR-099 and BR-100: ten times as many rows of distinct long text take no more than a cache's limit."""
    peaks = []
    for rows in (10, 100):
        texts = [prose(100_000, first=number * 100_003) for number in range(rows)]
        source = write_texts(tmp_path / f"{rows}.jsonl", texts)
        peaks.append(peak_of(source, tmp_path / f"out-{rows}", "--overflow", "split"))
    assert peaks[1] < 1.2 * peaks[0] + 20 * MB, peaks  # that is 9 MB of text more


def test_the_shuffle_moves_numbers_and_the_store_is_never_in_memory(tmp_path: Path) -> None:
    """BR-101: five times the tokens, of as many sequences, in the same memory."""
    peaks = []
    for length in (250, 1250):
        lines = [{"input_ids": [1 + (row + n) % 900 for n in range(length)]} for row in range(4000)]
        source = tmp_path / f"{length}.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        options = ("--shard-size", MB // 2, "--format", "tokenized", "--max-length", 2048)
        peaks.append(peak_of(source, tmp_path / f"out-{length}", *options))
    assert peaks[1] - peaks[0] < 8 * MB, peaks  # 16 MB more in the store; as many shards are under way


@pytest.mark.parametrize(("name", "most"), [("bfd", 12), ("ffd", 16)])
def test_a_plan_of_millions_takes_a_few_bytes_a_sequence(name: str, most: int) -> None:
    """BR-102; bytes at the peak of planning, beside the lengths themselves."""
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000).astype(np.int32)

    def plan() -> PackPlan:
        return STRATEGIES[name](lengths, 4096, max_sequences_per_pack=1024, seed=0, shuffle=True)

    found, peak = traced(plan)
    check_plan(found, lengths, 4096, 1024)
    assert peak < most * len(lengths) + 16 * MB  # and what a block of them takes while it is placed


def test_a_spread_plan_of_millions_takes_16_bytes_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-102; beside the lengths, and with its packs in a drawn order."""
    monkeypatch.setattr(importlib.import_module("padless.packer.strategies.spread"), "BASE", 1 << 13)
    lengths = np.random.default_rng(0).integers(1, 65, 1_000_000).astype(np.int32)
    found, peak = traced(lambda: STRATEGIES["spread"](lengths, 1024, seed=0, shuffle=True))
    check_plan(found, lengths, 1024)
    assert peak < 16 * len(lengths)


def test_a_wrapped_plan_of_millions_takes_20_bytes_a_sequence() -> None:
    """BR-102; likewise, the fragments among its entries."""
    lengths = np.random.default_rng(0).integers(1, 65, 1_000_000).astype(np.int32)
    found, peak = traced(lambda: STRATEGIES["wrapped"](lengths, 1024, seed=0, shuffle=True))
    check_plan(found, lengths, 1024)
    assert peak < 20 * len(lengths)


def traced(run: Callable[[], PackPlan]) -> tuple[PackPlan, int]:
    tracemalloc.start()
    try:
        found = run()
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_lies_between_chunks_and_shards_takes_32_bytes_a_sequence(tmp_path: Path) -> None:
    """Lengths, elements, plan, addresses and places: all that a build holds of its sequences."""
    store = ChunkStore(str(tmp_path), "key")
    ends = Reserved((Counter(0), Counter(0)))
    per_chunk = 10_000
    lines = np.zeros(per_chunk, dtype=LINE)
    lines["record"] = np.arange(per_chunk)
    lines["length"] = 1 + np.arange(per_chunk) % 7
    lines["targets"] = lines["length"] - 1
    values = np.zeros(int(lines["length"].sum()), dtype=np.int32)
    for chunk in range(60):
        store.commit(store.write(chunk, 0, 1, ChunkResult(lines, values, per_chunk, [], 0), ends))
    layout = Layout(id_type="uint16", labels=False, compression=None, shard_bytes=2**29)

    def all_of_it() -> PackPlan:
        (split,) = collect(store, 1, 1)
        plan = STRATEGIES["bfd"](split.lengths, 2048, max_sequences_per_pack=1024, seed=0, shuffle=True)
        tokens, _ = lay_elements(store)
        gather = gather_of(tokens, None, split)
        places = Places(plan, split.lengths)
        assert cut_shards(plan, split.lengths, layout)
        assert len(gather.lengths) == len(places.pack) == 60 * per_chunk
        return plan

    _, peak = traced(all_of_it)
    store.close()
    assert peak < 32 * 60 * per_chunk + 4 * MB


def test_more_sequences_than_their_numbers_can_tell_apart_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_SEQUENCES", 399)
    run = build(DEMO, tmp_path / "out")
    assert run.code == 2
    assert "400 sequences" in run.err and "399" in run.err and "several folders" in run.err
    assert not (tmp_path / "out").exists()
