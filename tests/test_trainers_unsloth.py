"""Unsloth's own packing module on packs in TRL's trainer, and its rotary kernels beside ours.

Unsloth refuses to be imported without a GPU, so its one module that reads `seq_lengths` is loaded by itself
and does to a trainer what Unsloth does; its patched models are not part of this. Its kernels run under
Triton's interpreter as bench_rope calls them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

try:
    UNSLOTH = distribution("unsloth")
except PackageNotFoundError:
    pytest.skip("run by scripts/test-trainers unsloth", allow_module_level=True)

import datasets  # noqa: E402
import torch  # noqa: E402
from conftest import ROOT  # noqa: E402
from trainer_proofs import Given, after, assert_same_loss, packs_of_demo, places  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402
from unpacked import tiny_model  # noqa: E402

from padless.runtime.reader import PackedReader  # noqa: E402


def packing() -> Any:
    """unsloth/utils/packing.py as a module."""
    path = str(UNSLOTH.locate_file("unsloth/utils/packing.py"))
    spec = importlib.util.spec_from_file_location("unsloth_packing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_boundaries_are_those_of_the_packs(tmp_path: Path) -> None:
    unsloth, packed = packing(), packs_of_demo(tmp_path)
    trainer = SFTTrainer(
        model=tiny_model(vocab=4096),
        args=SFTConfig(
            output_dir=str(tmp_path / "out"), packing=False, padding_free=True, max_length=None,
            per_device_train_batch_size=2, train_sampling_strategy="sequential", bf16=False, use_cpu=True,
            report_to="none", dataloader_drop_last=False,
        ),
        train_dataset=datasets.load_from_disk(str(packed)),
        processing_class=AutoTokenizer.from_pretrained(packed / "tokenizer"),
    )  # fmt: skip
    unsloth.enable_padding_free_metadata(trainer.model, trainer)
    rows, found = [], []
    for batch in trainer.get_train_dataloader():
        assert "attention_mask" not in batch and len(batch["input_ids"]) == 1
        lengths, cu_seqlens, longest = unsloth.get_packed_info_from_kwargs(batch, torch.device("cpu"))
        assert cu_seqlens[-1] == batch["input_ids"].numel() and longest == int(lengths.max())
        found += lengths.tolist()
        rows.append(
            Given(
                input_ids=batch["input_ids"][0],
                next_labels=after(batch["labels"][0]),
                position_ids=places(lengths.tolist()),
            )
        )
    assert found == [length for row in PackedReader(packed) for length in row.seq_lengths.tolist()]
    assert_same_loss("unsloth", "its packing module alone (no GPU) in TRL's `SFTTrainer`", packed, rows)


ROTATE = """
import sys
from pathlib import Path
import torch
from peer_unsloth import load_unsloth
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from padless.kernels.qk_norm_rope import qk_norm_rope
from padless.kernels.rope import rope_qk
from padless.kernels.rope_tables import rope_tables

unsloth = load_unsloth(Path(sys.argv[1]))
torch.cuda.current_device, torch.cuda.get_device_capability = lambda: 0, lambda *_: (9, 0)  # it asks both
ids = torch.arange(40)[None] % 13
q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16)
norms = [Qwen3RMSNorm(16) for _ in "qk"]
for norm in norms:
    torch.nn.init.normal_(norm.weight)
cos, sin = rope_tables(64, 16)
whole = cos.repeat(1, 2), sin.repeat(1, 2)
ours = rope_qk(q, k, cos, sin, position_ids=ids)
normed = qk_norm_rope(q, k, *(norm.weight for norm in norms), cos, sin, position_ids=ids)
theirs = unsloth.rope(q.transpose(1, 2), k.transpose(1, 2), *whole, ids.int())
norm_theirs = unsloth.norm_rope(*norms, q, k, *whole, ids.int())
for mine, their in zip((*ours, *normed), (*theirs, *norm_theirs), strict=True):
    torch.testing.assert_close(mine, their.transpose(1, 2))
"""


def test_its_rotary_kernels_turn_packed_rows_as_ours_do() -> None:
    path = os.pathsep.join([str(ROOT / "scripts"), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-c", ROTATE, str(UNSLOTH.locate_file(""))], check=True, env=environment, timeout=300
    )
