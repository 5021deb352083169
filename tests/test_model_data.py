"""Data that do not fit a model are told before training: ids, lengths, tokenizers, what kernels count."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from packed import Folder, Seq, count_up, edit_manifest, write_folder
from tiny_models import tiny

from padless.runtime.errors import ModelError, NotPackedError
from padless.runtime.model_data import ModelFacts
from padless.runtime.model_data import check_data as check
from padless.runtime.models import prepare_model


def check_data(model: Any, data: Path | str, attention: str = "auto") -> str:
    return check(ModelFacts.of_model(model), data, attention)


def folder(path: Path, *lengths: int, largest_id: int = 95, tokenizer: bytes = b"{}\n") -> Path:
    write_folder(
        path,
        Folder(
            packs=[count_up(*lengths)],
            max_length=4096,
            largest_id=largest_id,
            tokenizer={"tokenizer.json": tokenizer},
        ),
    )
    return path


def test_data_that_fit_are_said_to(tmp_path: Path) -> None:
    said = check_data(tiny("llama"), folder(tmp_path / "packed", 3, 128))
    assert said == "ids up to 95 of 96, sequences up to 128 of 128 tokens"
    prepare_model(tiny("llama"), data=tmp_path / "packed")


def test_ids_without_an_embedding_are_refused_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ModelError, match="ids up to 96 and LlamaForCausalLM has 96 embeddings"):
        prepare_model(model, data=folder(tmp_path / "packed", 3, largest_id=96))
    assert not model.model._forward_pre_hooks


def test_sequences_beyond_the_models_positions_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"129 tokens .* 128 positions .* repack --max-length 128"):
        check_data(tiny("llama"), folder(tmp_path / "packed", 3, 129))


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [], "version": "1.0"}, True),
        ({"model": {"vocab": {"b": 0}}, "added_tokens": []}, False),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<new>"}]}, False),
    ],
    ids=["saved again", "other words", "a further token"],
)
def test_a_tokenizer_with_other_ids_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, Any], fits: bool
) -> None:
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path / "cache"))
    ours = {"model": {"vocab": {"a": 0}}, "added_tokens": []}
    data = folder(tmp_path / "packed", 3, tokenizer=json.dumps(ours).encode())
    edit_manifest(data, lambda manifest: manifest["tokenizer"].update(fingerprint="sha256:00"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(theirs))
    model = tiny("llama")
    model.name_or_path = str(tmp_path / "model")
    if fits:
        check_data(model, data)
        check_data(model, f"file://{data}")
    else:
        with pytest.raises(ModelError, match="has other ids; build with --tokenizer"):
            check_data(model, data)


def test_packs_beyond_flash_attention_2_are_refused_or_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = [Seq([1]) for _ in range(9000)]
    write_folder(tmp_path / "packed", Folder(packs=[many], max_length=9000, largest_id=95))
    model = tiny("llama", hidden_size=64, num_attention_heads=64, num_key_value_heads=64)
    check_data(model, tmp_path / "packed")
    assert "FlashAttention-2's backward pass" in caplog.text
    with pytest.raises(ModelError, match="--max-sequences-per-pack"):
        check_data(model, tmp_path / "packed", "flash")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_data(tiny("llama"), tmp_path / "packed")
    assert not caplog.text


def test_what_is_no_packed_folder_is_told_by_the_reader(tmp_path: Path) -> None:
    with pytest.raises(NotPackedError):
        prepare_model(tiny("llama"), data=tmp_path)
