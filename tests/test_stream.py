"""Over ranks, workers, stops and restarts: each pack once, in one order, in as many batches."""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import as_worker, workers_ended
from packed import Folder, count_up, write_folder, write_numbered
from ranks import numbers
from reference_order import order_of
from torch.utils.data import DataLoader

from padless.runtime.collate import collate
from padless.runtime.dataset import PackBatchSampler, PackedDataset
from padless.runtime.errors import ChecksumError, StateError, StreamError
from padless.runtime.order import Position, StepOrder, shuffled
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream

PACKS = 23


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(
        tmp_path_factory.mktemp("stream") / "packed", PACKS, packs_per_shard=6, packs_per_batch=3
    )


def run_epoch(path: Path, world_size: int, **options: Any) -> list[list[list[int]]]:
    """For each rank its batches of the current epoch, as pack numbers."""
    return [
        [numbers(batch) for batch in PackedStream(path, rank=rank, world_size=world_size, **options)]
        for rank in range(world_size)
    ]


def steps_of(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The packs of each step over all ranks; fails where ranks have different numbers of batches."""
    return [sorted(sum(step, [])) for step in zip(*ranks, strict=True)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**62), st.integers(0, 50))
def test_the_order_is_a_permutation_that_can_be_entered_anywhere(size: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))
    if size <= 300:
        assert order.tolist() == order_of(size, seed, epoch)
    some = np.arange(size // 3, size // 2)
    assert np.array_equal(shuffled(some, size, seed, epoch), order[some])


def test_the_order_is_this_one_for_ever() -> None:
    # Literal: a state that was saved must lead on in every later version, on every machine.
    assert shuffled(np.arange(10), 10, 0, 0).tolist() == [7, 8, 2, 6, 9, 3, 0, 4, 5, 1]
    assert shuffled(np.arange(10), 10, 1, 2).tolist() == [9, 1, 5, 4, 0, 7, 6, 3, 8, 2]


@pytest.mark.parametrize("size", [5, 12, 64])
def test_every_pack_comes_at_every_place_about_as_often(size: int) -> None:
    rounds = 2000
    orders = np.array([shuffled(np.arange(size), size, seed, seed % 3) for seed in range(rounds)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = rounds / size
    freedom = (size - 1) ** 2
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 99),
    epoch=st.integers(0, 3),
    world_size=st.sampled_from([1, 2, 3, 8]),
    packs_per_batch=st.integers(1, 3),
    remainder=st.sampled_from(["drop", "pad"]),
    balance=st.sampled_from([None, "attention"]),
)
def test_ranks_see_each_pack_once_in_as_many_batches(
    packed: Path,
    seed: int,
    epoch: int,
    world_size: int,
    packs_per_batch: int,
    remainder: str,
    balance: str | None,
) -> None:
    group = world_size * packs_per_batch
    options = {"seed": seed, "epoch": epoch, "packs_per_batch": packs_per_batch, "balance": balance}
    if remainder == "drop" and group > PACKS:
        with pytest.raises(StreamError, match="no batch is full"):
            PackedStream(packed, rank=0, world_size=world_size, **options)
        return
    ranks = run_epoch(packed, world_size, remainder=remainder, **options)
    steps = steps_of(ranks)
    seen = Counter(sum(steps, []))
    assert set(seen.values()) == {1}
    if remainder == "pad":
        assert len(seen) == PACKS
    else:
        assert len(seen) == PACKS // group * group
        assert all(len(batch) == packs_per_batch for rank in ranks for batch in rank)
    stream = PackedStream(packed, rank=0, world_size=world_size, remainder=remainder, **options)
    assert len(stream) == len(steps)
    if balance is None:
        order = order_of(PACKS, seed, epoch)
        assert steps == [sorted(order[i : i + group]) for i in range(0, len(seen), group)]


@pytest.mark.parametrize("balance", [None, "attention"])
@pytest.mark.parametrize("stop", range(12))
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(packed: Path, balance: str | None, stop: int) -> None:
    def open_stream() -> PackedStream:
        return PackedStream(packed, rank=1, world_size=2, seed=5, balance=balance)

    whole = open_stream()
    expected = [numbers(batch) for _ in range(3) for batch in whole]
    stream = open_stream()
    got = [numbers(batch) for _, batch in zip(range(stop), stream, strict=False)]
    np.random.seed(stop)  # nothing hangs on the global random state
    resumed = open_stream()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert resumed.epoch == (0 if stop < 11 else 1)
    while resumed.epoch < 3:
        got += [numbers(batch) for batch in resumed]
    assert got == expected


def test_a_state_is_a_few_numbers_that_later_versions_must_read(packed: Path) -> None:
    stream = PackedStream(packed, rank=1, world_size=2, packs_per_batch=2, seed=7)
    iterator = iter(stream)
    next(iterator), next(iterator)
    state = stream.state_dict()
    assert state.pop("data").startswith("xxh3:")
    numbers_only = {"version": 1, "seed": 7, "shuffle": True, "epoch": 0, "taken": 8}
    assert state == numbers_only | {"left": [], "group": 0, "worker": None}


def test_epochs_differ_and_set_epoch_chooses_one(packed: Path) -> None:
    stream = PackedStream(packed, rank=0, world_size=1)
    first, second = [[numbers(batch) for batch in stream] for _ in range(2)]
    assert first != second
    assert sorted(first) == sorted(second) == [[number] for number in range(PACKS)]
    assert stream.epoch == 2
    stream.set_epoch(0)
    assert [numbers(batch) for batch in stream] == first
    # A loop that names the epoch after loading a state must not lose the place.
    iterator = iter(stream)
    head = [numbers(next(iterator)) for _ in range(4)]
    stream.set_epoch(1)
    assert head + [numbers(batch) for batch in stream] == second


def test_without_shuffling_packs_come_as_stored(packed: Path) -> None:
    assert sum(run_epoch(packed, 1, shuffle=False)[0], []) == list(range(PACKS))


def test_packs_left_out_are_logged_and_others_each_epoch(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = PackedStream(packed, packs_per_batch=4, rank=0, world_size=1)
    with caplog.at_level(logging.INFO, logger="padless.runtime.stream"):
        kept = [set(sum((numbers(batch) for batch in stream), [])) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        f"epoch {epoch} leaves 3 packs out: they fill no step" for epoch in range(2)
    ]
    assert len(kept[0]) == len(kept[1]) == 20
    assert kept[0] != kept[1]


def test_padding_gives_batches_without_targets_and_never_a_repeat(packed: Path) -> None:
    streams = [
        PackedStream(packed, rank=rank, world_size=8, packs_per_batch=2, remainder="pad", shuffle=False)
        for rank in range(8)
    ]
    last = [list(stream)[-1] for stream in streams]
    assert [numbers(batch) for batch in last] == [[16 + rank] if rank < 7 else [] for rank in range(8)]
    assert last[7].num_targets == 0
    assert last[7]["labels"].tolist() == [[-100, -100]]
    assert set(last[7]) == set(last[0])


def test_a_batch_without_targets_has_the_further_columns_of_the_others(tmp_path: Path) -> None:
    extras = {
        "advantage": ("token", "list<float32>", pa.list_(pa.float32()), [[0.5, 1.5], [2.5]]),
        "top": (
            "token",
            "list<fixed_size_list<float32, 3>>",
            pa.list_(pa.list_(pa.float32(), 3)),
            [[[1.0, 2.0, 3.0]] * 2, [[4.0, 5.0, 6.0]]],
        ),
        "pair_id": ("sequence", "list<int64>", pa.list_(pa.int64()), [[7], [8]]),
        "weight": ("pack", "float64", pa.float64(), [1.0, 2.0]),
        "kind": ("pack", "string", pa.string(), ["a", "b"]),
    }
    path = tmp_path / "packed"
    write_folder(path, Folder(packs=[count_up(2), count_up(1)], extras=extras))
    batches = [
        next(iter(PackedStream(path, rank=rank, world_size=3, remainder="pad", shuffle=False)))
        for rank in range(3)
    ]
    assert [batch.num_targets for batch in batches] == [1, 0, 0]
    full, _, empty = batches
    assert list(empty) == list(full)
    for key, value in full.items():
        assert getattr(empty[key], "dtype", type(value)) == getattr(value, "dtype", type(value)), key
        assert getattr(empty[key], "shape", None) == getattr(value, "shape", None), key
    assert not empty["top"].any()
    assert empty["pair_id"].tolist() == [-1]  # of no pair
    assert empty["kind"] == [""]


# One number of spawned workers is enough: each takes seconds to import torch.
@pytest.mark.parametrize(("start", "workers"), [("fork", 1), ("fork", 2), ("fork", 3), ("spawn", 2)])
def test_loader_workers_give_the_same_batches(packed: Path, start: str, workers: int) -> None:
    stream = PackedStream(packed, rank=1, world_size=2, packs_per_batch=2, seed=3, remainder="pad")
    expected = [numbers(batch) for batch in stream]
    loader = DataLoader(
        PackedStream(packed, rank=1, world_size=2, packs_per_batch=2, seed=3, remainder="pad"),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=start,
        persistent_workers=True,
    )
    assert len(loader) == len(expected)
    assert [numbers(batch) for batch in loader] == expected
    # Persistent workers go to the next epoch by themselves, and see all of it.
    assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in stream]


@pytest.mark.parametrize(("workers", "balance"), [(0, None), (1, "attention"), (2, None)])
def test_torchdatas_loader_goes_on_where_it_stopped(packed: Path, workers: int, balance: str | None) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def open_loader() -> Any:
        return stateful.StatefulDataLoader(
            PackedStream(packed, rank=1, world_size=2, seed=5, balance=balance),
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )

    expected = run_epoch(packed, 2, seed=5, balance=balance)[1]
    for stop in (0, 1, 4, 10):
        loader = open_loader()
        iterator = iter(loader)
        head = [numbers(next(iterator)) for _ in range(stop)]
        resumed = open_loader()
        resumed.load_state_dict(loader.state_dict())
        assert head + [numbers(batch) for batch in resumed] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"data": "xxh3:0"}, "another folder, plan or split"),
        ({"seed": 1}, "seed=1, this stream has seed=0"),
        ({"shuffle": False}, "shuffle=False"),
        ({"taken": PACKS + 1}, "damaged"),
        ({"left": [1, 1]}, "damaged"),
        ({"left": [PACKS]}, "damaged"),
        ({"epoch": "x"}, "damaged"),
        ({"epoch": -1}, "damaged"),
        ({"epoch": 2**64}, "damaged"),
    ],
)
def test_a_state_that_does_not_belong_is_refused_with_the_reason(
    packed: Path, change: dict[str, Any], message: str
) -> None:
    stream = PackedStream(packed, rank=0, world_size=1)
    next(iter(stream))
    before = stream.state_dict()
    with pytest.raises(StateError, match=message):
        stream.load_state_dict(before | {"taken": 3} | change)
    assert stream.state_dict() == before


def test_a_state_of_other_data_with_equal_lengths_is_refused(packed: Path, tmp_path: Path) -> None:
    packs = [count_up(1 + number % 7, first=number + 1) for number in range(PACKS)]
    write_folder(tmp_path / "other", Folder(packs=packs, packs_per_shard=6, packs_per_batch=3))
    other = PackedStream(tmp_path / "other", rank=0, world_size=1)
    with pytest.raises(StateError, match="another folder"):
        PackedStream(packed, rank=0, world_size=1).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packs_per_batch": 0}, "at least 1"),
        ({"remainder": "repeat"}, "drop, pad"),
        ({"balance": "length"}, "attention"),
        ({"seed": -1}, "seed is -1"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": 2**64}, "2\\*\\*62 - 1"),
        ({"epoch": 1.5}, "epoch is 1.5; give a whole number"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number"),
        ({"packs_per_batch": 2.5}, "packs_per_batch is 2.5; give a whole number"),
        ({"tokens_per_batch": "64"}, "tokens_per_batch is '64'; give a whole number"),
        ({"rank": "0"}, "rank '0' of world_size 1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2"),
        ({"rank": 1, "world_size": None}, "give both or none"),
        ({"packs_per_batch": 24}, "remainder='pad'"),
    ],
)
def test_a_wrong_option_is_named(packed: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        PackedStream(packed, **({"rank": 0, "world_size": 1} | options))


def test_ranks_come_from_the_environment(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = PackedStream(packed)
    assert (stream.rank, stream.world_size) == (2, 3)
    assert [numbers(batch) for batch in stream] == run_epoch(packed, 3)[2]
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(StreamError, match="'three'"):
        PackedStream(packed)


def test_a_stream_inside_accelerates_shards_or_dispatch_says_what_to_use(packed: Path) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    stream = PackedStream(packed, rank=0, world_size=2)
    shard = data_loader.IterableDatasetShard(stream, batch_size=1, num_processes=2, process_index=0)
    with pytest.raises(StreamError, match="IterableDatasetShard.*PackedDataset"):
        next(iter(shard))
    accelerate = pytest.importorskip("accelerate")
    for dispatch in (True, None):
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
        )
        loader = accelerator.prepare(DataLoader(PackedStream(packed, rank=0, world_size=1), batch_size=None))
        with pytest.raises(StreamError, match="DataLoaderDispatcher.*PackedDataset"):
            next(iter(loader))


def test_a_stream_dispatched_from_loader_workers_says_what_to_use(packed: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True)
    )
    stream = PackedStream(packed, rank=0, world_size=1)
    loader = accelerator.prepare(
        DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork")
    )
    with pytest.raises(StreamError, match="DataLoaderDispatcher"), workers_ended():
        next(iter(loader))
    # To spawn a worker the stream is pickled, which needs no process to be seen.
    with pytest.raises(StreamError, match="DataLoaderDispatcher"):
        pickled_by(type(loader).__name__, stream)


def pickled_by(name: str, stream: PackedStream) -> PackedStream:
    """A copy of a stream, as an object of a class so named makes it."""
    loader: Any = type(name, (), {"spawned": lambda self: pickle.loads(pickle.dumps(stream))})()
    copied: PackedStream = loader.spawned()
    return copied


@pytest.mark.parametrize("balance", [None, "attention"])
def test_accelerate_gives_each_rank_its_batches_of_the_sampler_and_no_pack_twice(
    packed: Path, balance: str | None
) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    dataset = PackedDataset(packed)
    epochs = []
    for rank in range(3):
        sampler = PackBatchSampler(dataset, world_size=3, packs_per_batch=2, seed=4, balance=balance)
        loader = data_loader.prepare_data_loader(
            DataLoader(dataset, batch_sampler=sampler, collate_fn=collate),
            num_processes=3,
            process_index=rank,
        )
        epochs.append([[numbers(batch) for batch in loader] for _ in range(2)])
    for epoch in range(2):
        options = {"packs_per_batch": 2, "seed": 4, "balance": balance, "epoch": epoch}
        assert [rank[epoch] for rank in epochs] == run_epoch(packed, 3, **options)
    with pytest.raises(StreamError, match="fill no step"):
        PackBatchSampler(dataset, world_size=8, packs_per_batch=3)


def test_balanced_steps_hold_packs_of_like_cost_and_leave_ranks_less_idle(packed: Path) -> None:
    rng = np.random.default_rng(0)
    costs = np.sort(rng.integers(1, 10_000, 1024))[rng.permutation(1024)]
    order = StepOrder(num_packs=1024, group=8, seed=0, shuffle=True, costs=costs)
    steps = list(order.whole_steps(Position(epoch=0)))
    assert sorted(np.concatenate(steps).tolist()) == list(range(1024))
    assert max(np.ptp(costs[step]) for step in steps) < np.ptp(costs) / 4
    # Shuffled: neither the windows nor the steps in them come by cost.
    means = np.array([costs[step].mean() for step in steps])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2
    random, balanced = [
        PackedStream(packed, rank=0, world_size=4, balance=balance).predicted_idle()
        for balance in (None, "attention")
    ]
    assert 0 <= balanced < random / 2


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_state_that_only_loader_workers_know_is_refused(packed: Path, start: str) -> None:
    stream = PackedStream(packed, rank=0, world_size=1)
    before = stream.state_dict()
    if start == "fork":
        iterator = iter(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork"))
        next(iterator)
        del iterator
    else:
        pickled_by("_MultiProcessingDataLoaderIter", stream)
    with pytest.raises(StreamError, match="StatefulDataLoader.*Prefetch"):
        stream.state_dict()
    stream.set_epoch(1)
    assert stream.state_dict() == before | {"epoch": 1}


def test_workers_whose_batches_are_taken_as_they_come_make_each_once(packed: Path) -> None:
    loader = DataLoader(
        PackedStream(packed, rank=0, world_size=1),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
        in_order=False,
    )
    for _ in range(2):
        assert sorted(sum((numbers(batch) for batch in loader), [])) == list(range(PACKS))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_persistent_worker_refuses_a_pass_behind_one_that_was_broken_off(
    packed: Path, workers: int
) -> None:
    stream = PackedStream(packed, rank=0, world_size=1)
    with as_worker(0, workers, stream):
        first, second = [[numbers(batch) for batch in stream] for _ in range(2)]
        assert first == [[number] for number in order_of(PACKS, 0, 0)[::workers]]
        assert second == [[number] for number in order_of(PACKS, 0, 1)[::workers]]
        next(iter(stream))
        with pytest.raises(StreamError, match="broken off.*persistent_workers=True"):
            next(iter(stream))


@pytest.mark.parametrize("opening", [PackedStream, PackedDataset])
@pytest.mark.parametrize("how", ["another token", "shards exchanged", "another data set"])
def test_shards_that_look_right_and_are_not_are_found_where_that_is_asked_for(
    tmp_path: Path, how: str, opening: Any
) -> None:
    """BR-128: right sizes, boundaries and ids, of which checksums alone tell that they are others."""
    packs = [count_up(5, 5, first=10 * number + 1) for number in range(4)]
    write_folder(tmp_path / "packed", Folder(packs=packs))
    opening(tmp_path / "packed", verify=True)
    one, two = sorted((tmp_path / "packed").glob("shard-*"))
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second)
    if how == "another token":
        at = first.index(np.full(5, 1, "<u2").tobytes())
        one.write_bytes(first[:at] + b"\x07" + first[at + 1 :])
    elif how == "shards exchanged":
        one.write_bytes(second)
        two.write_bytes(first)
    else:
        packs = [count_up(5, 5, first=10 * number + 2) for number in range(4)]
        write_folder(tmp_path / "other", Folder(packs=packs))
        one.write_bytes(sorted((tmp_path / "other").glob("shard-*"))[0].read_bytes())
    assert len(PackedReader(tmp_path / "packed")) == 4, "nothing else tells"
    with pytest.raises(ChecksumError, match=f"{one.name}.*rebuild it"):
        opening(tmp_path / "packed", verify=True)
