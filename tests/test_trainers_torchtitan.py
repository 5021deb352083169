"""torchtitan's own data loader class, configuration and Llama on packs, through our loader for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="run by scripts/test-trainers torchtitan")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from building import MAX_LENGTH, built  # noqa: E402
from datasets import load_from_disk  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.models.llama3 import llama3_configs  # noqa: E402
from trainer_proofs import (  # noqa: E402
    TEETH,
    TOLERANCE,
    Given,
    assert_same_loss,
    exported,
    packs_of_demo,
    shown,
)

from padless.runtime.reader import PackedReader  # noqa: E402
from padless.runtime.trainers.torchtitan import PacksDataLoader  # noqa: E402

BATCH = 2


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_of_demo(tmp_path_factory.mktemp("torchtitan"), "--max-length", 800)


def loader(packed: Path | str, *, rank: int = 0, ranks: int = 1, seq_len: int = 800, **settings: Any) -> Any:
    """Made of its configuration, as torchtitan's trainer does."""
    config = PacksDataLoader.Config(dataset_path=str(packed), **settings)
    assert isinstance(config, BaseDataLoader.Config)
    return config.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,
        seq_len=seq_len,
        local_batch_size=BATCH,
        snapshot_every_n_steps=1,
    )


def given(batch: Any) -> list[Given]:
    inputs, labels = batch
    return [
        Given(input_ids=ids, next_labels=wanted, position_ids=positions)
        for ids, wanted, positions in zip(inputs["input"], labels, inputs["positions"], strict=True)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_together_train_what_was_packed(packed: Path, workers: int) -> None:
    rows = []
    for rank in range(2):
        for batch in loader(
            packed, rank=rank, ranks=2, seq_len=MAX_LENGTH, infinite=False, num_workers=workers
        ):
            assert batch[1].shape == (len(batch[1]), MAX_LENGTH)
            rows += given(batch)
    assert len(rows) >= len(PackedReader(packed))
    assert_same_loss(
        "torchtitan", "`padless.runtime.trainers.torchtitan`, its data loader, two ranks", packed, rows
    )


def test_rows_of_the_export_are_those_of_the_loader(packed: Path) -> None:
    """All but the token that rows are filled up with, which is trained nowhere."""
    rows = load_from_disk(str(exported(packed, "torchtitan"))).with_format("torch")
    found = [row for batch in loader(packed, infinite=False) for row in given(batch)]
    assert len(found) == len(rows)
    for row, want in zip(found, rows, strict=True):
        used = want["segment_ids"] > 0
        assert torch.equal(row.input_ids[used], want["input_ids"][used])
        assert torch.equal(row.next_labels, want["labels"])
        assert torch.equal(row.position_ids, want["positions"])


def test_its_checkpoints_go_on_with_the_next_batch(packed: Path) -> None:
    steps = len(PackedReader(packed)) // BATCH + 3  # into the second epoch
    whole = iter(loader(packed))
    want = [next(whole)[1] for _ in range(steps)]
    for stop in (1, steps - 2):
        first = loader(packed)
        seen = iter(first)
        for _ in range(stop):
            next(seen)
        again = loader(packed)
        again.load_state_dict(first.state_dict())
        goes_on = iter(again)
        for step in range(stop, steps):
            assert torch.equal(next(goes_on)[1], want[step]), step


def test_its_llama_has_the_loss_of_single_sequences(packed: Path) -> None:
    """Its smallest model, its masks and its loss; FlexAttention is what runs on a CPU."""
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    model = config.build()
    model.init_states()
    with torch.no_grad():
        for layer in model.layers.values():
            for weights in layer.attention.parameters():
                weights.mul_(4)  # so large that a mixed-up sequence shows

    def loss(ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> float:
        with torch.no_grad():
            masks = model.get_attention_masks(positions=positions)
            return float(cross_entropy_loss(model(ids, positions, masks), labels))

    (inputs, labels), alone = next(iter(loader(packed, infinite=False))), 0.0
    ids, positions = inputs["input"], inputs["positions"]
    packs = loss(ids, positions, labels)
    mixed = loss(ids, torch.arange(ids.shape[1]).expand_as(ids), labels)
    singles = list(_rows_of_one_sequence(packed, ids.shape[1]))
    for one in singles:
        alone += loss(*one)
    apart, far = (abs(some - alone) / int((labels != -100).sum()) for some in (packs, mixed))
    assert far > TEETH and apart <= TOLERANCE, (far, apart)
    how = "`padless.runtime.trainers.torchtitan`, its Llama under FlexAttention"
    shown("torchtitan", how, sequences=len(singles), apart=apart, mixed=far)


def _rows_of_one_sequence(packed: Path, width: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Ids, positions and next labels [1, width] of each sequence of the first batch, alone in its row."""
    for pack in list(PackedReader(packed))[:BATCH]:
        ends = np.cumsum(pack.seq_lengths)
        for start, end in zip(ends - pack.seq_lengths, ends, strict=True):
            ids = torch.zeros(width, dtype=torch.int64)
            labels = torch.full((width,), -100)
            ids[: end - start] = torch.from_numpy(pack.input_ids[start:end].astype(np.int64))
            labels[: end - start - 1] = torch.from_numpy(pack.labels[start + 1 : end].astype(np.int64))
            yield ids[None], torch.arange(width)[None], labels[None]


def test_packs_longer_than_a_row_are_refused(packed: Path) -> None:
    with pytest.raises(ValueError, match="seq_len is 512.*up to 800 tokens"):
        loader(packed, seq_len=512)
    with pytest.raises(ValueError, match="dataset_path"):
        loader("")


def test_more_workers_than_packs_are_refused_where_one_would_wait_for_ever(packed: Path) -> None:
    most = len(PackedReader(packed)) // 2
    with pytest.raises(ValueError, match=f"num_workers is {most + 1}.* to {most} at most"):
        loader(packed, ranks=2, num_workers=most + 1)
    assert loader(packed, ranks=2, num_workers=most).num_workers == most
    rows = [row for batch in loader(packed, infinite=False, num_workers=2 * most + 2) for row in given(batch)]
    assert len(rows) == len(PackedReader(packed))


def test_folders_with_further_columns_are_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "weight": 0.5}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    built(tmp_path / "rows.jsonl", tmp_path / "packed")
    with pytest.raises(ValueError, match="further columns loss_weight"):
        loader(tmp_path / "packed", seq_len=MAX_LENGTH, infinite=False)
