"""`pack(...)`: one line from records to packs, and the second time none of the work."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from building import TOKENIZER

from padless.packer import pack, pipeline
from padless.packer.errors import InputError
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
    assert sorted(os.listdir(tmp_path)) == ["packs", "records", "tokenizers"]


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
        (RECORDS, {"columns": {"text": object()}}, "no plain value"),
        (RECORDS, {"strategy": "best"}, "strategy"),
    ],
)
def test_wrong_use_is_told(tmp_path: Path, data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack(data, TOKENIZER, max_length=32, cache=tmp_path, **options)


def test_what_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="int is no tokenizer"):
        pack(RECORDS, 7, max_length=32, cache=tmp_path)
