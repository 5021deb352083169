"""Whether a model's architecture keeps packed sequences apart, from its configuration alone.

Isolation hangs on code and kernels, not on weights: a model of the same kind is made with random weights,
a layer or more of each type, few ids, small MLPs and short windows, so that a configuration of any size
takes seconds and no weights are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from padless.runtime.errors import ModelError
from padless.runtime.model_data import ModelFacts, check_data
from padless.runtime.models import prepare_model

_AT_MOST = {
    "vocab_size": 256,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}
_LAYERS_WITHOUT_TYPES = 2


def verify_model(path: str | Path, data: str | Path) -> str:
    """Hold a packed folder against a model's config.json (or the folder it lies in); what was found.

    Raises ModelError or IsolationError for a model that would mix sequences or does not fit the data. No
    code of a model's own is run: its type has to be one of transformers.
    """
    file = Path(path)
    folder = file if file.is_dir() else file.parent
    config = _config(file / "config.json" if file.is_dir() else file)
    name = next(iter(config.architectures or ()), config.model_type)
    fits = check_data(ModelFacts.of_config(config.get_text_config(), name=name, folder=str(folder)), data)
    model, device = _small_model(config, name), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        model = model.to(device, torch.bfloat16)
    prepare_model(model.eval(), check=True)
    return f"{name} keeps sequences apart (on {device}, a small one with random weights); {fits}"


def _config(file: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except Exception as error:  # whatever transformers, and huggingface_hub for it, find wrong with it
        raise ModelError(f"{file} is no configuration that transformers knows: {error}") from None


def _small_model(config: Any, name: str) -> Any:
    import transformers

    kinds: Any = transformers.AutoModelForCausalLM
    text = config.get_text_config()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return kinds.from_config(type(text).from_dict(_smaller(text)))
    except Exception as error:  # whatever transformers finds wrong with it
        raise ModelError(f"a small {name} cannot be made from its configuration: {error}") from error


def _smaller(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = config.to_dict()
    for key, most in _AT_MOST.items():
        if isinstance(settings.get(key), int):
            settings[key] = min(settings[key], most)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        settings[key] = None
    settings["torch_dtype"] = settings["dtype"] = "float32"
    types = settings.get("layer_types")
    layers = _LAYERS_WITHOUT_TYPES
    if types:
        layers = max(types.index(kind) for kind in set(types)) + 1
        settings["layer_types"] = types[:layers]
    settings["num_hidden_layers"] = min(layers, settings.get("num_hidden_layers", layers))
    return settings
