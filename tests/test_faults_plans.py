"""Faults that users of other packers reported, of the kinds planner, order and overflow-host: none here.

The numbers are those of the collection of faults that the cases were written from.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from building import built, write_lines
from packed import Folder, count_up, write_folder
from toys import packed, word_tokenizer

from padless.packer import write
from padless.packer.plan import PackPlan, check_plan, plan_hash
from padless.packer.strategies import CUTS, STRATEGIES
from padless.packer.write import Layout, cut_shards
from padless.runtime.errors import StreamError
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream

FULL = ("bfd", "ffd", "optimal", "spread", "ordered", "wrapped")


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [plan.order[a:b].tolist() for a, b in itertools.pairwise(plan.offsets)]


def tokenizer_of(folder: Path, size: int) -> Path:
    """A tokenizer with so many ids."""
    return word_tokenizer(folder, words=tuple(f"x{number}" for number in range(100, size)))


def test_ids_above_16_bits_are_read_back_as_they_were(tmp_path: Path) -> None:
    """BR-103."""
    rows = [{"input_ids": [65534, 65535, 65536, 69999]}]
    ((ids, _),) = packed(tmp_path, rows, tokenizer_of(tmp_path / "tokenizer", 70_000))
    assert ids == rows[0]["input_ids"]


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537])
def test_a_vocabulary_around_65536_keeps_its_largest_id(tmp_path: Path, size: int) -> None:
    """BR-104."""
    tokenizer = tokenizer_of(tmp_path / "tokenizer", size)
    ((ids, _),) = packed(tmp_path, [{"input_ids": [10, size - 1]}], tokenizer)
    assert ids == [10, size - 1]
    (column,) = (c for c in PackedReader(tmp_path / "packed").manifest.columns if c.name == "input_ids")
    assert column.type == ("list<uint16>" if size <= 65_536 else "list<int32>")


def test_no_record_batch_has_more_tokens_than_32_bits_can_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-105: batches are cut, and read one by one; nothing joins them."""
    assert 2 * write.BATCH_BYTES < 2**31
    monkeypatch.setattr(write, "BATCH_BYTES", 400)
    rows = [{"input_ids": [10 + number % 80] * 50} for number in range(40)]
    found = packed(tmp_path, rows, word_tokenizer(tmp_path / "tokenizer"))
    assert [ids for ids, _ in found] == [row["input_ids"] for row in rows]
    shards = PackedReader(tmp_path / "packed").manifest.shards
    sizes = [packs for shard in shards for _, packs in shard.batches]
    assert len(sizes) == 10 and sum(sizes) == len(PackedReader(tmp_path / "packed"))


def test_two_billion_bytes_of_tokens_are_cut_where_they_should() -> None:
    """BR-106."""
    lengths = np.full(600_000, 1000, np.int32)
    plan = STRATEGIES["none"](lengths, 1000)
    layout = Layout(id_type="int32", labels=False, compression=None, shard_bytes=2**40)
    (batches,) = cut_shards(plan, lengths, layout)
    assert batches[0][0] == 0 and batches[-1][1] == 600_000
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(batches))
    assert len({stop - start for start, stop in batches[:-1]}) == 1
    assert int(layout.pack_bytes(lengths, np.ones(600_000, np.int64)).sum()) > 600_000 * 4000


@pytest.mark.parametrize("name", ["bfd", "ffd", "ordered", "wrapped"])
def test_three_billion_tokens_give_no_negative_number(name: str) -> None:
    """BR-107."""
    lengths = np.full(3_000_000, 1000, np.int32)
    plan = STRATEGIES[name](lengths, 4096)
    check_plan(plan, lengths, 4096)
    assert len(plan) == (-(-3_000_000_000 // 4096) if name in CUTS else 750_000)


def test_a_seed_changes_who_shares_a_pack_and_not_just_the_order_of_packs() -> None:
    """BR-144."""
    first, other = (packs_of(STRATEGIES["spread"]([3] * 8, 7, seed=seed)) for seed in (0, 1))
    assert {frozenset(pack) for pack in first} != {frozenset(pack) for pack in other}
    same, too = (packs_of(STRATEGIES["ordered"]([3] * 8, 7, seed=seed)) for seed in (0, 1))
    assert same == too


def test_an_intended_order_is_kept() -> None:
    """BR-145."""
    assert packs_of(STRATEGIES["ordered"]([5, 1, 4, 2, 3], 6)) == [[0, 1], [2, 3], [4]]


def test_another_epoch_can_have_other_neighbours() -> None:
    """BR-146."""
    lengths = np.random.default_rng(0).integers(1, 60, 100)
    plans = [STRATEGIES["spread"](lengths, 128, seed=seed) for seed in (0, 1, 1)]
    for plan in plans:
        check_plan(plan, lengths, 128)
    hashes = [plan_hash(plan, lengths, 128) for plan in plans]
    assert hashes[0] != hashes[1] == hashes[2]


@pytest.mark.parametrize("strategy", ["bfd", "spread"])
def test_packs_depend_on_no_number_of_devices(tmp_path: Path, strategy: str) -> None:
    """BR-147: only who gets which pack does."""
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "rows.jsonl", [{"input_ids": [11] * (3 + n * 7 % 20)} for n in range(90)])
    options = ("--tokenizer", tokenizer, "--max-length", 48, "--strategy", strategy)
    hashes = set()
    for run in range(3):
        built(source, tmp_path / f"{run}", *options)
        reader = PackedReader(tmp_path / f"{run}")
        hashes.add(reader.manifest.plan_hash)
        for world_size in (2, 8):
            seen = [
                batch["sequence_ids"].tolist()
                for rank in range(world_size)
                for batch in PackedStream(reader.path, rank=rank, world_size=world_size, remainder="pad")
                if batch["num_targets"]
            ]
            assert sorted(seen) == sorted(pack.sequence_ids.tolist() for pack in reader)
    assert len(hashes) == 1


def test_packs_that_fill_no_batch_are_told_and_counted_nowhere(tmp_path: Path) -> None:
    """BR-149."""
    for packs in (3, 10):
        write_folder(tmp_path / f"{packs}", Folder(packs=[count_up(2, first=n) for n in range(packs)]))
    with pytest.raises(StreamError, match="has 3 packs, a step of 1 ranks takes 5: no batch is full"):
        PackedStream(tmp_path / "3", rank=0, world_size=1, packs_per_batch=5)
    stream = PackedStream(tmp_path / "10", rank=0, world_size=1, packs_per_batch=5)
    batches = list(stream)
    assert len(batches) == len(stream) == 2
    assert sorted(n for batch in batches for n in batch["sequence_ids"].tolist()) == list(range(10))


@pytest.mark.parametrize("name", FULL)
def test_one_short_pack_at_most_for_rows_of_one_length(name: str) -> None:
    """BR-150: no remainder a worker, since a plan is made once for all."""
    lengths = np.full(8008, 10)
    plan = STRATEGIES[name](lengths, 100)
    check_plan(plan, lengths, 100)
    sizes = np.diff(plan.offsets)
    assert (len(plan), int((sizes < 10).sum())) == (801, 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_data_smaller_than_a_pack_are_one_pack(name: str) -> None:
    """BR-151."""
    assert packs_of(STRATEGIES[name]([3], 2048)) == [[0]]


@pytest.mark.parametrize("name", ["bfd", "ffd", "spread", "optimal", "wrapped"])
def test_a_million_lengths_are_packed_within_a_hundredth_of_their_tokens(name: str) -> None:
    """BR-152."""
    drawn = np.random.default_rng(0).lognormal(np.log(350) - 0.5, 1, 1_000_000)
    lengths = np.clip(drawn, 1, 4096).astype(np.int32)
    plan = STRATEGIES[name](lengths, 4096)
    check_plan(plan, lengths, 4096)
    assert len(plan) <= 1.01 * -(-int(lengths.sum(dtype=np.int64)) // 4096)
