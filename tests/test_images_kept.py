"""Images stay with their sequences: any number of workers, stores, plans, exports, tables that hold them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from building import (
    assert_verified,
    build,
    built,
    files_of,
    pack,
    sequences_of,
    workers_in,
    write_lines,
)
from packed_pictures import ANSWER, HEAD, TAIL, images_of, packed, refused, see, with_tokenizer
from pictures import (
    IMAGE_PAD,
    QWEN25,
    asks,
    image_processor,
    picture,
    pictures,
    vision_tokenizer,
)
from PIL import Image

from padless.packer import PackConfig, commit, engine, pack_dataset
from padless.packer.chunk import ChunkResult
from padless.packer.elements import gather_of, lay_elements, lay_images
from padless.packer.gather_part import part_of
from padless.packer.lines import LINE
from padless.packer.tables import collect
from padless.packer.token_store import ChunkStore, Counter, Reserved
from padless.packer.write import write_shard
from padless.runtime.collate import collate
from padless.runtime.errors import CollateError
from padless.runtime.images import read_embedded
from padless.runtime.pixels import images_in, with_pixels
from padless.runtime.reader import PackedReader


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
