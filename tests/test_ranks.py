"""Two processes with torch.distributed, on real data: as many steps on both, and every pack once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from building import built
from conftest import find_shared, shared_is_required
from packed import Folder, count_up, write_folder, write_numbered
from ranks import run_two, train_every_way_rank

from padless.runtime.reader import PackedReader

PACKS_A_STEP = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Path]:
    """23 tiny packs, and packs of alpaca records where the real data are there."""
    path = tmp_path_factory.mktemp("ranks")
    write_numbered(path / "tiny", 23, packs_per_shard=6, packs_per_batch=3)
    if find_shared() is None and not shared_is_required():
        return [path / "tiny"]
    shared = request.getfixturevalue("shared")
    data = shared / "data" / "alpaca" / "alpaca_cleaned_first5000.json"
    options = ("--tokenizer", shared / "tokenizers" / "gpt2", "--max-length", 640, "--limit", 290)
    built(data, path / "real", *options)
    return [path / "tiny", path / "real"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand shards of a pack each, the first of which is none."""
    path = tmp_path_factory.mktemp("many") / "packed"
    write_folder(path, Folder(packs=[count_up(1 + n % 5, first=n) for n in range(1000)], packs_per_shard=1))
    first = PackedReader(path).manifest.shards[0]
    (path / first.file).write_bytes(bytes(first.bytes))
    return path


@pytest.fixture(scope="module")
def found(
    folders: list[Path], many: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Any]]:
    """What each way of training gave on the two ranks."""
    out = tmp_path_factory.mktemp("out")
    ranks = run_two(lambda rank, port: (train_every_way_rank, (folders, many, out, rank, port)))
    return {way: (ranks[0][way], ranks[1][way]) for way in ranks[0]}


def of_both(found: dict[str, tuple[Any, Any]], way: str) -> tuple[Any, Any]:
    """What a way gave on both ranks, unless it failed there."""
    for told in found[way]:
        if isinstance(told, str):
            pytest.fail(told)
    return found[way]


def check_epoch(path: Path, mine: list[list[int]], theirs: list[list[int]], left_out: int) -> None:
    """As many batches on both ranks, and together all sequences of all packs but so many, once."""
    reader = PackedReader(path)
    packs = [reader[number].sequence_ids.tolist() for number in range(len(reader))]
    pack_of = {sequence: number for number, ids in enumerate(packs) for sequence in ids}
    assert len(mine) == len(theirs)
    seen = [sequence for batch in (*mine, *theirs) for sequence in batch]
    whole = {pack_of[sequence] for sequence in seen}
    assert sorted(seen) == sorted(sequence for number in whole for sequence in packs[number])
    assert len(whole) == len(packs) - left_out


def test_a_rank_opens_a_thousand_shards_whatever_the_other_one_does(
    many: Path, found: dict[str, tuple[Any, Any]]
) -> None:
    """BR-135: without a word to the other, and without a look into a shard that it does not read."""
    mine, theirs = of_both(found, "one after another")
    assert theirs == (500, [1])
    steps, error = mine
    assert steps == 500
    assert PackedReader(many).manifest.shards[0].file in str(error)


def test_a_loop_ends_in_as_many_steps_on_both_ranks(
    folders: list[Path], found: dict[str, tuple[Any, Any]]
) -> None:
    """BR-026, BR-133, BR-134, BR-137: and both divide by the targets of both."""
    for path, mine, theirs in zip(folders, *of_both(found, "loop"), strict=True):
        left_out = [len(PackedReader(path)) % PACKS_A_STEP, 0] * 3
        for (one, targets), (other, others), left in zip(mine, theirs, left_out, strict=True):
            check_epoch(path, one, other, left)
            for (own, both), (their, both_too) in zip(targets, others, strict=True):
                assert both == both_too == max(1, own + their), "both ranks divide by the same targets"


def test_trainer_deals_each_pack_to_one_rank(folders: list[Path], found: dict[str, tuple[Any, Any]]) -> None:
    """BR-137: what fills no step is left out."""
    mine, theirs = of_both(found, "trainer")
    check_epoch(folders[-1], mine, theirs, len(PackedReader(folders[-1])) % PACKS_A_STEP)


@pytest.mark.parametrize("way", ["accelerate", "lightning"])
def test_two_epochs_hold_every_pack_once_each_in_orders_of_their_own(
    folders: list[Path], found: dict[str, tuple[Any, Any]], way: str
) -> None:
    """BR-137: under Lightning a stream is left as it is, and its rank is torch.distributed's."""
    mine, theirs = of_both(found, way)
    if mine is None:
        pytest.skip(f"{way} is not installed")
    assert len(mine) == len(theirs) == 2
    for one, other in zip(mine, theirs, strict=True):
        check_epoch(folders[-1], one, other, len(PackedReader(folders[-1])) % PACKS_A_STEP)
    assert mine[0] != mine[1]


@pytest.mark.shared
def test_the_last_folder_is_of_real_data(shared: Path, folders: list[Path]) -> None:
    reader = PackedReader(folders[-1])
    assert len(reader) > 2 * PACKS_A_STEP and len(reader) % PACKS_A_STEP
    assert max(len(reader[number].seq_lengths) for number in range(len(reader))) > 3
