"""Rollouts with images, packed in memory: positions, pixels and losses are those of the rollouts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pictures import IMAGE_PAD, MODELS, VISION_END, VISION_START, image_processor, pictures, token_types  # noqa: E402
from unpacked import assert_same_training  # noqa: E402

from padless.runtime.errors import CollateError  # noqa: E402
from padless.runtime.in_memory import pack_sequences  # noqa: E402
from padless.runtime.logps import token_logps  # noqa: E402
from padless.runtime.losses import grpo_losses  # noqa: E402
from padless.runtime.models import prepare_model  # noqa: E402
from padless.runtime.pixels import open_image, with_pixels  # noqa: E402

SHAPES: list[tuple[list[int | str], int]] = [
    ([11, 12, "0.png", 13], 4),
    ([14, 15], 3),
    (["1.png", "0.png", 16], 5),
    (["0.png"], 2),
]
"""What the prompt holds (ids, and names of images), and the tokens of the response."""
ALONE = dict(max_tokens=400, rank=0, world_size=1, image_token_id=IMAGE_PAD)


def rollouts(root: Path, processor: Any, *, pixels: bool = True) -> list[dict[str, Any]]:
    """As an engine gives them: placeholders repeated, grids and pixels of the model's own processor."""
    pictures(root, (60, 90), (150, 70))
    made, found = np.random.default_rng(0), []
    for number, (prompt, response) in enumerate(SHAPES):
        names = [item for item in prompt if isinstance(item, str)]
        one: dict[str, Any] = {"prompt_ids": [], "reward": float(number)}
        if names:
            seen = processor(images=[open_image(name, str(root)) for name in names], return_tensors="pt")
            one["image_grid_thw"] = seen["image_grid_thw"]
            one |= {"pixel_values": seen["pixel_values"]} if pixels else {"images": names}
            counts = iter((seen["image_grid_thw"].prod(dim=1) // 4).tolist())
        for item in prompt:
            is_image = isinstance(item, str)
            one["prompt_ids"] += (
                [VISION_START, *[IMAGE_PAD] * next(counts), VISION_END] if is_image else [item]
            )
        one["response_ids"] = made.integers(10, 60, response)
        one["advantages"] = made.normal(size=response).astype(np.float32)
        one["old_logprobs"] = made.normal(-4, 0.1, size=response).astype(np.float32)
        found.append(one)
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_grpo_over_packed_rollouts_with_images_is_that_of_the_rollouts_alone(
    tmp_path: Path, family: str
) -> None:
    make, config = MODELS[family]
    rows = rollouts(tmp_path, image_processor(config))
    model = prepare_model(make(), check=True)
    (batch,) = pack_sequences(rows, **ALONE)
    assert batch["num_images"].tolist() == [[1, 0, 2, 1][number] for number in batch["sequence_ids"]]

    def loss_of(batch: Any) -> torch.Tensor:
        logits = model(**{**batch.model_inputs(), "labels": None}).logits
        return grpo_losses(token_logps(logits, batch), batch).sum()

    def alone() -> torch.Tensor:
        total = torch.zeros(())
        for row in rows:
            ids = [*row["prompt_ids"], *row["response_ids"].tolist()]
            inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
            if "pixel_values" in row:
                inputs |= {name: row[name] for name in ("pixel_values", "image_grid_thw")}
                inputs["mm_token_type_ids"] = token_types(ids)
            logps = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
            for place, advantage in enumerate(row["advantages"].tolist()):
                at = len(row["prompt_ids"]) + place
                ratio = torch.exp(logps[at - 1, ids[at]] - float(row["old_logprobs"][place]))
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return total

    assert_same_training(model, lambda: loss_of(batch), alone)


def test_references_take_their_pixels_later(tmp_path: Path) -> None:
    processor = image_processor(MODELS["qwen2_5_vl"][1])
    rows = rollouts(tmp_path, processor, pixels=False)
    (batch,) = pack_sequences(rows, **ALONE)
    with pytest.raises(CollateError, match="4 images and no pixels"):
        batch.model_inputs()
    found = with_pixels(batch, processor, root=str(tmp_path))
    (given,) = pack_sequences(rollouts(tmp_path, processor), **ALONE)
    for name in ("pixel_values", "image_grid_thw", "position_ids", "labels", "input_ids"):
        assert torch.equal(found[name], given[name]), name


def test_placeholders_are_never_trained_and_ranks_without_a_sequence_see_an_image(tmp_path: Path) -> None:
    processor = image_processor(MODELS["qwen2_5_vl"][1])
    row = rollouts(tmp_path, processor)[0]
    ids = [*row["prompt_ids"], *row["response_ids"].tolist()]
    whole = {"input_ids": ids, **{name: row[name] for name in ("pixel_values", "image_grid_thw")}}
    for rank in range(2):
        (batch,) = pack_sequences([whole], **{**ALONE, "rank": rank, "world_size": 2})
        is_image = batch["input_ids"] == IMAGE_PAD
        assert (batch["labels"][is_image] == -100).all()
        trained = 0 if rank else len(ids) - 1 - int(is_image.sum())
        assert batch.num_targets == trained == int((batch["labels"] != -100).sum())
        assert batch["position_ids"].shape == (4, 1, len(ids)) and len(batch["pixel_values"]) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_thw": None}, "placeholders .* for 0 images"),
        ({"image_grid_thw": [[1, 4, 4]]}, r"sequence 0 has 8 placeholders \(token 101\) for 1 images"),
        ({"image_grid_thw": [[1, 0, 4]]}, "for 1 images"),
        ({"prompt_ids": [11, 12]}, "has 0 placeholders"),
        ({"pixel_values": None}, "neither pixel_values nor images"),
        ({"images": []}, "has 0 images for 1 grids"),
        ({"images": "a"}, "images of sequence 0 must be a list of paths"),
        ({"images": [3]}, "images of sequence 0 must be a list of paths"),
        ({"image_grid_thw": [[1.7, 4, 8]]}, "image_grid_thw of sequence 0 must be whole numbers"),
        ({"image_grid_thw": [[1, 4, 8], [1]]}, "image_grid_thw of sequence 0 must be whole numbers"),
        ({"pixel_values": [[1.0], [1.0, 2.0]]}, "pixel_values of sequence 0 are no tensor"),
        ({"prompt_ids": [11], "image_grid_thw": None}, "sequence 0 has pixel_values, and neither"),
        ({"pixel_values": np.zeros((3, 4))}, r"pixel_values \[3, 4\] for grids of 32 patches"),
        ({"prompt_ids": [*[IMAGE_PAD] * 4, 11, *[IMAGE_PAD] * 4]}, "other tokens within an image"),
    ],
)
def test_images_that_do_not_fit_their_placeholders_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    row = {
        **{"prompt_ids": [11, *[IMAGE_PAD] * 8], "response_ids": [12, 13], "image_grid_thw": [[1, 4, 8]]},
        "pixel_values": np.zeros((32, 4), dtype=np.float32),
    }
    assert len(pack_sequences([row], **ALONE)) == 1
    with pytest.raises(CollateError, match=message):
        pack_sequences([row | change], **ALONE)


def test_pixels_of_patches_of_other_sizes_are_refused() -> None:
    rows = [
        {"input_ids": [11, IMAGE_PAD], "image_grid_thw": [[1, 2, 2]], "pixel_values": np.zeros((4, width))}
        for width in (3, 5)
    ]
    with pytest.raises(CollateError, match=r"pixel_values have \[3, 5\] values a patch"):
        pack_sequences(rows, **ALONE)
