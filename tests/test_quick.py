"""`pack(...)`: one line from records to packs, and the second time none of the work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import TOKENIZER
from hub_stand_in import Repository, commit_of, stand_in

from padless.packer import pack, pipeline, quick
from padless.packer.errors import InputError
from padless.packer.work_folder import WorkFolder
from padless.runtime.reader import PackedReader

RECORDS = [{"text": "word " * n} for n in (3, 9, 4, 7, 12, 5)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The builds that were run."""
    made: list[Any] = []
    run = pipeline.pack_dataset

    def counted(config: Any) -> Any:
        made.append(config)
        return run(config)

    monkeypatch.setattr(pipeline, "pack_dataset", counted)
    return made


def ids(packs: Any) -> list[list[int]]:
    return [pack.input_ids.tolist() for pack in packs.reader]


def test_a_second_call_opens_what_the_first_one_made(tmp_path: Path, calls: list[Any]) -> None:
    first = pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path)
    again = pack([dict(record) for record in RECORDS], str(TOKENIZER), max_length=32, cache=tmp_path)
    assert len(calls) == 1 and first.path == again.path and ids(first) == ids(again)
    assert sum(len(p.seq_lengths) for p in first.reader) == len(RECORDS)


@pytest.mark.parametrize(
    "change",
    [{"max_length": 48}, {"strategy": "none"}, {"eos": "none"}, {"records": RECORDS[:-1]}],
    ids=lambda change: next(iter(change)),
)
def test_other_data_or_options_are_packed_anew(
    tmp_path: Path, calls: list[Any], change: dict[str, Any]
) -> None:
    pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path)
    options = {"max_length": 32} | change
    pack(options.pop("records", RECORDS), TOKENIZER, cache=tmp_path, **options)
    assert len(calls) == 2
    assert len(os.listdir(tmp_path / "packs")) == 2


def test_strategy_none_gives_one_sequence_a_row(tmp_path: Path) -> None:
    packs = pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path, strategy="none")
    assert [len(p.seq_lengths) for p in packs.reader] == [1] * len(RECORDS)


def test_files_are_known_by_their_content(tmp_path: Path, calls: list[Any]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    for _ in range(2):
        first = pack(data, TOKENIZER, max_length=32, cache=tmp_path / "cache")
    data.write_text(json.dumps(RECORDS[0]) + "\n")
    second = pack(data, TOKENIZER, max_length=32, cache=tmp_path / "cache")
    assert len(calls) == 2 and len(first.reader.manifest.sources) == 1
    assert sum(len(p.seq_lengths) for p in second.reader) == 1


def test_a_template_is_known_by_its_content(tmp_path: Path, calls: list[Any]) -> None:
    template = tmp_path / "chat.jinja"
    chats = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}]

    def packed() -> list[list[int]]:
        words = {"template": str(template), "train_on": "all", "cache": tmp_path / "cache"}
        return ids(pack(chats, TOKENIZER, max_length=64, **words))

    template.write_text("{% for m in messages %}one {{ m.content }}{% endfor %}")
    first = packed()
    assert first == packed() and len(calls) == 1
    template.write_text("{% for m in messages %}another {{ m.content }}{% endfor %}")
    assert packed() != first and len(calls) == 2


def test_images_are_known_by_their_folder_and_by_what_they_are_now(tmp_path: Path, calls: list[Any]) -> None:
    pytest.importorskip("PIL")
    from pictures import asks, picture, vision_tokenizer

    tokenizer = vision_tokenizer(tmp_path / "tokenizer")
    line = json.dumps(asks("<image>", "w20", images=["x.png"])) + "\n"
    for folder, size in (("a", (140, 112)), ("b", (56, 56))):
        picture(tmp_path / folder / "x.png", *size)
        (tmp_path / folder / "rows.jsonl").write_text(line)

    def length(folder: str, **options: Any) -> int:
        data = tmp_path / folder / "rows.jsonl"
        packs = pack(data, tokenizer, max_length=64, cache=tmp_path / "cache", **options)
        return int(packs.reader[0].num_tokens)

    for _ in range(2):
        assert length("a") - length("b") == 16
    assert length("b", image_root=str(tmp_path / "a")) == length("a")
    assert len(calls) == 2
    picture(tmp_path / "b" / "x.png", 140, 112)
    os.utime(tmp_path / "b" / "x.png", (1, 1))
    for _ in range(2):
        assert length("b") == length("a")
    assert len(calls) == 3


def test_a_suffix_says_how_the_same_bytes_are_read(tmp_path: Path) -> None:
    found = []
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_text('{"text": "hello there"}\n')
        found.append(ids(pack(tmp_path / name, TOKENIZER, max_length=32, cache=tmp_path / "cache")))
    assert found[0] != found[1]


def test_a_folder_is_known_by_its_files(tmp_path: Path, calls: list[Any]) -> None:
    (tmp_path / "data").mkdir()
    for number in (1, 2):
        (tmp_path / "data" / f"{number}.jsonl").write_text(json.dumps(RECORDS[number]) + "\n")
        for _ in range(2):
            packs = pack(tmp_path / "data", TOKENIZER, max_length=32, cache=tmp_path / "cache")
        assert len(calls) == number and sum(len(p.seq_lengths) for p in packs.reader) == number


def test_a_tokenizer_of_the_hub_is_known_by_its_files(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (TOKENIZER / "tokenizer.json").read_bytes()
    with stand_in() as hub:
        hub.repositories["models/org/tiny"] = Repository.of({"tokenizer.json": content})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        for _ in range(2):
            pack(RECORDS, "org/tiny", max_length=32, cache=tmp_path)
        assert len(calls) == 1
        hub.repositories["models/org/tiny"] = Repository(
            commits={commit_of("next"): {"tokenizer.json": content + b"\n"}}, refs={"main": commit_of("next")}
        )
        pack(RECORDS, "org/tiny", max_length=32, cache=tmp_path)
        assert len(calls) == 2


def test_what_changes_no_pack_makes_no_other_one(tmp_path: Path, calls: list[Any]) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER, tokenizer)
    pack(RECORDS, tokenizer, max_length=32, cache=tmp_path, workers=1, progress=lambda stage, counters: None)
    (tokenizer / "model.safetensors").write_bytes(b"weights of a model")
    pack(RECORDS, tokenizer, max_length=32, cache=tmp_path, workers=2)
    assert len(calls) == 1


def test_processes_that_ask_at_once_get_the_same_packs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text("".join(json.dumps({"text": f"words {n}"}) + "\n" for n in range(3000)))
    code = (
        "import sys; from padless.packer import pack; data, tokenizer, cache = sys.argv[1:]\n"
        "print(len(pack(data, tokenizer, max_length=64, cache=cache)))"
    )
    words = [sys.executable, "-c", code, str(data), str(TOKENIZER), str(tmp_path / "cache")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(words, **pipes) for _ in range(3)]
    told = [(run.communicate(), run.returncode) for run in running]
    assert all(code == 0 for _, code in told), told
    assert len({out for (out, _), _ in told}) == 1
    assert len(os.listdir(tmp_path / "cache" / "packs")) == 1


def test_who_comes_while_another_packs_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ids(pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path / "other"))
    (name,) = os.listdir(tmp_path / "other" / "packs")
    other = WorkFolder(str(tmp_path / "cache" / "packs" / name))
    waiting = threading.Event()
    wait = quick.wait_for_build

    def waited(output: str) -> None:
        waiting.set()
        wait(output)

    monkeypatch.setattr(quick, "wait_for_build", waited)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path / "cache"))
        try:
            assert waiting.wait(60) and not found.done()
        finally:
            other.remove()
        assert ids(found.result(60)) == wanted


def test_objects_of_datasets_and_transformers_are_taken(tmp_path: Path, calls: list[Any]) -> None:
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(TOKENIZER))
    for _ in range(2):
        packs = pack(datasets.Dataset.from_list(RECORDS), tokenizer, max_length=32, cache=tmp_path)
    assert len(calls) == 1
    assert ids(packs) == ids(pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path))
    rows = packs.to_hf()
    assert [row["input_ids"] for row in rows] == ids(packs)
    assert sorted(os.listdir(tmp_path)) == ["locks", "packs", "records", "tokenizers"]


def test_a_tokenizer_that_was_called_is_the_same_tokenizer(tmp_path: Path, calls: list[Any]) -> None:
    """BR-115: the truncation of a call stays with the object, and moves no key."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(TOKENIZER))
    first = pack(RECORDS, tokenizer, max_length=32, cache=tmp_path)
    tokenizer("one two three four five", truncation=True, max_length=4, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation is not None
    again = pack(RECORDS, tokenizer, max_length=32, cache=tmp_path)
    assert len(calls) == 1 and again.path == first.path
    assert tokenizer.backend_tokenizer.truncation is not None, "the user's own object is left as it is"


def test_arrays_are_lists(tmp_path: Path, calls: list[Any]) -> None:
    rows = [[5, 6, 7], [8, 9]]
    lists = pack([{"input_ids": row} for row in rows], TOKENIZER, max_length=32, cache=tmp_path)
    arrays = [{"input_ids": np.array(row, dtype=np.uint16)} for row in rows]
    assert pack(arrays, TOKENIZER, max_length=32, cache=tmp_path).path == lists.path and len(calls) == 1


def test_a_cache_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be kept in .*file .*; name another folder with cache="):
        pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path / "file")


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "kept"))
    packs = pack(RECORDS, TOKENIZER, max_length=32)
    assert packs.path.is_relative_to(tmp_path / "kept")
    assert isinstance(packs.reader, PackedReader)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "list is empty"),
        (42, {}, "int is nothing to pack"),
        (["text"], {}, "list is nothing to pack"),
        ([{"text": object()}], {}, "nothing that JSON can tell"),
        (RECORDS, {"output": "x"}, "output"),
        (RECORDS, {"columns": {"text": object()}}, "columns must give a column"),
        (RECORDS, {"eval_fractoin": 0.1}, "no option 'eval_fractoin'; near it: eval_fraction"),
        (RECORDS, {"eval_source": "x.jsonl"}, "near it: eval_sources"),
        (RECORDS, {"eval_fraction": 0.5}, "one split, and eval_fraction makes several"),
        (RECORDS, {"eval_sources": ("x.jsonl",)}, "one split, and eval_sources makes several"),
        (RECORDS, {"split": "train,test"}, "one split, and split='train,test' makes several"),
        (RECORDS, {"strategy": "best"}, "strategy"),
    ],
)
def test_wrong_use_is_told(tmp_path: Path, data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack(data, TOKENIZER, max_length=32, cache=tmp_path, **options)
    assert not (tmp_path / "packs").exists()


def test_what_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="int is no tokenizer"):
        pack(RECORDS, 7, max_length=32, cache=tmp_path)


@pytest.mark.parametrize("harm", ["missing shard", "cut shard", "cut manifest", "no state.json"])
def test_a_damaged_folder_of_the_cache_is_packed_anew(tmp_path: Path, calls: list[Any], harm: str) -> None:
    first = pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path)
    wanted = ids(first)
    shard = next(first.path.glob("shard-*.arrow"))
    if harm == "missing shard":
        shard.unlink()
    elif harm == "cut shard":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif harm == "cut manifest":
        (first.path / "manifest.json").write_bytes((first.path / "manifest.json").read_bytes()[:-20])
    else:
        (first.path / "state.json").unlink()
    again = pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path)
    assert len(calls) == 2 and again.path == first.path and ids(again) == wanted
    assert os.listdir(tmp_path / "packs") == [first.path.name]
    assert len(again.to_hf()) == len(again)


def test_cut_records_of_the_cache_are_written_anew(tmp_path: Path, calls: list[Any]) -> None:
    pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path)
    (kept,) = (tmp_path / "records").iterdir()
    kept.write_bytes(kept.read_bytes()[:20])
    pack(RECORDS, TOKENIZER, max_length=32, cache=tmp_path)
    assert len(calls) == 1
