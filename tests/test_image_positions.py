"""What a folder tells of images, and the positions that follow: as transformers has them, and to the byte."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from building import pack
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Folder, Seq, edit_manifest, rewrite_shard, write_folder
from pictures import MODELS, image_processor, picture

from padless.runtime.collate import collate
from padless.runtime.errors import BatchError, CollateError
from padless.runtime.image_positions import image_positions
from padless.runtime.images import PackedImage, read_images, write_images
from padless.runtime.pixels import open_image, with_pixels
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream

PAD = 90
TEXTS = st.lists(st.integers(0, 6), min_size=1, max_size=4)
"""Text tokens before, between and behind the images of a sequence."""
GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@st.composite
def pictured(draw: st.DrawFn) -> tuple[int, list[PackedImage]]:
    """The length of a sequence, at least 1, and its images; between two images there is text, as always."""
    texts = draw(TEXTS)
    at, found = texts[0] + 1, []
    for more in texts[1:]:
        height, width = draw(GRIDS)
        grid = (1, 2 * height, 2 * width)
        found.append(PackedImage(image=f"{at}.png", grid=grid, start=at, tokens=height * width))
        at += height * width + more + 1
    return at, found


@pytest.mark.parametrize("family", MODELS)
@settings(max_examples=30, deadline=None)
@given(sequences=st.lists(pictured(), min_size=1, max_size=4))
def test_positions_of_each_sequence_are_the_librarys(
    family: str, sequences: list[tuple[int, list[PackedImage]]]
) -> None:
    """BR-187, BR-189: [4, T] over the packed tokens, cut where the sequences are."""
    model = MODEL_OF[family]
    lengths = np.array([length for length, _ in sequences])
    found = image_positions(lengths, [images for _, images in sequences])
    assert found.shape == (4, lengths.sum())
    for end, (length, images) in zip(np.cumsum(lengths), sequences, strict=True):
        types = torch.zeros((1, length), dtype=torch.int32)
        for image in images:
            types[0, image.start : image.start + image.tokens] = 1
        grids = torch.tensor([image.grid for image in images]).view(-1, 3)
        expected, _ = model.get_rope_index(torch.ones((1, length), dtype=torch.int64), types, grids)
        mine = found[:, end - length : end]
        assert mine[0].tolist() == list(range(length))
        assert mine[1:].tolist() == expected[:, 0].tolist()


LIBRARY = {
    **{"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"},
    **{"qwen3_vl": "Qwen3VLModel", "qwen3_vl_moe": "Qwen3VLMoeModel", "glm4v": "Glm4vModel"},
}


def _model_of(family: str) -> Any:
    """What get_rope_index asks of a model, without one."""
    import transformers

    kind = getattr(transformers, LIBRARY[family])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    one = object.__new__(kind)
    object.__setattr__(one, "config", SimpleNamespace(vision_config=vision))
    return one


MODEL_OF = {family: _model_of(family) for family in MODELS}


@given(pictured())
def test_what_is_told_of_images_comes_back(sequence: tuple[int, list[PackedImage]]) -> None:
    length, images = sequence
    assert read_images(write_images(images), length) == images
    assert all(image.merge_size == 2 for image in images)


def test_the_text_for_a_sequence_is_this(tmp_path: Path) -> None:
    image = PackedImage(image="süß/0.png", grid=(1, 4, 6), start=1, tokens=6)
    text = '[{"grid":[1,4,6],"image":"s\\u00fc\\u00df/0.png","start":1,"tokens":6}]'
    assert write_images([image]) == text and write_images([]) == ""
    assert read_images(text, 7) == [image]


IMAGE = '{"grid":[1,4,6],"image":"0.png","start":1,"tokens":6}'


@pytest.mark.parametrize(
    "text",
    [
        *("{", "7", "[7]", "[{}]", "null", '"x"'),
        IMAGE.replace('"0.png"', "7").join("[]"),
        IMAGE.replace("[1,4,6]", "[1,4]").join("[]"),
        IMAGE.replace("[1,4,6]", "[1,4,7]").join("[]"),
        IMAGE.replace("[1,4,6]", "[1,3,8]").join("[]"),
        IMAGE.replace("[1,4,6]", "[1,-4,-6]").join("[]"),
        IMAGE.replace('"start":1', '"start":-1').join("[]"),
        IMAGE.replace('"start":1', '"start":3').join("[]"),
        IMAGE.replace('"tokens":6', '"tokens":0').join("[]"),
        IMAGE.replace('"tokens":6', '"tokens":6.0').join("[]"),
        f"[{IMAGE},{IMAGE}]",
    ],
)
def test_what_does_not_tell_of_images_is_refused(text: str) -> None:
    with pytest.raises(BatchError, match="which does not tell of images"):
        read_images(text, 8)


def folder_with_images(path: Path) -> Path:
    """Two packs, by FORMAT.md: a sequence with an image of 6 tokens, one of text; and one with two images."""
    column = ("sequence", "list<string>", pa.list_(pa.string()))
    second = IMAGE.replace('"start":1', '"start":8').replace("0.png", "1.png")
    image = [PAD] * 6
    packs = [
        [Seq([1, *image, 2], [False] * 7 + [True]), Seq([3, 4, 5])],
        [Seq([6, *image, 7, *image, 8], [False] * 14 + [True])],
    ]
    extras = {"images": (*column, [[f"[{IMAGE}]", ""], [f"[{IMAGE},{second}]"]])}
    write_folder(path, Folder(packs=packs, extras=extras))
    rule = {"token_id": PAD, "patch_size": 14, "merge_size": 2, "min_pixels": 1, "max_pixels": 10**6}
    edit_manifest(path, lambda manifest: manifest["options"].update(image_rule=rule))
    return path


def test_a_folder_written_by_the_specification_gives_its_images_and_positions(tmp_path: Path) -> None:
    reader = PackedReader(folder_with_images(tmp_path / "packed"))
    batch = collate(list(reader))
    assert batch["images"] == ["0.png", "0.png", "1.png"]
    assert batch["num_images"].tolist() == [1, 0, 2]
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6]] * 3
    text, time, height, width = batch["position_ids"][:, 0, :11].tolist()
    assert text == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    assert time == [0, 1, 1, 1, 1, 1, 1, 4, 0, 1, 2]
    assert height == [0, 1, 1, 1, 2, 2, 2, 4, 0, 1, 2]
    assert width == [0, 1, 2, 3, 1, 2, 3, 4, 0, 1, 2]
    with pytest.raises(CollateError, match=r"3 images and no pixels, .* with_pixels\(batch, processor\)"):
        batch.model_inputs()


def test_a_rank_without_a_pack_has_no_images(tmp_path: Path) -> None:
    folder = folder_with_images(tmp_path / "packed")
    ranks = [
        list(PackedStream(folder, rank=rank, world_size=3, remainder="pad", shuffle=False))
        for rank in range(3)
    ]
    assert [len(batches) for batches in ranks] == [1, 1, 1]
    (empty,) = ranks[2]
    assert empty["images"] == [] and empty["image_grid_thw"].shape == (0, 3)
    assert empty["position_ids"].shape == (4, 1, 2)


def test_verify_holds_placeholders_against_grids(tmp_path: Path) -> None:
    folder = folder_with_images(tmp_path / "packed")
    run = pack("verify", folder)
    assert run.code == 0 and "3 images, each with its placeholders" in run.out, run.out

    def told(text: str) -> Any:
        return lambda rows: rows[0].update(images=[text, ""])

    def moved(rows: list[dict[str, Any]]) -> None:
        rows[0]["input_ids"][2] = 7

    changes = [
        (told(""), "6 placeholders (token 90) belong to no image"),
        (told(IMAGE.replace("[1,4,6]", "[1,1,6]").join("[]")), "merges 1 x 1 patches, not 2 x 2"),
        (told("["), "does not tell of images"),
        (moved, "has other tokens where image 0.png stands"),
    ]
    for number, (change, message) in enumerate(changes):
        folder = folder_with_images(tmp_path / str(number))
        rewrite_shard(folder, 0, change)
        run = pack("verify", folder)
        assert run.code == 1 and message in run.out.replace("\n", " "), run.out


def test_pixels_come_in_the_order_of_the_tokens_and_must_be_those_that_were_packed(tmp_path: Path) -> None:
    batch = collate(list(PackedReader(folder_with_images(tmp_path / "packed"))))
    processor = image_processor(MODELS["qwen2_5_vl"][1])
    with pytest.raises(CollateError, match="image 0.png of a batch cannot be read"):
        with_pixels(batch, processor, root=str(tmp_path))
    picture(tmp_path / "0.png", 84, 56)
    picture(tmp_path / "1.png", 85, 57)
    found = with_pixels(batch, SimpleNamespace(image_processor=processor), root=str(tmp_path))
    one, two = (
        processor(images=[open_image(name, str(tmp_path))], return_tensors="pt")["pixel_values"]
        for name in ("0.png", "1.png")
    )
    assert torch.equal(found["pixel_values"], torch.cat([one, one, two]))
    assert "pixel_values" not in batch  # which is left as it was
    assert {"pixel_values", "image_grid_thw"} < set(found.model_inputs())
    by_url = with_pixels(batch, processor, root=tmp_path.as_uri())
    assert torch.equal(by_url["pixel_values"], found["pixel_values"])
    opened: list[str] = []
    with_pixels(batch, processor, load=lambda name: opened.append(name) or open_image(name, str(tmp_path)))
    assert opened == ["0.png", "0.png", "1.png"]
    picture(tmp_path / "1.png", 140, 56)
    with pytest.raises(
        CollateError, match=r"image 1.png has a grid of \[1, 4, 10\] patches and was packed with"
    ):
        with_pixels(batch, processor, root=str(tmp_path))


def test_a_batch_without_images_is_given_back(tmp_path: Path) -> None:
    batch = collate([PackedReader(folder_with_images(tmp_path / "packed"))[0]])
    batch["images"] = []
    assert with_pixels(batch, None) is batch
