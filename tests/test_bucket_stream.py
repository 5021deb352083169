"""A stream over packs of several lengths: a step is of one length, and as many tokens as every other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from building import DEMO, built
from hypothesis import given, settings
from hypothesis import strategies as st

from padless.runtime.errors import StateError, StreamError
from padless.runtime.reader import PackedReader

stream = pytest.importorskip("padless.runtime.stream")

TOKENS = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "packed"
    built(DEMO, path, "--max-length", "256,512,1024", "--packs-multiple", 8)
    return path


def opened(path: Path, rank: int = 0, world_size: int = 1, tokens: int = TOKENS, **options: Any) -> Any:
    return stream.PackedStream(path, tokens_per_batch=tokens, rank=rank, world_size=world_size, **options)


def packs_in(reader: PackedReader, batch: Any) -> list[int]:
    """The numbers of the packs that a batch holds, by their sequences."""
    where = {int(n): number for number in range(len(reader)) for n in reader[number].sequence_ids}
    found = [where[int(n)] for n in batch["sequence_ids"].tolist() if n >= 0]
    return [*dict.fromkeys(found)]


def length_of(reader: PackedReader, pack: int) -> int:
    for bucket in reader.buckets:
        if pack < bucket.packs:
            return bucket.max_length
        pack -= bucket.packs
    raise AssertionError


def steps_of(path: Path, world_size: int, **options: Any) -> tuple[list[list[list[int]]], list[Any]]:
    """For each step the packs of each rank; and the streams, which stand at the epoch's end."""
    streams = [opened(path, rank, world_size, **options) for rank in range(world_size)]
    reader = streams[0].reader
    ranks = [[packs_in(reader, batch) for batch in one] for one in streams]
    assert len({len(batches) for batches in ranks}) == 1
    return [list(step) for step in zip(*ranks, strict=True)], streams


@pytest.mark.parametrize("options", [{}, {"balance": "attention"}, {"shuffle": False}])
def test_a_step_has_packs_of_one_length_with_the_same_room_on_every_rank(
    folder: Path, options: dict[str, Any]
) -> None:
    steps, streams = steps_of(folder, 2, **options)
    reader = PackedReader(folder)
    seen: Counter[int] = Counter()
    kinds = []
    for step in steps:
        lengths = {length_of(reader, pack) for rank in step for pack in rank}
        assert len(lengths) == 1
        kinds.append(lengths.pop())
        assert all(len(rank) == TOKENS // kinds[-1] for rank in step)
        seen.update(pack for rank in step for pack in rank)
    assert set(seen.values()) == {1} and len(seen) == len(reader)  # of each length a multiple of 8
    assert len(streams[0]) == len(steps)
    first_half = Counter(kinds[: len(kinds) // 2])
    assert len(first_half) > 1 and first_half[256] < kinds.count(256)  # mixed, not length by length


def test_every_pack_is_there_once_where_the_remainder_is_padded(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--max-length", "300,900")
    steps, _ = steps_of(tmp_path / "out", 3, tokens=1800, remainder="pad")
    packs = [pack for step in steps for rank in step for pack in rank]
    assert sorted(packs) == list(range(len(PackedReader(tmp_path / "out"))))


@settings(max_examples=8, deadline=None)
@given(
    before=st.tuples(st.integers(1, 3), st.sampled_from([1024, 2048])),
    after=st.tuples(st.integers(1, 3), st.sampled_from([1024, 3072])),
    taken=st.integers(0, 12),
    balance=st.sampled_from([None, "attention"]),
)
def test_a_state_goes_on_under_other_ranks_and_tokens_without_a_loss_or_a_repeat(
    folder: Path, before: tuple[int, int], after: tuple[int, int], taken: int, balance: str | None
) -> None:
    reader = PackedReader(folder)
    seen: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(before[0]):
        one = opened(folder, rank, before[0], before[1], remainder="pad", balance=balance)
        batches = iter(one)
        for _ in range(min(taken, len(one) - 1)):
            seen += packs_in(reader, next(batches))
        state = one.state_dict()
    for rank in range(after[0]):
        other = opened(folder, rank, after[0], after[1], remainder="pad", balance=balance)
        other.load_state_dict(state)
        assert other.state_dict()["epoch"] == 0
        for batch in other:
            seen += packs_in(reader, batch)
        assert other.epoch == 1
    assert sorted(seen) == list(range(len(reader)))


def test_a_state_goes_on_with_the_very_batches_that_were_to_come(folder: Path) -> None:
    whole = [batch["input_ids"].tolist() for batch in opened(folder)]
    for taken in (1, 5, len(whole)):
        one = opened(folder)
        batches = iter(one)
        for _ in range(taken):
            next(batches)
        other = opened(folder)
        other.load_state_dict(one.state_dict())
        assert [batch["input_ids"].tolist() for batch in other] == whole[taken:] or taken == len(whole)
        assert other.epoch == 1 or taken == len(whole)
    assert other.state_dict()["epoch"] == 2


def test_epochs_are_of_different_orders_and_every_seed_has_its_own(folder: Path) -> None:
    one = opened(folder)
    first, second = ([batch["input_ids"].tolist() for batch in one] for _ in range(2))
    assert first != second and one.epoch == 2
    assert first != [batch["input_ids"].tolist() for batch in opened(folder, seed=1)]


def test_a_fresh_plan_each_epoch_keeps_the_lengths(folder: Path) -> None:
    one = opened(folder, replan="spread", remainder="pad")
    neighbours = []
    for _ in range(2):
        lengths = [bucket.max_length for bucket in one.reader.buckets]
        assert lengths == [256, 512, 1024]
        ids = [batch["sequence_ids"].tolist() for batch in one]
        assert sorted(n for batch in ids for n in batch) == list(range(400))
        neighbours.append({frozenset(batch) for batch in ids})
    assert neighbours[0] != neighbours[1]


def test_a_folder_of_one_length_counts_tokens_as_packs(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--max-length", 512, "--overflow", "drop", "--max-drop-share", 1)
    ours = opened(tmp_path / "out", tokens=1100, world_size=2)
    theirs = stream.PackedStream(tmp_path / "out", packs_per_batch=2, rank=0, world_size=2)
    for one, other in zip(ours, theirs, strict=True):
        assert one["input_ids"].equal(other["input_ids"])
    assert ours.state_dict() == theirs.state_dict()


def test_the_sampler_deals_steps_of_one_length_to_ranks(folder: Path) -> None:
    from padless.runtime.dataset import PackBatchSampler, PackedDataset

    dataset = PackedDataset(folder)
    sampler = PackBatchSampler(dataset, world_size=2, tokens_per_batch=TOKENS)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    for one, other in zip(batches[::2], batches[1::2], strict=True):
        assert len({length_of(dataset.reader, pack) for pack in (*one, *other)}) == 1


def test_ranks_of_one_length_idle_less_than_ranks_of_any(folder: Path) -> None:
    mixed = stream.PackedStream(folder, rank=0, world_size=4).predicted_idle()
    assert opened(folder, world_size=4).predicted_idle() < mixed


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    for words, said in (
        ({"tokens": 512}, "packs hold up to 1,024"),
        ({"packs_per_batch": 2}, "give one of them"),
        ({"shuffle": "shards"}, "tokens_per_batch takes packs of one length"),
        ({"world_size": 512}, "would never be seen"),
    ):
        with pytest.raises(StreamError, match=said):
            opened(folder, **words)
    assert len(opened(folder, world_size=512, remainder="pad")) == 3
    mine = opened(folder)
    next(iter(mine))
    plain = stream.PackedStream(folder, rank=0, world_size=1)
    with pytest.raises(StateError, match="with tokens_per_batch"):
        plain.load_state_dict(mine.state_dict())
    next(iter(plain))
    with pytest.raises(StateError, match="without tokens_per_batch"):
        opened(folder).load_state_dict(plain.state_dict())
    state = mine.state_dict()
    state["buckets"][0]["taken"] = 10**6
    with pytest.raises(StateError, match="^the state is damaged: epoch 0, 1000000 of"):
        opened(folder).load_state_dict(state)
    state = mine.state_dict()
    del state["buckets"][0]
    with pytest.raises(StateError, match="damaged .*2 lengths, of which there are 3"):
        opened(folder).load_state_dict(state)
    opened(folder).load_state_dict(stream.PackedStream(folder, rank=0, world_size=1).state_dict())
