"""The fast tokenizer is trusted only after the reference gave the same ids."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from padless.packer import PackConfig, encode
from padless.packer.encode import Encoder, byte_lengths, hard_strings
from padless.packer.errors import InputError
from padless.packer.pipeline import build
from padless.packer.reference import ReferenceProcess, encode_groups, load_reference
from padless.packer.tokenizer_files import read_files, take_loading
from padless.runtime.reader import PackedReader

TOKENIZERS = ("qwen3", "llama3.1", "gpt2", "mistral-sp")


def config(demo_data: Path, output: Path, **more: object) -> PackConfig:
    values = {"max_length": 1024, "workers": 2, **more}
    return PackConfig(
        sources=(str(demo_data / "instructions.jsonl"),),
        tokenizer=str(demo_data / "tokenizer"),
        output=str(output),
        **values,  # type: ignore[arg-type]
    )


def shards(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("shard-*"))]


def test_the_reference_in_a_process_of_its_own_answers_as_it_does_here(demo_data: Path) -> None:
    folder = str(demo_data / "tokenizer")
    groups = [(False, hard_strings(["<|im_end|>"])), (True, ["a<|im_end|>b", ""])]
    process = ReferenceProcess(folder)
    process.ask(groups)
    child = process._child
    assert child is not None
    answer = process.answer()
    assert child.returncode == 0, "the child itself must have answered"
    assert answer == encode_groups(load_reference(folder), groups)
    assert sum(map(sum, answer.lengths)) == sum(map(len, answer.ids)) > 1000


def test_a_child_that_dies_is_stood_in_for(demo_data: Path) -> None:
    process = ReferenceProcess(str(demo_data / "tokenizer"))
    process.stop()
    process.ask([(False, ["one two"])])
    answer = process.answer()
    assert len(answer.ids[0]) == answer.lengths[0][0] > 0


def test_what_stands_before_a_text_is_what_the_tokenizer_itself_puts_there(shared: Path) -> None:
    found = {}
    for name in TOKENIZERS:
        reference = load_reference(str(shared / "tokenizers" / name))
        found[name] = encode_groups(reference, []).begin_ids
    assert found == {"qwen3": (), "llama3.1": (128000,), "gpt2": (), "mistral-sp": (1,)}


@pytest.mark.shared
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_fast_backend_is_taken_and_gives_the_reference_ids(name: str, shared: Path) -> None:
    loading = take_loading(str(shared / "tokenizers" / name))
    encoder = Encoder(loading.files)
    texts = ["a sample", "Zeile\r\nzwei", "नमस्ते दुनिया", "<|im_end|></s>"]
    encoder.prepare_check(loading, texts, [False, True], at_once=True)
    encoder.take_fast(loading)
    assert encoder.was_right()
    assert encoder.backend == "fastokens"
    for plain in (False, True):
        ids, offsets = encoder.flat(texts, plain=plain)
        encoder_ids = [encoder.with_offsets(text, plain=plain)[0] for text in texts]
        assert ids.tolist() == [token for item in encoder_ids for token in item]
        assert np.diff(offsets).tolist() == [len(item) for item in encoder_ids]


@pytest.mark.shared
@pytest.mark.parametrize(("name", "fast"), [("qwen3", True), ("mistral-sp", False)])
def test_an_encoder_that_travelled_is_the_same_without_its_folder(
    name: str, fast: bool, shared: Path, tmp_path: Path
) -> None:
    loading = take_loading(str(shutil.copytree(shared / "tokenizers" / name, tmp_path / "tokenizer")))
    encoder = Encoder(loading.files)
    if fast:
        encoder.prepare_check(loading, [], [False], at_once=True)
        encoder.take_fast(loading)
    sent = pickle.dumps(encoder)
    texts = ["a sample", "Zeile\r\nzwei", "नमस्ते दुनिया", "<|im_end|></s>"]
    expected = [[part.tolist() for part in encoder.flat(texts, plain=plain)] for plain in (False, True)]
    offsets = [encoder.with_offsets(text, plain=True) for text in texts]
    loading.stop()
    shutil.rmtree(tmp_path / "tokenizer")
    found = pickle.loads(sent)
    assert found.backend == encoder.backend == ("fastokens" if fast else "tokenizers")
    assert [[part.tolist() for part in found.flat(texts, plain=plain)] for plain in (False, True)] == expected
    assert [found.with_offsets(text, plain=True) for text in texts] == offsets
    assert (found.largest_id, found.vocab_size) == (encoder.largest_id, encoder.vocab_size)
    assert found.files.special_contents == encoder.files.special_contents


@pytest.mark.shared
def test_byte_lengths_add_up_to_the_text_where_the_vocabulary_is_byte_level(shared: Path) -> None:
    for name in ("qwen3", "llama3.1", "gpt2"):
        folder = str(shared / "tokenizers" / name)
        lengths = byte_lengths(read_files(folder))
        assert lengths is not None
        reference = load_reference(folder)
        for text in ("plain words", "日本語 and ünïcode 👩‍👩‍👧", "\t \n", "مرحبا"):
            assert lengths[reference.encode(text, add_special_tokens=False).ids].sum() == len(text.encode())
    assert byte_lengths(read_files(str(shared / "tokenizers" / "mistral-sp"))) is None


def test_a_fast_backend_that_differs_is_put_away_and_everything_encoded_again(
    demo_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = build(config(demo_data, tmp_path / "right"))
    assert right.backends["tokenizer"] == "fastokens"
    true_flat = encode._flat_fast

    def off_by_one(fast: object, texts: list[str], plain: bool) -> tuple[encode.Ids, np.ndarray]:
        ids, offsets = true_flat(fast, texts, plain)
        return np.maximum(ids - 1, 0), offsets

    monkeypatch.setattr(encode, "_flat_fast", off_by_one)
    for name, shadow in (("threads", 2**30), ("processes", 0)):
        monkeypatch.setattr("padless.packer.tokenizing.SHADOW_BYTES", shadow)
        found = build(config(demo_data, tmp_path / name))
        assert found.backends["tokenizer"].startswith("tokenizers (fastokens: its ids differ")
        assert shards(tmp_path / name) == shards(tmp_path / "right")


def test_a_tokenizer_that_fastokens_cannot_load_goes_through_the_reference(
    demo_data: Path, tmp_path: Path
) -> None:
    words = {"<pad>": 0, "a": 1, "b": 2, "c": 3, "[UNK]": 4}
    folder = tmp_path / "words"
    folder.mkdir()
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    source = tmp_path / "texts.txt"
    source.write_text("a b c\nc b\nb q a\n")
    result = build(
        PackConfig(
            sources=(str(source),),
            tokenizer=str(folder),
            max_length=8,
            output=str(tmp_path / "out"),
            eos="none",
        )
    )
    assert result.backends["tokenizer"].startswith("tokenizers (fastokens: ")
    packs = PackedReader(tmp_path / "out")
    found = sorted(
        pack.input_ids[end - length : end].tolist()
        for pack in packs
        for length, end in zip(pack.seq_lengths, np.cumsum(pack.seq_lengths), strict=True)
    )
    assert found == [[1, 2, 3], [2, 4, 1], [3, 2]]


def test_a_broken_tokenizer_is_said_to_be_broken(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer folder"):
        read_files(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        read_files(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(InputError, match="cannot be read"):
        read_files(str(tmp_path))
