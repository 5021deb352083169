"""Images in records: found, measured by their headers, given their tokens, kept whole or not at all."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from building import (
    assert_verified,
    build,
    built,
    files_of,
    pack,
    sequence_table,
    sequences_of,
    workers_in,
    write_lines,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import (
    GLM,
    IMAGE_PAD,
    QWEN3,
    QWEN25,
    VISION_END,
    VISION_START,
    asks,
    image_processor,
    parts,
    picture,
    pictures,
    vision_tokenizer,
)
from PIL import Image, ImageOps
from toys import ASSISTANT, END, NEWLINE, START, USER, fates, word_tokenizer

from padless.packer import PackConfig, commit, engine, pack_dataset
from padless.packer.chunk import ChunkResult
from padless.packer.elements import gather_of, lay_elements, lay_images
from padless.packer.gather_part import part_of
from padless.packer.image_rule import ImageRule, image_size
from padless.packer.lines import LINE
from padless.packer.tables import collect
from padless.packer.token_store import ChunkStore, Counter, Reserved
from padless.packer.write import write_shard
from padless.runtime.collate import collate
from padless.runtime.errors import CollateError
from padless.runtime.format import PackedImage, read_images
from padless.runtime.images import read_embedded
from padless.runtime.pixels import images_in, with_pixels
from padless.runtime.reader import PackedReader

HEAD, TAIL = [START, USER, NEWLINE], [END, NEWLINE]
ANSWER = [START, ASSISTANT, NEWLINE, 20, END, NEWLINE]


def see(tokens: int) -> list[int]:
    """An image of so many tokens."""
    return [VISION_START, *[IMAGE_PAD] * tokens, VISION_END]


def packed(folder: Path, rows: list[Any], *options: object) -> list[tuple[list[int], list[int]]]:
    """Rows packed with the vision tokenizer; ids and labels of the sequences in their order."""
    source = write_lines(folder / "rows.jsonl", rows)
    built(source, folder / "packed", *with_tokenizer(folder), *options)
    assert_verified(folder / "packed")
    return [sequence for _, sequence in sorted(sequences_of(folder / "packed").items())]


def with_tokenizer(folder: Path, processor: dict[str, Any] | None = QWEN25) -> list[object]:
    tokenizer = vision_tokenizer(folder / "tokenizer", processor=processor)
    return ["--tokenizer", tokenizer, "--max-length", 64, "--max-drop-share", 1]


def refused(folder: Path, rows: list[Any], *options: object) -> str:
    """What is said where the rows cannot be packed."""
    source = write_lines(folder / "rows.jsonl", rows)
    run = build(source, folder / "refused", *with_tokenizer(folder), *options)
    assert run.code == 2 and "Traceback" not in run.err, (run.out, run.err)
    assert not (folder / "refused").exists()
    return run.err


def images_of(folder: Path) -> dict[int, list[PackedImage]]:
    """By its number: what the folder tells of each sequence's images."""
    return {
        int(number): read_images(text, int(length))
        for one in PackedReader(folder)
        for number, text, length in zip(one.sequence_ids, one.extras["images"], one.seq_lengths, strict=True)
    }


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


def test_the_bytes_are_the_same_for_any_number_of_workers_and_any_place(tmp_path: Path) -> None:
    trees = []
    for place, way, workers in (("a", "threads", 1), ("b/c", "processes", 3)):
        folder = tmp_path / place
        names = pictures(folder, *((40 + 7 * n, 50 + 3 * n) for n in range(9)))
        rows = [
            asks("<image> w10 " * (n % 3), f"w2{n % 10}", images=[names[(n + m) % 9] for m in range(n % 3)])
            for n in range(300)
        ]
        source = write_lines(folder / "rows.jsonl", rows)
        with workers_in(way):
            built(
                source, folder / "packed", *with_tokenizer(folder), "--max-length", 256, "--workers", workers
            )
        trees.append(files_of(folder / "packed"))
    assert trees[0] == trees[1]
    for number, mine in images_of(tmp_path / "a" / "packed").items():
        assert len(mine) == number % 3


def test_the_bytes_are_the_same_where_a_store_goes_through_buckets_or_to_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = pictures(tmp_path, *((40 + 7 * n, 50 + 3 * n) for n in range(5)))
    rows = [
        asks("<image> w10 " * (n % 3), f"w2{n % 10}", images=[names[(n + m) % 5] for m in range(n % 3)])
        for n in range(100)
    ]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    folders = [tmp_path / name for name in ("plain", "buckets", "part")]
    options = [*with_tokenizer(tmp_path), "--max-length", 256, "--workers", 1]
    built(source, folders[0], *options)
    with monkeypatch.context() as patched:
        patched.setattr(commit, "BUCKETS_FROM", 0)
        built(source, folders[1], *options)

    def elsewhere(folder: str, number: int, batches: Any, plan: Any, gather: Any, *rest: Any) -> Any:
        part, packs, inside = part_of(gather, plan, batches)
        assert not any("images" in name for name in vars(part) if name != "extras")
        return write_shard(folder, number, inside, packs, part.gather(str(folders[2] / ".work")), *rest)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "write_shard", lambda *a, **k: elsewhere(*a, *k.values()))
        built(source, folders[2], *options)
    assert files_of(folders[0]) == files_of(folders[1]) == files_of(folders[2])


def test_an_estimate_measures_the_images_where_the_records_lie(tmp_path: Path) -> None:
    names = pictures(tmp_path, (140, 112))
    source = write_lines(tmp_path / "rows.jsonl", [asks("<image>", "w20", images=names) for _ in range(40)])
    tokenizer = vision_tokenizer(tmp_path / "tokenizer")
    run = pack("estimate", source, "--tokenizer", tokenizer, "--max-length", 64, "--json")
    assert run.code == 0, run.err
    assert run.json["tokens_per_sequence"]["value"] == len(HEAD + see(20) + TAIL + ANSWER)


@pytest.mark.parametrize("sources", [("*/rows.jsonl",), ("a/rows.jsonl", "b/rows.jsonl")])
def test_an_estimate_finds_the_images_of_each_file_beside_it(
    tmp_path: Path, sources: tuple[str, ...]
) -> None:
    for folder, size in (("a", (140, 112)), ("b", (56, 56))):
        picture(tmp_path / folder / "x.png", *size)
        rows = [asks("<image>", "w20", images=["x.png"]), asks("w21", "w20")] * 5
        write_lines(tmp_path / folder / "rows.jsonl", rows)
    paths = [tmp_path / source for source in sources]
    options = ("--tokenizer", vision_tokenizer(tmp_path / "tokenizer"), "--max-length", 64, "--json")
    run = pack("estimate", *paths, *options)
    assert run.code == 0, run.err
    assert [source["dropped"] for source in run.json["sources"]] == [0] * len(sources)
    built = pack("build", *paths, *options, "--output", tmp_path / "packed")
    assert (run.json["sequences"], run.json["tokens"]) == (20, built.json["tokens"])


def test_a_build_without_images_loads_no_library_for_them(tmp_path: Path) -> None:
    tokenizer = vision_tokenizer(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "rows.jsonl", [asks("w10", "w20")])
    code = (
        "import sys; from padless.packer import PackConfig, pack_dataset; "
        f"pack_dataset(PackConfig(sources=({str(source)!r},), tokenizer={str(tokenizer)!r}, max_length=64, "
        f"output={str(tmp_path / 'packed')!r}, workers=1)); "
        "print([name for name in ('PIL', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", (done.stdout, done.stderr)


def test_without_pillow_images_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'padless[vlm]'" in refused(tmp_path, [asks("<image>", "w20", images=["0.png"])])


def test_an_interrupted_build_takes_up_what_it_knew_of_images(tmp_path: Path) -> None:
    def result(tokens: int, text: bytes) -> ChunkResult:
        lines = np.zeros(1, dtype=LINE)
        lines["length"], lines["images"] = tokens, len(text)
        return ChunkResult(lines, np.arange(tokens, dtype=np.int32), 1, [], 0, None, text)

    def texts(store: ChunkStore) -> list[Any]:
        (split,) = collect(store, 1, 1)
        gather = gather_of(*lay_elements(store), split, images=lay_images(store))
        order = np.arange(len(split.lengths))
        assert gather.values(order).tolist() == [t for n in split.lengths for t in range(n)]
        return gather.extra("images", order).tolist()

    (tmp_path / ".work").mkdir()
    store = ChunkStore(str(tmp_path / ".work"), "key")
    ends = Reserved((Counter(0), Counter(0)))
    store.commit(store.write(0, 0, 1, result(3, b"[1]"), ends))
    store.write(1, 0, 1, result(5, b"[lost]"), ends)  # never entered
    store.commit(store.write(2, 0, 1, result(2, b""), ends))
    store.close()
    again = ChunkStore(str(tmp_path / ".work"), "key")
    ends = Reserved((Counter(again.used[0]), Counter(again.used[1])))
    again.commit(again.write(1, 0, 1, result(5, b"[one, two]"), ends))
    assert texts(again) == ["[1]", "[one, two]", ""]
    again.close()


def test_repack_keeps_the_images_with_their_sequences(tmp_path: Path) -> None:
    names = pictures(tmp_path, (56, 56), (84, 56), (84, 84))
    rows = [asks("<image> w10", "w20", images=[names[n % 3]]) for n in range(12)] + [asks("w11", "w20")]
    packed(tmp_path, rows)
    run = pack(
        "repack",
        tmp_path / "packed",
        "--output",
        tmp_path / "again",
        "--max-length",
        128,
        "--strategy",
        "spread",
    )
    assert run.code == 0, run.err
    assert_verified(tmp_path / "again")
    assert images_of(tmp_path / "again") == images_of(tmp_path / "packed")
    run = pack("repack", tmp_path / "packed", "--output", tmp_path / "wrapped", "--strategy", "wrapped")
    assert run.code == 2 and not (tmp_path / "wrapped").exists()


def test_folders_with_and_without_images_go_together_and_keep_the_rule(tmp_path: Path) -> None:
    picture(tmp_path / "x.png", 140, 112)
    write_lines(tmp_path / "seen.jsonl", [asks("<image>", "w20", images=["x.png"])])
    write_lines(tmp_path / "said.jsonl", [asks("w21", "w20")])
    blind = vision_tokenizer(tmp_path / "blind", processor=None)
    sharp = vision_tokenizer(tmp_path / "sharp", processor={**QWEN25, "max_pixels": 4 * 28 * 28})
    sees = vision_tokenizer(tmp_path / "sees")
    for name, source, tokenizer in (("a", "said", blind), ("b", "seen", sees), ("c", "seen", sharp)):
        options = ("--tokenizer", tokenizer, "--max-length", 64, "--output", tmp_path / name)
        assert pack("build", tmp_path / f"{source}.jsonl", *options).code == 0
    both, again = tmp_path / "both", tmp_path / "again"
    assert pack("repack", tmp_path / "a", tmp_path / "b", "--output", both).code == 0
    rule = PackedReader(tmp_path / "b").manifest.options["image_rule"]
    assert PackedReader(both).manifest.options["image_rule"] == rule
    assert pack("verify", both).code == 0
    assert pack("repack", both, tmp_path / "b", "--output", again).code == 0
    other = pack("repack", *(tmp_path / name for name in "abc"), "--output", tmp_path / "none")
    assert other.code == 2 and "was built with the image rule" in other.err


def test_a_trainer_without_eyes_is_not_tried_on_images(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    picture(tmp_path / "x.png", 140, 112)
    rows = write_lines(tmp_path / "rows.jsonl", [asks("<image>", "w20", images=["x.png"])] * 2)
    options = ("--tokenizer", vision_tokenizer(tmp_path / "tokenizer"), "--max-length", 64)
    assert pack("build", rows, *options, "--output", tmp_path / "packed").code == 0
    run = pack("verify", tmp_path / "packed", "--trainer", "hf")
    assert run.code == 2 and "has images" in run.err


def test_inspect_writes_a_placeholder_once_for_each_image(tmp_path: Path) -> None:
    names = pictures(tmp_path, (56, 84))
    packed(tmp_path, [asks("<image> w10", "w20", images=names)])
    run = pack("inspect", tmp_path / "packed", "--json")
    (sequence,) = run.json["sequences"]
    assert "<|vision_start|> <|image_pad|> <|vision_end|> w10" in " ".join(sequence["text"].split())
    assert sequence["text"].count("image_pad") == 1


def test_a_plan_gives_the_images_of_its_sequences(tmp_path: Path) -> None:
    names = pictures(tmp_path, (56, 56), (84, 56), (84, 84))
    packed(tmp_path, [asks("<image> w10", "w20", images=[names[n % 3]]) for n in range(12)])
    assert (
        pack("repack", tmp_path / "packed", "--plan-only", "other", "--seed", 3, "--strategy", "spread").code
        == 0
    )
    stored, planned = (
        {
            int(number): text
            for one in PackedReader(tmp_path / "packed", plan=plan)
            for number, text in zip(one.sequence_ids, one.extras["images"], strict=True)
        }
        for plan in (None, "other")
    )
    assert stored == planned


def test_exports_keep_the_images_or_refuse(tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    packed(tmp_path, [asks("<image> w10", "w20", images=["0.png"]), asks("w10", "w20")])
    run = pack("export", tmp_path / "packed", "--to", "unpacked", "--output", tmp_path / "rows")
    assert run.code == 0, run.err
    told = datasets.load_from_disk(str(tmp_path / "rows"))["images"]
    assert sorted(map(len, told)) == sorted(
        len(text) for one in PackedReader(tmp_path / "packed") for text in one.extras["images"]
    )
    for to in ("llamafactory", "axolotl"):
        run = pack("export", tmp_path / "packed", "--to", to, "--output", tmp_path / "other")
        assert run.code == 2 and "has images" in run.err
        assert not (tmp_path / "other").exists()


def test_a_program_gives_the_folder_of_the_images(tmp_path: Path) -> None:
    picture(tmp_path / "photos" / "0.png", 56, 56)
    source = write_lines(tmp_path / "rows.jsonl", [asks("<image>", "w20", images=["0.png"])])
    tokenizer = vision_tokenizer(tmp_path / "tokenizer")
    pack_dataset(
        PackConfig(
            sources=(str(source),),
            tokenizer=str(tokenizer),
            max_length=64,
            output=str(tmp_path / "packed"),
            image_root=str(tmp_path / "photos"),
        )
    )
    rule = PackedReader(tmp_path / "packed").manifest.options["image_rule"]
    assert rule == {
        "token_id": IMAGE_PAD,
        **{name: QWEN25[name] for name in ("patch_size", "merge_size", "min_pixels", "max_pixels")},
    }


def rows_of_tables(folder: Path) -> Any:
    """Records whose images lie in them: one of two images, one of text, one image that is turned."""
    names = [picture(folder / "0.png", 56, 84), picture(folder / "1.jpg", 84, 56)]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(folder / "1.jpg").save(folder / "2.jpg", exif=exif)
    held = [{"bytes": (folder / name).read_bytes(), "path": None} for name in (*names, "2.jpg")]
    turns = [asks("<image> w10 <image>", "w20"), asks("w11", "w20"), asks("<image> w12", "w20")]
    columns = [row["messages"] for row in turns]
    return {"messages": columns, "images": [held[:2], [], held[2:]]}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "object", "typeless"])
def test_images_in_a_table_are_measured_and_referred_to_by_their_place(tmp_path: Path, kind: str) -> None:
    content = rows_of_tables(tmp_path)
    dataset = datasets.Dataset.from_dict(content)
    if kind != "typeless":
        dataset = dataset.cast_column("images", datasets.List(datasets.Image()))
    source: Any = str(tmp_path / "rows.parquet")
    if kind == "arrow":
        source = str(tmp_path / "saved")
        dataset.save_to_disk(source)
    elif kind == "object":
        source = dataset
    else:
        dataset.to_parquet(source)
    tokenizer = vision_tokenizer(tmp_path / "tokenizer")
    output = str(tmp_path / "packed")
    pack_dataset(PackConfig(sources=(source,), tokenizer=str(tokenizer), max_length=64, output=output))
    assert_verified(Path(output))
    ids = {number: ids for number, (ids, _) in sequences_of(Path(output)).items()}
    assert ids[0] == [*HEAD, *see(6), 10, *see(6), *TAIL, *ANSWER]
    told = images_of(Path(output))
    assert [image.grid for image in told[0]] == [(1, 6, 4), (1, 4, 6)]
    assert told[1] == [] and told[2][0].grid == (1, 6, 4)  # upright
    places = [read_embedded(image.image) for image in (*told[0], *told[2])]
    assert [place[1:] for place in places if place] == [(0, "images", 0), (0, "images", 1), (2, "images", 0)]
    name = PackedReader(output).manifest.sources[0].path
    assert {place.source for place in places if place} == {name}
    batch = collate(list(PackedReader(output)))
    with pytest.raises(CollateError, match=r"give load=images_in\(dataset\)"):
        with_pixels(batch, image_processor(QWEN25))
    found = with_pixels(batch, image_processor(QWEN25), load=images_in(dataset))
    assert len(found["pixel_values"]) == 18 * 4


def test_a_table_of_single_images_and_paths_is_read_too(tmp_path: Path) -> None:
    held = rows_of_tables(tmp_path)["images"]
    rows = {
        "messages": [asks("<image>", "w20")["messages"], asks("w10", "w20")["messages"]] * 2,
        "image": [held[0][0], None, {"bytes": None, "path": "0.png"}, None],
    }
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    built(tmp_path / "rows.parquet", tmp_path / "packed", *with_tokenizer(tmp_path))
    assert [[i.image for i in mine] for _, mine in sorted(images_of(tmp_path / "packed").items())] == [
        *(["rows.parquet#0/image/0"], [], ["0.png"], [])
    ]


def test_bytes_that_are_no_image_are_refused(tmp_path: Path) -> None:
    rows = {"messages": [asks("<image>", "w20")["messages"]], "images": [[{"bytes": b"text", "path": None}]]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    run = build(tmp_path / "rows.parquet", tmp_path / "out", *with_tokenizer(tmp_path))
    assert run.code == 2 and "image 1 (rows.parquet#0/images/0) cannot be read" in run.err
