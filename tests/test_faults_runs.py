"""Public faults of packers as programs: reuse of old work, worker pools, files half written, evaluation sets.

The numbers are those of the collection of faults that the cases were written from.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from building import (
    DEMO,
    TOKENIZER,
    Gate,
    assert_verified,
    await_chunks,
    build,
    build_arguments,
    built,
    demo_rows,
    files_of,
    pack,
    sequence_table,
    sequences_of,
    start,
    workers_in,
    write_lines,
    write_many,
)

from padless.runtime.reader import PackedReader


def texts(path: Path, count: int, words: int = 5) -> Path:
    """So many texts, no one like another."""
    return write_lines(path, [{"text": f"{number} " + "word " * words} for number in range(count)])


# -- cache ---------------------------------------------------------------------------------------------


def other_tokenizer(path: Path) -> Path:
    """The demo tokenizer with two of its ids exchanged."""
    shutil.copytree(TOKENIZER, path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    first, second = (token for token, number in ids.items() if number in (40, 41))
    ids[first], ids[second] = ids[second], ids[first]
    file.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_another_tokenizer_never_gets_the_old_tokens(tmp_path: Path) -> None:
    """BR-113."""
    other = other_tokenizer(tmp_path / "tokenizer")
    built(DEMO, tmp_path / "out")
    old = sequences_of(tmp_path / "out")
    run = build(DEMO, tmp_path / "out", "--tokenizer", other)
    assert run.code == 2 and "tokenizer" in run.err
    built(DEMO, tmp_path / "out", "--tokenizer", other, "--force")
    built(DEMO, tmp_path / "fresh", "--tokenizer", other)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert sequences_of(tmp_path / "out") != old


def test_another_chat_template_never_gets_the_old_masks(tmp_path: Path) -> None:
    """BR-114: two templates that differ by a newline."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    )
    template += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}END{% endfor %}"
    for name, end in (("a", "{{ '\\n' }}"), ("b", "")):
        (tmp_path / f"{name}.jinja").write_text(template.replace("END", end), encoding="utf-8")
    built(DEMO, tmp_path / "out", "--template", tmp_path / "a.jinja")
    run = build(DEMO, tmp_path / "out", "--template", tmp_path / "b.jinja")
    assert run.code == 2 and "template" in run.err
    built(DEMO, tmp_path / "b", "--template", tmp_path / "b.jinja")
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("out", "b")]
    assert manifests[0]["chat_template"] != manifests[1]["chat_template"]
    assert sequences_of(tmp_path / "out") != sequences_of(tmp_path / "b")


def test_a_tokenizer_that_was_used_is_the_same_tokenizer(tmp_path: Path) -> None:
    """BR-115: truncation set on an object moves no fingerprint; the second run does nothing."""
    from tokenizers import Tokenizer

    built(DEMO, tmp_path / "out")
    used = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    used.enable_truncation(4)
    used.encode("one two three four five")
    assert built(DEMO, tmp_path / "out")["was_finished"] is True


def bytes_below(folder: Path) -> int:
    """What the files below a folder take of the disk, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_work_takes_no_more_of_the_disk_than_the_packs_and_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-117: three builds with different lengths; looked at whenever a file is put into place."""
    many = write_many(tmp_path / "in" / "many.jsonl", 8)
    most: list[int] = []
    replace = os.replace

    def looked_at(source: Any, target: Any) -> None:
        most.append(bytes_below(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", looked_at)
    for length in (800, 1024, 2048):
        before = bytes_below(tmp_path)
        most.clear()
        built(many, tmp_path / str(length), "--max-length", length)
        assert len(most) > 5
        assert max(most) - before < 2.1 * bytes_below(tmp_path / str(length))
        assert_verified(tmp_path / str(length))
    assert {path.name for path in tmp_path.iterdir()} == {"in", "800", "1024", "2048"}


def test_packs_without_room_for_padding_are_not_taken_for_those_with(tmp_path: Path) -> None:
    """BR-118."""
    built(DEMO, tmp_path / "out")
    run = build(DEMO, tmp_path / "out", "--align", 16)
    assert run.code == 2 and "align" in run.err
    built(DEMO, tmp_path / "out", "--align", 16, "--force")
    for one in PackedReader(tmp_path / "out"):
        assert sum(-(-length // 16) * 16 for length in one.seq_lengths.tolist()) <= 1024


# -- multiprocessing -----------------------------------------------------------------------------------


def test_a_pool_starts_in_a_process_whose_threads_are_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-119: torch's threads and a tokenizer's may hold their locks when workers are forked."""
    from tokenizers import Tokenizer

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    begun, ended = threading.Event(), threading.Event()

    def work() -> int:
        rounds = 0
        while not ended.is_set():
            tokenizer.encode_batch(["some text"] * 100)
            torch.ones(256, 256) @ torch.ones(256, 256)
            begun.set()
            rounds += 1
        return rounds

    source = texts(tmp_path / "in.jsonl", 1000)
    with ThreadPoolExecutor(1) as pool:
        rounds = pool.submit(work)
        try:
            begun.wait()
            with workers_in("processes"):
                assert built(source, tmp_path / "out", "--workers", 4)["records"] == 1000
        finally:
            ended.set()
        assert rounds.result() > 1
    built(source, tmp_path / "alone")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")


@pytest.mark.parametrize("parallelism", ["true", "false"])
def test_long_records_end_with_several_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallelism: str
) -> None:
    """BR-120."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallelism)
    source = texts(tmp_path / "in.jsonl", 8, words=40_000)
    with workers_in("processes"):
        found = built(source, tmp_path / "out", "--workers", 2, "--overflow", "split")
    assert found["kept_records"] == 8
    assert found["tokens"] > 8 * 40_000


def test_every_number_of_workers_gives_all_rows(tmp_path: Path) -> None:
    """BR-121, BR-122, BR-123: 61 rows, and one."""
    for count in (61, 1):
        source = texts(tmp_path / f"{count}.jsonl", count)
        outputs = []
        for workers in (1, 2, 11, 64):
            output = tmp_path / f"{count}-{workers}"
            with workers_in("processes" if workers == 2 else "threads"):
                assert built(source, output, "--workers", workers)["kept_records"] == count
            outputs.append(files_of(output))
        assert all(output == outputs[0] for output in outputs)
        assert len(sequences_of(tmp_path / f"{count}-2")) == count
    (tmp_path / "0.jsonl").write_text("")
    run = build(tmp_path / "0.jsonl", tmp_path / "0", "--workers", 16)
    assert run.code == 2 and "0.jsonl" in run.err


# -- shards --------------------------------------------------------------------------------------------


def test_a_killed_build_leaves_no_file_that_looks_finished(tmp_path: Path) -> None:
    """BR-124, BR-132: and the same command then gives what an undisturbed one does."""
    many = write_many(tmp_path / "in" / "many.jsonl", 12)
    built(many, tmp_path / "clean")
    gate = Gate(tmp_path / "gate")
    process = start(*build_arguments(many, tmp_path / "out"), way="processes", gate=gate)
    await_chunks(tmp_path / "out", process, gate)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list((tmp_path / "out").glob("shard-*"))
    with pytest.raises(Exception, match="unfinished build"):
        PackedReader(tmp_path / "out")
    built(many, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "clean")


def test_a_smaller_data_set_leaves_no_shard_of_the_larger_one(tmp_path: Path) -> None:
    """BR-126."""
    large, small = texts(tmp_path / "l.jsonl", 100, 400), texts(tmp_path / "s.jsonl", 50, 400)
    options: tuple[Any, ...] = ("--shard-size", 40_000)
    built(large, tmp_path / "out", *options)
    shards = len(list((tmp_path / "out").glob("shard-*")))
    run = build(small, tmp_path / "out", *options)
    assert run.code == 2 and "--force" in run.err
    built(small, tmp_path / "out", *options, "--force")
    reader = PackedReader(tmp_path / "out")
    assert 0 < len(reader.manifest.shards) == len(list((tmp_path / "out").glob("shard-*"))) < shards
    (tmp_path / "out" / "shard-00099-00000000.arrow").write_bytes(b"of somebody else")
    assert sum(len(one.seq_lengths) for one in PackedReader(tmp_path / "out")) == 50


@pytest.mark.parametrize("size", ["0", "-1"])
def test_no_shards_are_refused_and_never_a_success_without_data(tmp_path: Path, size: str) -> None:
    """BR-131."""
    run = build(DEMO, tmp_path / "out", "--shard-size", size)
    assert run.code == 2 and "--shard-size" in run.err
    assert not (tmp_path / "out" / "manifest.json").exists()
    found = built(texts(tmp_path / "3.jsonl", 3, 600), tmp_path / "3", "--shard-size", 1)
    shards = PackedReader(tmp_path / "3").manifest.shards
    assert len(shards) == found["packs"] and all(shard.packs == 1 for shard in shards)


# -- boundaries, loss, evaluation ----------------------------------------------------------------------


def test_a_record_over_twice_the_length_is_split_to_the_token(tmp_path: Path) -> None:
    """BR-017: 11 tokens at 4."""
    source = write_lines(tmp_path / "in.jsonl", [{"input_ids": list(range(10, 21))}])
    built(source, tmp_path / "out", "--max-length", 4, "--overflow", "split", "--strategy", "ordered")
    packs = [one.input_ids.tolist() for one in PackedReader(tmp_path / "out")]
    assert sorted(sum(packs, [])) == list(range(10, 21))
    assert all(len(one) <= 4 for one in packs)
    assert sum(sequence_table(tmp_path / "out")["length"]) == 11


def test_packs_know_how_many_sequences_tokens_and_targets_they_hold(tmp_path: Path) -> None:
    """BR-031: a batch of packs is no number of rows, so all three are stored and reported."""
    rows = [{"input_ids": [7] * length} for length in (16, 16, 2, 2, 2, 2, 2, 2, 4)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    built(source, tmp_path / "out", "--max-length", 16)
    packs = list(PackedReader(tmp_path / "out"))
    assert sorted(len(one.seq_lengths) for one in packs) == [1, 1, 7]
    assert [one.num_tokens for one in packs] == [16, 16, 16]
    assert sorted(one.num_targets for one in packs) == [9, 15, 15]
    report = pack("report", tmp_path / "out", "--json").json
    assert (report["packs"], report["sequences"], report["tokens"]) == (3, 9, 48)


def test_a_training_set_is_packed_and_its_evaluation_set_is_not(tmp_path: Path) -> None:
    """BR-176: in one command; five rows in the file's order."""
    train = write_lines(tmp_path / "train.jsonl", demo_rows() * 5)
    small = write_lines(tmp_path / "eval.jsonl", demo_rows()[:5])
    built(train, tmp_path / "out", "--eval-source", small)
    packs = list(PackedReader(tmp_path / "out", split="validation"))
    assert [len(one.seq_lengths) for one in packs] == [1] * 5
    assert [one.sequence_ids.tolist() for one in packs] == [[number] for number in range(5)]
    assert len(PackedReader(tmp_path / "out", split="train")) < len(demo_rows())
