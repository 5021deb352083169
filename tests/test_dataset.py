"""Batches of pack numbers for loaders that split them over ranks: what a state of theirs goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import write_numbered
from ranks import numbers
from reference_order import balanced_order_of, order_of
from test_bucket_stream import folder as lengths  # noqa: F401
from torch.utils.data import DataLoader

from padless.runtime.collate import collate
from padless.runtime.dataset import PackBatchSampler, PackedDataset
from padless.runtime.errors import StateError, StreamError
from padless.runtime.stream import PackedStream

PACKS = 23


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return PackedDataset(
        write_numbered(
            tmp_path_factory.mktemp("dataset") / "packed", PACKS, packs_per_shard=6, packs_per_batch=3
        )
    )


def take(batches: Iterator[list[int]], most: int) -> list[list[int]]:
    return [batch for _, batch in zip(range(most), batches, strict=False)]


@settings(max_examples=60)
@given(
    world_size=st.sampled_from([1, 2, 3]),
    packs_per_batch=st.integers(1, 3),
    balance=st.sampled_from([None, "attention"]),
    seed=st.integers(0, 99),
    stops=st.lists(st.integers(0, 12), max_size=4),
)
def test_a_sampler_goes_on_behind_any_batch_as_if_it_had_not_stopped(
    dataset: PackedDataset,
    world_size: int,
    packs_per_batch: int,
    balance: str | None,
    seed: int,
    stops: list[int],
) -> None:
    group = world_size * packs_per_batch
    costs = [24_576 * length + length**2 for length in (1 + number % 7 for number in range(PACKS))]
    expected = []
    for epoch in range(8):
        order = balanced_order_of(costs, group, seed, epoch) if balance else order_of(PACKS, seed, epoch)
        for start in range(0, PACKS - group + 1, group):
            step = order[start : start + group]
            expected += [step[rank::world_size] for rank in range(world_size)]
    options = {"world_size": world_size, "packs_per_batch": packs_per_batch, "balance": balance, "seed": seed}
    state = PackBatchSampler(dataset, **options).state_dict()
    got: list[list[int]] = []
    for stop in stops:
        sampler = PackBatchSampler(dataset, **options)
        sampler.load_state_dict(json.loads(json.dumps(state)))
        got += take(iter(sampler), stop)
        state = sampler.state_dict()
    sampler = PackBatchSampler(dataset, **options)
    sampler.load_state_dict(state)
    got += [batch for _ in range(2) for batch in sampler]
    assert got == expected[: len(got)]
    assert sampler.epoch >= 2 and len(got) % len(sampler) == 0


def test_behind_whole_steps_ranks_and_packs_a_batch_may_change(dataset: PackedDataset) -> None:
    sampler = PackBatchSampler(dataset, world_size=2, packs_per_batch=2)
    order = order_of(PACKS, 0, 0)
    taken = take(iter(sampler), 4)
    assert sorted(sum(taken, [])) == sorted(order[:8])
    other = PackBatchSampler(dataset, world_size=3)
    other.load_state_dict(sampler.state_dict())
    assert sum(other, []) == order[8:]
    stream = PackedStream(dataset.path, rank=0, world_size=1)
    stream.load_state_dict(sampler.state_dict())
    assert [numbers(batch) for batch in stream] == [[number] for number in order[8:]]
    other.load_state_dict(PackedStream(dataset.path, rank=0, world_size=1, epoch=2).state_dict())
    assert other.epoch == 2


def test_a_pass_that_was_broken_off_begins_anew(dataset: PackedDataset) -> None:
    sampler = PackBatchSampler(dataset, world_size=2, packs_per_batch=2)
    whole = list(sampler)
    sampler.set_epoch(0)
    assert take(iter(sampler), 3) == whole[:3]
    assert sampler.state_dict()["taken"] == 4
    assert list(sampler) == whole
    assert sampler.epoch == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=1"),
        ({"data": "xxh3:0"}, "another folder"),
        ({"steps": {}}, "behind the batches of 1 ranks in a step of {}"),
        ({"ranks_served": 2}, "of 2 ranks"),
        ({"ranks_served": "x"}, "of x ranks"),
        ({"taken": PACKS + 1}, "damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    dataset: PackedDataset, change: dict[str, Any], message: str
) -> None:
    sampler = PackBatchSampler(dataset, world_size=2)
    next(iter(sampler))
    state = sampler.state_dict()
    with pytest.raises(StateError, match=message):
        sampler.load_state_dict(state | change)
    assert sampler.state_dict() == state
    with pytest.raises(StateError, match="within a step"):
        PackedStream(dataset.path, rank=0, world_size=1).load_state_dict(state)
    with pytest.raises(StateError, match="'_num_yielded': it is none of a PackedStream or PackBatchSampler"):
        sampler.load_state_dict({"_num_yielded": 1})
    with pytest.raises(StateError, match="is a NoneType"):
        sampler.load_state_dict(None)  # type: ignore[arg-type]


def test_a_sampler_of_several_lengths_goes_on_too(lengths: Path) -> None:  # noqa: F811
    dataset = PackedDataset(lengths)
    options = {"world_size": 2, "tokens_per_batch": 1024, "seed": 3}
    whole = list(PackBatchSampler(dataset, **options))
    for stop in (1, 4, 7, len(whole)):
        sampler = PackBatchSampler(dataset, **options)
        head = take(iter(sampler), stop)
        resumed = PackBatchSampler(dataset, **options)
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        assert head + (list(resumed) if resumed.epoch == 0 else []) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_in_the_epoch_in_which_it_stopped(
    dataset: PackedDataset, workers: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def opened() -> Any:
        return stateful.StatefulDataLoader(
            dataset,
            batch_sampler=PackBatchSampler(dataset, world_size=1, packs_per_batch=2, seed=4),
            collate_fn=collate,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            snapshot_every_n_steps=2,
        )

    loader = opened()
    epochs = [[numbers(batch) for batch in loader] for _ in range(3)]
    assert sorted(sum(epochs[0], [])) != sorted(sum(epochs[1], [])) and len(epochs[0]) == 11
    loader = opened()
    assert [numbers(batch) for batch in loader] == epochs[0]
    iterator = iter(loader)
    head = [numbers(next(iterator)) for _ in range(5)]
    resumed = opened()
    resumed.load_state_dict(loader.state_dict())
    assert head + [numbers(batch) for batch in resumed] == epochs[1]
    assert [numbers(batch) for batch in resumed] == epochs[2]
    finished = opened()
    assert [numbers(batch) for batch in finished] == epochs[0]
    resumed = opened()
    resumed.load_state_dict(finished.state_dict())
    assert [numbers(batch) for batch in resumed] == epochs[1]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_of_accelerate_leaves_a_sampler_in_its_epoch(
    dataset: PackedDataset, world_size: int, stateful: bool
) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    if stateful:
        pytest.importorskip("torchdata.stateful_dataloader")

    def opened() -> tuple[PackBatchSampler, Any]:
        sampler = PackBatchSampler(dataset, world_size=world_size, packs_per_batch=2, seed=4)
        return sampler, data_loader.prepare_data_loader(
            DataLoader(dataset, batch_sampler=sampler, collate_fn=collate),
            num_processes=world_size,
            process_index=0,
            use_stateful_dataloader=stateful,
        )

    def ran(loader: Any) -> list[list[int]]:
        return [numbers(batch) for batch in loader]

    _, loader = opened()
    epochs = [ran(loader) for _ in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    sampler, loader = opened()
    sampler.set_epoch(2)
    assert [ran(data_loader.skip_first_batches(loader, 3)), ran(loader)] == [epochs[2][3:], epochs[3]]
    saved = PackBatchSampler(dataset, world_size=world_size, packs_per_batch=2, seed=4)
    saved.set_epoch(2)
    take(iter(saved), 3 * world_size)
    sampler, loader = opened()
    sampler.load_state_dict(saved.state_dict())
    assert [ran(loader), ran(loader)] == [epochs[2][3:], epochs[3]]
    if world_size == 1:
        loader.set_epoch(1)
        assert ran(loader) == epochs[1]


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", 2**64])
def test_an_epoch_that_is_none_is_refused(dataset: PackedDataset, epoch: Any) -> None:
    with pytest.raises(StreamError, match="epoch is"):
        PackBatchSampler(dataset, world_size=1).set_epoch(epoch)
