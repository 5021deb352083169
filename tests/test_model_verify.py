"""`pack-dataset verify DIR --model`: data against a configuration, isolation of a small model of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from building import pack
from packed import Folder, count_up, write_folder

from padless.runtime.errors import IsolationError, ModelError
from padless.runtime.model_verify import verify_model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_folder(tmp_path / "packed", Folder(packs=[count_up(3, 5)]))
    return tmp_path / "packed"


def write_config(folder: Path, config: Any, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict() | changes))
    return folder


def test_a_model_that_fits_is_said_to_by_file_and_by_folder(tmp_path: Path, data: Path) -> None:
    folder = write_config(tmp_path / "model", transformers.Qwen3Config(hidden_size=64, head_dim=16))
    for model in (folder, folder / "config.json"):
        run = pack("verify", str(data), "--model", str(model))
        assert run.code == 0, run.err
        assert "keeps sequences apart" in run.out and "ids up to 300 of 151936" in run.out


def test_a_model_with_too_few_embeddings_is_a_failed_check(tmp_path: Path, data: Path) -> None:
    folder = write_config(tmp_path / "model", transformers.LlamaConfig(hidden_size=64, vocab_size=300))
    run = pack("verify", str(data), "--model", str(folder), "--json")
    assert run.code == 1
    last = json.loads(run.out)["checks"][-1]
    assert last["name"] == f"model {folder}" and "ids up to 300" in last["detail"] and not last["ok"]


SMALL: dict[str, Any] = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("kind", ["Gemma3Text", "Mistral", "GptOss", "Qwen3Moe"])
def test_windows_sinks_and_experts_are_kept_in_the_small_model(tmp_path: Path, data: Path, kind: str) -> None:
    config = getattr(transformers, kind + "Config")(**SMALL, head_dim=16)
    assert "keeps sequences apart" in verify_model(write_config(tmp_path / "model", config), data)


def test_recurrent_layers_without_their_kernels_are_a_failed_check(tmp_path: Path, data: Path) -> None:
    config = transformers.Lfm2Config(
        **SMALL, layer_types=["conv", "conv", "full_attention"] * 2, num_hidden_layers=6
    )
    folder = write_config(tmp_path / "model", config)
    with pytest.raises(IsolationError):
        verify_model(folder, data)


@pytest.mark.parametrize(
    "config",
    [
        "{", '{"model_type": "unheard_of"}', "{}", '{"model_type": "qwen3", "hidden_size": "a"}',
        '{"model_type": "mamba2", "hidden_size": 64, "head_dim": 16}',
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_told(tmp_path: Path, data: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="no configuration"):
        verify_model(tmp_path / "config.json", data)


def test_a_model_that_is_not_there_is_wrong_use(tmp_path: Path, data: Path) -> None:
    run = pack("verify", str(data), "--model", str(tmp_path / "nowhere"))
    assert run.code == 2 and "nowhere does not exist" in run.err
