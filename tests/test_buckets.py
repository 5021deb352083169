"""A store that goes through buckets gives the very shards that it gives where it lies."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from building import (
    MAX_LENGTH,
    TOKENIZER,
    build,
    built,
    demo_rows,
    files_of,
    pack,
    sequence_table,
    write_lines,
    write_many,
)

from padless.packer import buckets, commit, engine


@contextmanager
def in_buckets(window: int = 5000) -> Iterator[list[int]]:
    """In here every store goes through buckets, in windows of so many tokens; the tokens of each."""
    seen: list[int] = []
    fill = buckets._fill

    def watched(gather: Any, plan: Any, batches: Any, tokens: Any, work: str) -> Any:
        seen.append(int(tokens.sum()))
        return fill(gather, plan, batches, tokens, work)

    with (
        patch.object(commit, "BUCKETS_FROM", 0),
        patch.object(buckets, "WINDOW_TOKENS", window),
        patch.object(buckets, "WINDOW_SEQUENCES", 50),
        patch.object(buckets, "RUN_TOKENS", 1),
        patch.object(buckets, "_fill", watched),
    ):
        yield seen


def weighted_rows() -> list[Any]:
    """Conversations whose answers are weighed."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {n} " * (1 + n % 7)},
                {"role": "assistant", "content": f"answer {n} " * (1 + n % 5), "weight": n % 3 / 2},
                {"role": "user", "content": "and then?"},
                {"role": "assistant", "content": "that is all"},
            ]
        }
        for n in range(120)
    ]


def texts() -> list[Any]:
    return [{"text": "words of a document " * (1 + n * n % 40)} for n in range(90)]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (demo_rows(), ("--shard-size", 60_000)),
        (demo_rows(), ("--eval-fraction", 0.2, "--shard-size", 60_000)),
        (weighted_rows(), ("--shard-size", 20_000)),
        (texts(), ("--strategy=wrapped", "--overflow=split", "--max-length", 64, "--shard-size", 8_000)),
        (texts(), ("--overflow", "split", "--max-length", 32, "--shard-size", 8_000)),
    ],
    ids=["plain", "splits", "weighted", "cut by the plan", "split before it"],
)
def test_buckets_leave_no_trace_in_the_folder(
    tmp_path: Path, rows: list[Any], options: tuple[Any, ...]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", rows)
    told = built(source, tmp_path / "mapped", *options)
    with in_buckets() as seen:
        built(source, tmp_path / "buckets", *options)
    assert sum(seen) == told["tokens"] > 3000
    assert files_of(tmp_path / "mapped") == files_of(tmp_path / "buckets")


def test_copies_of_a_mix_lie_in_the_buckets_of_all_their_packs(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f"{n}.jsonl", demo_rows()[n::4]) for n in range(2)]
    parts = [{"path": str(path), "weight": 1 + 3 * n} for n, path in enumerate(paths)]
    mix = tmp_path / "mix.yaml"
    draw = {"mix_target": 180, "mix_by": "records", "max_repeats": 2}
    mix.write_text(json.dumps({"sources": parts, "shard_size": 60_000, **draw}))
    options = ("--config", mix, "--tokenizer", TOKENIZER, "--max-length", MAX_LENGTH)
    assert pack("build", *options, "--output", tmp_path / "mapped").code == 0
    with in_buckets() as seen:
        assert pack("build", *options, "--output", tmp_path / "buckets").code == 0
    assert sum(seen) > 0
    assert max(sequence_table(tmp_path / "buckets")["part"]) > 0  # some are there several times
    assert files_of(tmp_path / "mapped") == files_of(tmp_path / "buckets")


def test_a_full_disk_at_the_buckets_is_told_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source = write_many(tmp_path / "in.jsonl", 4)
    wanted = files_of(tmp_path / "wanted") if built(source, tmp_path / "wanted") else {}
    pwrite = os.pwrite

    def full(descriptor: int, data: Any, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("buckets.bin"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, at)

    with in_buckets(), patch.object(os, "pwrite", full):
        run = build(source, tmp_path / "out")
    assert run.code == 2
    assert "the disk is full" in run.err
    assert "buckets.bin" in run.err
    assert not (tmp_path / "out" / ".work" / "buckets.bin").exists()  # what it took is room again
    with in_buckets():
        again = built(source, tmp_path / "out")
    assert again["resumed_chunks"] == again["chunks"] > 0
    assert files_of(tmp_path / "out") == wanted


def test_shards_that_an_earlier_run_finished_need_no_buckets(tmp_path: Path) -> None:
    source = write_many(tmp_path / "in.jsonl", 4)
    size = ("--shard-size", 60_000, "--workers", 1)
    told = built(source, tmp_path / "wanted", *size)
    write = engine.write_shard
    done: list[int] = []

    def stopped(folder: str, number: int, *rest: Any, **named: Any) -> Any:
        if number == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(number)
        return write(folder, number, *rest, **named)

    with in_buckets() as seen, patch.object(engine, "write_shard", stopped):
        assert build(source, tmp_path / "out", *size).code == 2
    assert {0, 1} <= set(done)
    with in_buckets() as again:
        built(source, tmp_path / "out", *size)
    assert seen == [told["tokens"]]
    assert 0 < again[0] < seen[0]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "wanted")


def test_windows_hold_few_tokens_unless_one_sequence_has_more() -> None:
    lengths = np.array([3, 3, 3, 50, 1, 1, 1, 1, 1, 1], dtype=np.int32)
    with (
        patch.object(buckets, "WINDOW_TOKENS", 6),
        patch.object(buckets, "WINDOW_SEQUENCES", 4),
        patch.object(buckets, "RUN_TOKENS", 1),
    ):
        assert list(buckets._windows(lengths, 1)) == [(0, 2), (2, 3), (3, 4), (4, 8), (8, 10)]
