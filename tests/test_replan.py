"""A fresh plan for each epoch at run time: other neighbours, every sequence once, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from building import DEMO, built, write_lines

from padless.runtime.errors import PlanError, StateError, StreamError
from padless.runtime.stream import PackedStream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replan") / "packed"
    built(DEMO, path)
    return path


def stream(folder: Path, **options: Any) -> PackedStream:
    return PackedStream(folder, **{"rank": 0, "world_size": 1, "replan": "spread", **options})


def neighbours(batches: Any) -> list[tuple[int, ...]]:
    """Who shares a batch of one pack."""
    return [tuple(batch["sequence_ids"].tolist()) for batch in batches]


def test_an_epoch_has_every_sequence_once_beside_others_than_the_epoch_before(folder: Path) -> None:
    """BR-146, at run time."""
    replanned = stream(folder)
    epochs = [neighbours(replanned) for _ in range(3)]
    everyone = sorted(n for pack in neighbours(PackedStream(folder, rank=0, world_size=1)) for n in pack)
    for packs in epochs:
        assert sorted(number for pack in packs for number in pack) == everyone
    together = [{frozenset(pack) for pack in packs} for packs in epochs]
    assert len(together[0] & together[1]) < 0.1 * len(together[0])
    again = stream(folder, epoch=2)
    assert neighbours(again) == epochs[2]
    assert neighbours(stream(folder, seed=1)) != epochs[0]


def test_tokens_of_a_fresh_plan_are_the_sequences_own(folder: Path) -> None:
    def tokens(batches: Any) -> dict[int, list[int]]:
        found = {}
        for batch in batches:
            ends = batch["cu_seq_lens_q"].tolist()
            for number, start, end in zip(batch["sequence_ids"].tolist(), ends[:-1], ends[1:], strict=True):
                found[number] = batch["input_ids"][0, start:end].tolist()
        return found

    assert tokens(stream(folder, epoch=5)) == tokens(PackedStream(folder, rank=0, world_size=1))


def test_ranks_share_one_plan(folder: Path) -> None:
    whole = neighbours(stream(folder, epoch=1))
    ranks = [neighbours(stream(folder, epoch=1, rank=rank, world_size=2)) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == len(whole) // 2
    assert [pack for step in zip(*ranks, strict=True) for pack in step] == whole[: len(whole) // 2 * 2]


@pytest.mark.parametrize("balance", [None, "attention"])
def test_a_state_goes_on_in_the_plan_of_its_epoch(folder: Path, balance: str | None) -> None:
    first = stream(folder, balance=balance)
    list(first)
    expected = neighbours(stream(folder, epoch=1, balance=balance))
    batches = iter(first)
    taken = [next(batches) for _ in range(4)]
    other = stream(folder, balance=balance)
    other.load_state_dict(first.state_dict())
    assert neighbours(taken) + neighbours(other) == expected


def test_a_state_of_a_stream_that_replans_otherwise_is_refused_and_changes_nothing(folder: Path) -> None:
    replanned = stream(folder)
    expected = neighbours(stream(folder))
    for other in (PackedStream(folder, rank=0, world_size=1, epoch=3), stream(folder, replan="bfd", epoch=3)):
        with pytest.raises(StateError, match="another folder, plan or split"):
            replanned.load_state_dict(other.state_dict())
    assert replanned.epoch == 0 and neighbours(replanned) == expected


def test_wrong_use_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="replan is 'best'; it is None or one of bfd, "):
        stream(folder, replan="best")
    with pytest.raises(PlanError, match="replan is 'wrapped'"):
        stream(folder, replan="wrapped")
    with pytest.raises(StreamError, match="give one"):
        stream(folder, plan="long")
    with pytest.raises(StreamError, match="seed is -1"):
        stream(folder, seed=-1)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}] * 3, "pairs of this folder"),
        (
            [
                {"prompt_ids": [9], "response_ids": [7, 6], "old_logprobs": [-1.0, -2.0], "group_id": n // 3}
                for n in range(6)
            ],
            "groups of rollouts of this folder",
        ),
    ],
)
def test_what_shares_packs_is_never_parted(rows: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    built(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "packed")
    with pytest.raises(PlanError, match=said):
        stream(tmp_path / "packed")
