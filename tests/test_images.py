"""Images in records: found, measured by their headers, given their tokens, kept whole or not at all."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from building import (
    build,
    built,
    files_of,
    sequence_table,
    write_lines,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_pictures import ANSWER, HEAD, TAIL, images_of, packed, refused, see, with_tokenizer
from pictures import (
    GLM,
    IMAGE_PAD,
    QWEN3,
    QWEN25,
    asks,
    image_processor,
    parts,
    picture,
    pictures,
    vision_tokenizer,
)
from PIL import Image, ImageOps
from toys import END, fates, word_tokenizer

from padless.packer.image_rule import ImageRule, image_size
from padless.runtime.reader import PackedReader


def test_each_way_of_naming_images_gives_the_same_tokens_and_references(tmp_path: Path) -> None:
    pictures(tmp_path, (56, 84))  # 2 x 3 tokens
    image = {"type": "image", "image": "0.png"}
    rows = [
        asks(parts(image, " w11"), "w20"),
        asks(parts({"type": "image"}, " w11"), "w20", images=["0.png"]),
        asks(parts({"type": "image_url", "image_url": {"url": "0.png"}}, " w11"), "w20"),
        asks(parts({"type": "image", "path": "0.png"}, " w11"), "w20", images=[]),
        asks("<image> w11", "w20", images=["0.png"]),
        asks("<image> w11", "w20", image="0.png"),
        asks("<image> w11", "w20", images=[{"path": "0.png", "bytes": None}]),
        asks(" w11", "w20", images=["0.png"]),
        asks("<image> w11", "w20", images=[str(tmp_path / "0.png")]),
        asks("<image> w11", "w20", images=[(tmp_path / "0.png").as_uri()]),
    ]
    for ids, labels in packed(tmp_path, rows):
        assert ids == [*HEAD, *see(6), 11, *TAIL, *ANSWER]
        assert labels == [-100] * (len(ids) - 3) + [20, END, -100]
    (shard,) = (tmp_path / "packed").glob("shard-*.arrow")
    raw = pa.ipc.open_stream(shard.read_bytes()).read_all().to_pylist()
    texts = [text for row in raw for text in row["images"]]
    assert texts.count('[{"grid":[1,6,4],"image":"0.png","start":4,"tokens":6}]') == 8
    told = images_of(tmp_path / "packed")
    assert {image.image for image in told[0]} == {"0.png"}
    assert all(
        (one.grid, one.start, one.tokens, one.merge_size) == ((1, 6, 4), 4, 6, 2)
        for mine in told.values()
        for one in mine
    )
    assert [one.image for one in told[9]] == [(tmp_path / "0.png").as_uri()]


def test_sharegpt_turns_have_images_where_their_tags_stand(tmp_path: Path) -> None:
    names = pictures(tmp_path, (56, 56), (84, 56))
    turns = [{"from": "human", "value": "w10 <image> w11 <image>"}, {"from": "gpt", "value": "w20"}]
    ((ids, _),) = packed(tmp_path, [{"conversations": turns, "images": names}])
    assert ids == [*HEAD, 10, *see(4), 11, *see(6), *TAIL, *ANSWER]
    assert [image.start for image in images_of(tmp_path / "packed")[0]] == [5, 12]


def test_preference_answers_share_the_images_of_their_prompt(tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    row = {"prompt": asks("<image> w10")["messages"], "images": ["0.png"]}
    row |= {
        name: [{"role": "assistant", "content": word}]
        for name, word in (("chosen", "w20"), ("rejected", "w21"))
    }
    chosen, rejected = packed(tmp_path, [row])
    assert chosen[0] == [*HEAD, *see(4), 10, *TAIL, *ANSWER]
    assert len(rejected[0]) == len(chosen[0])
    told = images_of(tmp_path / "packed")
    assert told[0] == told[1] and [image.image for image in told[0]] == ["0.png"]


def test_a_sequence_for_each_turn_has_the_images_up_to_it(tmp_path: Path) -> None:
    names = pictures(tmp_path, (56, 56), (84, 56))
    row = asks("<image> w10", "w20", "<image> w11", "w20", images=names)
    first, second = packed(tmp_path, [row], "--expand-turns")
    assert first[0].count(IMAGE_PAD) == 4 and second[0].count(IMAGE_PAD) == 10
    told = images_of(tmp_path / "packed")
    assert [[image.image for image in told[number]] for number in (0, 1)] == [names[:1], names]


@pytest.mark.parametrize("config", [QWEN25, QWEN3, GLM], ids=["qwen2.5", "qwen3", "glm"])
@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 700), height=st.integers(1, 700))
def test_an_image_takes_the_tokens_that_the_processor_gives_it(
    config: dict[str, Any], width: int, height: int
) -> None:
    """Against transformers' image processor with all its pixels, and its processor's own placeholders."""
    from transformers import Qwen2_5_VLProcessor

    if max(width, height) > 200 * min(width, height):
        return
    size = config.get("size") or {"shortest_edge": config["min_pixels"], "longest_edge": config["max_pixels"]}
    rule = ImageRule(
        token_id=0,
        patch_size=config["patch_size"],
        merge_size=2,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
        frames=2 if config == GLM else 0,
    )
    processor = image_processor(config)
    made = processor(images=[Image.new("RGB", (width, height))], return_tensors="np")
    grid = rule.grid(height, width)
    assert [list(grid)] == made["image_grid_thw"].tolist()
    assert len(made["pixel_values"]) == rule.tokens(grid) * 4
    itself = SimpleNamespace(image_processor=processor, image_token="x")
    assert len(Qwen2_5_VLProcessor.replace_image_token(itself, made, 0)) == rule.tokens(grid)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP"]),
    turned=st.none() | st.integers(1, 8),
    width=st.integers(1, 40),
    height=st.integers(1, 40),
)
def test_a_header_tells_the_size_of_the_upright_image(
    tmp_path_factory: pytest.TempPathFactory, kind: str, turned: int | None, width: int, height: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"measured.{kind.lower()}"
    exif = Image.Exif()
    if turned is not None:
        exif[0x0112] = turned
    save = {"exif": exif} if turned is not None and kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}
    Image.new("RGB", (width, height)).save(path, kind, **save)
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
    assert image_size(str(path)) == (upright.height, upright.width)


def test_no_pixel_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture whose pixels are cut off is measured all the same."""
    whole = io.BytesIO()
    Image.open(tmp_path / picture(tmp_path / "0.png", 84, 56)).save(whole, "PNG")
    (tmp_path / "0.png").write_bytes(whole.getvalue()[:60])
    ((ids, _),) = packed(tmp_path, [asks("<image>", "w20", images=["0.png"])])
    assert ids.count(IMAGE_PAD) == 6


def test_relative_paths_begin_where_the_records_lie_or_at_the_image_root(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "0.png", 56, 56)
    picture(tmp_path / "b" / "0.png", 84, 56)
    source = write_lines(tmp_path / "a" / "rows.jsonl", [asks("<image>", "w20", images=["0.png"])])
    built(source, tmp_path / "here", *with_tokenizer(tmp_path))
    built(source, tmp_path / "there", *with_tokenizer(tmp_path), "--image-root", tmp_path / "b")
    built(source, tmp_path / "url", *with_tokenizer(tmp_path), "--image-root", (tmp_path / "b").as_uri())
    found = [images_of(tmp_path / name)[0][0] for name in ("here", "there", "url")]
    assert [image.tokens for image in found] == [4, 6, 6]
    assert {image.image for image in found} == {"0.png"}  # no path of this machine


def test_a_second_run_measures_the_images_again(tmp_path: Path) -> None:
    """Where they lie is recorded nowhere: elsewhere it is the same build if the images there are as large."""
    for name, size in (("a", (56, 56)), ("same", (56, 56)), ("other", (84, 56))):
        picture(tmp_path / name / "0.png", *size)
    rows = [asks(f"<image> w{number}", "w20", images=["0.png"]) for number in range(10, 20)]
    source = write_lines(tmp_path / "a" / "rows.jsonl", rows)
    options = (*with_tokenizer(tmp_path), "--eval-fraction", 0.5)
    built(source, tmp_path / "out", *options)
    assert built(source, tmp_path / "out", *options)["was_finished"]
    assert built(source, tmp_path / "out", *options, "--image-root", tmp_path / "same")["was_finished"]
    for root, words in (("other", "0.png had 4 x 4 patches, now"), ("none", "image 0.png is not there")):
        run = build(source, tmp_path / "out", *options, "--image-root", tmp_path / root)
        assert run.code == 2 and words in run.err and "--force to replace it" in run.err
    built(source, tmp_path / "out", *options, "--image-root", tmp_path / "other", "--force")
    built(source, tmp_path / "fresh", *options, "--image-root", tmp_path / "other")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


def test_placeholders_are_never_trained(tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    rows = [asks("<image> w10", "w20 <image>", images=["0.png", "0.png"])]
    ((ids, labels),) = packed(tmp_path, rows, "--train-on", "all")
    assert ids.count(IMAGE_PAD) == 8 and IMAGE_PAD not in labels
    assert [i for i in ids[1:] if i != IMAGE_PAD] == [label for label in labels if label != -100]


def test_what_a_text_spells_as_a_placeholder_stays_text(tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    ((ids, _),) = packed(tmp_path, [asks("<image> <|image_pad|>", "w20", images=["0.png"])])
    assert ids.count(IMAGE_PAD) == 4
    message = refused(tmp_path, [asks("<image> <|image_pad|>", "w20", images=["0.png"])], "--allow-special")
    assert "2 placeholders of images in its text, and 1 images" in message


def test_a_conversation_that_is_cut_keeps_whole_images_only(tmp_path: Path) -> None:
    """BR-188: the cut is before the turn whose image does not fit, and the image goes with it."""
    names = pictures(tmp_path, (56, 56), (140, 112))
    rows = [asks("<image>", "w20", "<image>", "w20", images=names), asks("<image>", "w20", images=names[1:])]
    ((ids, _),) = packed(tmp_path, rows, "--overflow", "truncate", "--max-length", 24)
    assert ids.count(IMAGE_PAD) == 4
    assert fates(tmp_path / "packed") == [("truncated", "too-long"), ("dropped", "too-long")]
    assert [[image.image for image in mine] for mine in images_of(tmp_path / "packed").values()] == [
        ["0.png"]
    ]
    table = sequence_table(tmp_path / "packed")
    small, large = (len(HEAD + see(tokens) + TAIL + ANSWER) for tokens in (4, 20))
    whole = [small + large, large]
    assert [a + b for a, b in zip(table["length"], table["cut"], strict=True)] == whole


def test_a_conversation_that_does_not_fit_is_refused_or_dropped_whole(tmp_path: Path) -> None:
    """BR-188."""
    names = pictures(tmp_path, (140, 112))
    rows = [asks("<image>", "w20", images=names), asks("w10", "w20")]
    assert "has 33 tokens and max_length is 24" in refused(tmp_path, rows, "--max-length", 24)
    ((ids, _),) = packed(tmp_path, rows, "--overflow", "drop", "--max-length", 24)
    assert IMAGE_PAD not in ids
    for option in (("--overflow", "split"), ("--strategy", "wrapped")):
        assert "in mid-conversation" in refused(tmp_path, rows, *option)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (asks("<image> <image>", "w20", images=["0.png"]), "it has 1 images and 2 places for them"),
    (asks("<image>", "w20", images=["0.png", "0.png"]), "it has 2 images and 1 places for them"),
    (asks("<image>", "w20", images=None), "it has 0 images and 1 places for them"),
    (asks(parts({"type": "image"}), "w20"), "it has 0 images and 1 places for them"),
    (asks("<image>", "w20", images=["none.png"]), "image 1 (none.png) is not there"),
    (asks("<image>", "w20", images=["rows.jsonl"]), "image 1 (rows.jsonl) cannot be read"),
    (asks("<image>", "w20", images=["nowhere://0.png"]), "image 1 (nowhere://0.png) cannot be read"),
    (asks("<image>", "w20", images=["long.png"]), "one side 300 times the other"),
    (asks("<image>", "w20", images=[7]), "image 1 is int; it is a path or a URL"),
    (asks("<image>", "w20", images=["data:image/png;base64,AA"]), "write it to a file"),
    (asks("<image>", "w20", images=[{"bytes": "AA"}]), "write it to a file"),
    (asks(parts({"type": "video", "video": "0.mp4"}), "w20"), "no video, sound or files"),
    (asks("<video>", "w20", videos=["0.mp4"]), "it has a video"),
    (asks(parts({"type": "image", "image": "0.png", "max_pixels": 9}), "w20"), "sets max_pixels for itself"),
    ({"prompt": "w10", "completion": "w20", "images": ["0.png"]}, "go with conversations"),
]


@pytest.mark.parametrize(("row", "message"), REFUSALS, ids=[message[:30] for _, message in REFUSALS])
def test_an_image_that_has_no_place_or_cannot_be_read_is_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    pictures(tmp_path, (56, 56))
    picture(tmp_path / "long.png", 300, 1)
    said = refused(tmp_path, [row])
    assert message in said and "record 0" in said


def test_a_bad_image_drops_its_record_where_that_is_asked_for(tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    rows = [asks("<image>", "w20", images=["none.png"]), asks("<image>", "w20", images=["0.png"])]
    ((ids, _),) = packed(tmp_path, rows, "--on-bad-record", "drop")
    assert ids.count(IMAGE_PAD) == 4
    assert fates(tmp_path / "packed") == [("dropped", "malformed"), ("whole", None)]


def test_a_template_that_writes_no_placeholder_is_refused(tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    said = refused(tmp_path, [asks("<image> w10", "w20", images=["0.png"])], "--template", "chatml")
    assert "the model's own template" in said


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (None, "has no preprocessor_config.json"),
        ({"image_processor_type": "CLIPImageProcessor"}, "is CLIPImageProcessor; known are"),
        ({**QWEN25, "do_resize": False}, "does not resize"),
        ({**QWEN25, "patch_size": "x"}, "has patch_size 'x'"),
    ],
    ids=["none", "another", "no-resize", "broken"],
)
def test_images_without_a_known_processor_are_refused(
    tmp_path: Path, processor: dict[str, Any] | None, message: str
) -> None:
    pictures(tmp_path, (56, 56))
    source = write_lines(tmp_path / "rows.jsonl", [asks("<image>", "w20", images=["0.png"])])
    run = build(source, tmp_path / "out", *with_tokenizer(tmp_path, processor))
    assert run.code == 2 and message in run.err


def test_a_processor_saved_by_newer_transformers_is_read(tmp_path: Path) -> None:
    tokenizer = vision_tokenizer(tmp_path / "tokenizer", processor=None)
    (tokenizer / "processor_config.json").write_text(json.dumps({"image_processor": QWEN25}))
    pictures(tmp_path, (56, 84))
    source = write_lines(tmp_path / "rows.jsonl", [asks("<image>", "w20", images=["0.png"])])
    built(source, tmp_path / "packed", "--tokenizer", tokenizer, "--max-length", 64)
    assert images_of(tmp_path / "packed")[0][0].tokens == 6
    assert (tmp_path / "packed" / "tokenizer" / "processor_config.json").is_file()


def test_a_column_of_that_name_beside_plain_text_changes_nothing(tmp_path: Path) -> None:
    """With a tokenizer of text, records that only happen to have such a column are packed as ever."""
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "rows.jsonl", [asks("w10", "w20", image="http://example.org/0.png")])
    built(source, tmp_path / "packed", "--tokenizer", tokenizer, "--max-length", 64)
    assert not PackedReader(tmp_path / "packed").manifest.extras
    said = build(
        write_lines(tmp_path / "more.jsonl", [asks("<image> w10", "w20", images=["0.png"])]),
        *(tmp_path / "refused", "--tokenizer", tokenizer, "--max-length", 64),
    )
    assert said.code == 2 and "has no preprocessor_config.json" in said.err


@pytest.mark.parametrize(
    "row",
    [asks("<video> w10", "w20", videos=["0.mp4"]), {"prompt": "<video>", "completion": "w", "video": "0"}],
)
def test_a_video_whose_tag_is_in_the_text_is_refused_for_models_of_text_too(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "rows.jsonl", [row])
    said = build(source, tmp_path / "refused", "--tokenizer", tokenizer, "--max-length", 64)
    assert said.code == 2 and "it has a video, which cannot be packed" in said.err
