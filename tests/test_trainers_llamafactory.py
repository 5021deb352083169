"""LLaMA-Factory's own loader and collator on what `export --to llamafactory` wrote."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

os.environ["DISABLE_VERSION_CHECK"] = "1"  # of packages that reading data does not need
if "torchaudio" not in sys.modules:  # for sounds alone, and PyPI has it for GPUs only
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
pytest.importorskip("llamafactory", reason="run by scripts/test-trainers llamafactory")

import torch  # noqa: E402
from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask  # noqa: E402
from llamafactory.data.loader import get_dataset  # noqa: E402
from llamafactory.data.template import TEMPLATES  # noqa: E402
from llamafactory.hparams import DataArguments  # noqa: E402
from trainer_proofs import Given, after, assert_same_loss, exported, packs_of_demo  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from padless.runtime.reader import PackedReader  # noqa: E402


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_of_demo(tmp_path_factory.mktemp("llamafactory"))


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_tokenized_path_and_neat_packing_train_what_was_packed(packed: Path, attention: str) -> None:
    arguments = DataArguments(tokenized_path=str(exported(packed, "llamafactory")), neat_packing=True)
    tokenizer = AutoTokenizer.from_pretrained(packed / "tokenizer")
    template = TEMPLATES["empty"]
    data = get_dataset(
        template, SimpleNamespace(), arguments, SimpleNamespace(), stage="sft", tokenizer=tokenizer
    )["train_dataset"]
    assert len(data) == len(PackedReader(packed))
    collator = SFTDataCollatorWith4DAttentionMask(
        tokenizer=tokenizer,
        template=template,
        pad_to_multiple_of=8,
        label_pad_token_id=-100,
        block_diag_attn=arguments.neat_packing,
        neat_packing=arguments.neat_packing,
        attn_implementation=attention,
        compute_dtype=torch.float32,
    )
    rows = []
    for row in data:
        batch = collator([row])
        mask = batch["attention_mask"]
        assert (mask is None) is (attention == "flash_attention_2")
        rows.append(
            Given(
                input_ids=batch["input_ids"][0],
                next_labels=after(batch["labels"][0]),
                position_ids=batch["position_ids"][0],
                attention_mask=mask,
            )
        )
    how = "its 4D mask" if attention == "sdpa" else "its rows for FlashAttention"
    assert_same_loss("llamafactory", f"`--to llamafactory`, its loader and collator, {how}", packed, rows)
