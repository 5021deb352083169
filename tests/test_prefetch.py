"""Batches made ahead: the same ones, in the same order, seen only when they are yielded."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from packed import Folder, count_up, rewrite_shard, write_folder, write_numbered
from ranks import numbers

from padless.runtime.errors import BatchError, StreamError
from padless.runtime.prefetch import Prefetch
from padless.runtime.stream import PackedStream

PACKS = 11


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "packed", PACKS)


def open_stream(path: Path, **options: int) -> PackedStream:
    return PackedStream(path, rank=0, world_size=1, **options)


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_epochs_are_those_of_the_stream(packed: Path, ahead: int) -> None:
    plain = open_stream(packed)
    batches = Prefetch(open_stream(packed), device="cpu", ahead=ahead)
    assert len(batches) == PACKS
    for epoch in range(3):
        assert batches.stream.epoch == epoch
        assert [numbers(batch) for batch in batches] == [numbers(batch) for batch in plain]
        assert batches.state_dict() == plain.state_dict()


@pytest.mark.parametrize("stop", [0, 1, 4, PACKS])
def test_a_batch_that_lies_ready_is_not_seen(packed: Path, stop: int) -> None:
    plain = open_stream(packed)
    whole = [numbers(batch) for _ in range(2) for batch in plain]
    batches = Prefetch(open_stream(packed), ahead=3)
    states, head = [batches.state_dict()], []
    for _, batch in zip(range(stop), batches, strict=False):
        head.append(numbers(batch))
        states.append(batches.state_dict())
    # The loop was left: the same object goes on after what was yielded, and so does any other.
    assert batches.state_dict() == states[-1]
    other = open_stream(packed)
    other.load_state_dict(states[-1])
    for rest in (batches, other):
        found = list(head)
        while len(found) < len(whole):
            found += [numbers(batch) for batch in rest]
        assert found == whole
    fresh = open_stream(packed)
    for number, (state, _) in enumerate(zip(states[1:], fresh, strict=False)):
        assert state == fresh.state_dict(), number


def test_a_loop_from_a_state_whose_rest_fills_no_step_is_the_next_epoch(packed: Path) -> None:
    before = open_stream(packed, packs_per_batch=10)
    next(iter(before))
    batches = Prefetch(open_stream(packed, packs_per_batch=2))
    batches.load_state_dict(before.state_dict())  # one pack of 11 is left
    assert [len(list(batches)) for _ in range(2)] == [5, 5]
    assert batches.stream.epoch == 3


def test_what_goes_wrong_in_the_thread_is_raised_in_the_loop(packed: Path) -> None:
    rewrite_shard(packed, 3, lambda rows: rows[0].update({"num_tokens": 9}))
    threads = threading.active_count()
    batches = Prefetch(PackedStream(packed, rank=0, world_size=1, shuffle=False))
    seen = []
    with pytest.raises(BatchError, match="num_tokens is not"):
        for batch in batches:
            seen += numbers(batch)
    assert seen == [0, 1, 2, 3, 4, 5], "everything before the damage was yielded"
    assert threading.active_count() == threads


def test_inside_a_loop_the_stream_cannot_be_moved(packed: Path) -> None:
    batches = Prefetch(open_stream(packed))
    loop = iter(batches)
    next(loop)
    for move in (
        lambda: next(iter(batches)),
        lambda: batches.set_epoch(3),
        lambda: batches.load_state_dict({}),
    ):
        with pytest.raises(StreamError, match="a loop over this Prefetch is going on"):
            move()
    loop.close()  # type: ignore[attr-defined]
    batches.set_epoch(3)
    assert batches.state_dict()["epoch"] == 3
    with pytest.raises(StreamError, match="ahead is 0"):
        Prefetch(open_stream(packed), ahead=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_device_before_they_are_used(packed: Path) -> None:
    plain = open_stream(packed)
    batches = Prefetch(open_stream(packed), device="cuda", ahead=4)
    for mine, theirs in zip(batches, plain, strict=True):
        torch.cuda._sleep(10_000_000)  # the current stream is late; copies of later batches are not
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert mine[key].is_cuda
                assert torch.equal(mine[key].cpu(), value), key


def test_a_process_ends_in_the_middle_of_a_loop(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(3, first=number) for number in range(12)]))
    code = """
import atexit, sys, threading
from padless.runtime.prefetch import Prefetch
from padless.runtime.stream import PackedStream
loop = iter(Prefetch(PackedStream(sys.argv[1])))
next(loop)
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
"""
    words = [sys.executable, "-c", code, str(tmp_path / "packed")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "['MainThread']\n", "")


def test_a_loop_in_a_thread_goes_on_where_the_main_thread_ends_first(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(3, first=number) for number in range(6)]))
    code = """
import sys, threading, time
from padless.runtime import prefetch
from padless.runtime.stream import PackedStream
prefetch._LOOKS_UP = 0.01
def train():
    threading.main_thread().join()
    for number, _ in enumerate(prefetch.Prefetch(PackedStream(sys.argv[1]), ahead=1)):
        time.sleep(0.1)
    print(number)
threading.Thread(target=train).start()
"""
    words = [sys.executable, "-c", code, str(tmp_path / "packed")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "5\n", "")
