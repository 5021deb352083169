"""Packed equals unpacked where records have images: the loss and every gradient, through tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import built, write_lines
from pictures import MODELS, asks, image_processor, parts, pictures, token_types, vision_tokenizer
from unpacked import assert_same_training

from padless.runtime.collate import collate
from padless.runtime.evaluate import evaluate
from padless.runtime.models import prepare_model
from padless.runtime.pixels import open_image, with_pixels
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream


def pack_images(folder: Path, config: dict[str, Any], *options: object) -> Path:
    """Six records with none to two images each, packed."""
    names = pictures(folder, (60, 90), (200, 64), (75, 75), (150, 70))
    rows = [
        asks("<image> w11 w12", "w20 w21", images=[names[0]]),
        asks("w11 w13", "w22", images=[]),
        asks("w14 <image> w15 <image>", "w23", "<image> w16", "w24 w25", images=names[1:]),
        asks(parts({"type": "image", "image": names[3]}, "w17"), "w26 w27 w28", images=None),
        asks("w18", "w29", "w19", "w30", images=None),
        asks("w31", "w32", images=[names[2]]),
    ]
    tokenizer = vision_tokenizer(folder / "tokenizer", processor=config)
    source = write_lines(folder / "rows.jsonl", rows)
    built(source, folder / "packed", "--tokenizer", tokenizer, "--max-length", 96, *options)
    return folder / "packed"


def one_by_one(model: Any, reader: PackedReader, processor: Any, root: Path) -> torch.Tensor:
    """The loss of each sequence alone, as transformers computes positions and all, by trained tokens."""
    total, trained = torch.zeros(()), 0
    for pack in reader:
        ends = np.cumsum(pack.seq_lengths)
        for row, (end, length) in enumerate(zip(ends, pack.seq_lengths, strict=True)):
            ids, labels = (x[end - length : end].tolist() for x in (pack.input_ids, pack.labels))
            inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
            found = json.loads(pack.extras["images"][row] or "[]")
            if found:
                opened = [open_image(one["image"], str(root)) for one in found]
                inputs |= dict(processor(images=opened, return_tensors="pt"))
                inputs["mm_token_type_ids"] = token_types(ids)
            targets = sum(label != -100 for label in labels)
            total = total + model(**inputs, use_cache=False).loss * targets
            trained += targets
    return total / trained


@pytest.mark.parametrize("prepared", [False, True], ids=["own", "prepared"])
@pytest.mark.parametrize("family", MODELS)
def test_a_packed_batch_with_images_trains_as_its_sequences_alone(
    tmp_path: Path, family: str, prepared: bool
) -> None:
    """BR-186, BR-187: positions have the row of the text by which the library tells sequences apart."""
    make, config = MODELS[family]
    reader = PackedReader(pack_images(tmp_path, config))
    assert len(reader) > 1
    processor = image_processor(config)
    batch = with_pixels(collate(list(reader)), processor, root=str(tmp_path))
    model = make()
    if prepared:
        prepare_model(model, check=True)
    assert_same_training(
        model,
        lambda: model(**batch.model_inputs()).loss,
        lambda: one_by_one(model, reader, processor, tmp_path),
    )


def test_perplexity_over_images_is_that_of_the_sequences_alone(tmp_path: Path) -> None:
    make, config = MODELS["qwen3_vl"]
    folder, processor = pack_images(tmp_path, config), image_processor(config)
    model = prepare_model(make().eval())
    found = evaluate(
        model, folder, with_pixels=lambda batch: with_pixels(batch, processor, root=str(tmp_path))
    )
    with torch.no_grad():
        alone = float(one_by_one(model, PackedReader(folder), processor, tmp_path))
    assert found.loss == pytest.approx(alone, abs=1e-5) and len(found.sequences["loss"]) == 6


def test_without_the_row_of_the_text_the_model_would_mix_sequences(tmp_path: Path) -> None:
    """BR-186: what the test above would see; three rows are no boundaries to transformers."""
    make, config = MODELS["qwen2_5_vl"]
    batch = with_pixels(
        collate(list(PackedReader(pack_images(tmp_path, config)))),
        image_processor(config),
        root=str(tmp_path),
    )
    model = make()
    with torch.no_grad():
        right = model(**batch.model_inputs()).loss
        mixed = model(**batch.model_inputs() | {"position_ids": batch["position_ids"][1:]}).loss
    assert abs(float(right - mixed)) > 1e-3


def test_a_stream_gives_the_images_of_each_batch_in_the_order_of_their_tokens(tmp_path: Path) -> None:
    folder = pack_images(tmp_path, MODELS["qwen2_5_vl"][1])
    seen: list[str] = []
    for batch in PackedStream(folder, packs_per_batch=1):
        tokens = batch["image_grid_thw"].prod(dim=1) // 4
        assert int((batch["input_ids"] == 101).sum()) == int(tokens.sum())
        assert len(batch["images"]) == len(tokens) == int(batch["num_images"].sum())
        assert batch["position_ids"].shape == (4, 1, batch["input_ids"].shape[1])
        seen += batch["images"]
    assert sorted(seen) == ["0.png", "1.png", "2.png", "2.png", "3.png", "3.png"]
