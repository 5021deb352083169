"""Axolotl itself: its plugin manager, its loading of data, its trainer, on packs and on single sequences."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
pytest.importorskip("axolotl", reason="run by scripts/test-trainers axolotl")

import torch  # noqa: E402
import yaml  # noqa: E402
from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.common.datasets import TrainDatasetMeta, load_datasets  # noqa: E402
from axolotl.integrations.base import PluginManager  # noqa: E402
from axolotl.train import setup_model_and_trainer  # noqa: E402
from building import MAX_LENGTH, built  # noqa: E402
from pictures import asks, picture, vision_tokenizer  # noqa: E402
from trainer_proofs import (  # noqa: E402
    TEETH,
    TOLERANCE,
    Given,
    after,
    assert_same_loss,
    exported,
    packs_of_demo,
    sequences_of,
    shown,
)
from unpacked import tiny_model  # noqa: E402

from padless.runtime.reader import PackedReader  # noqa: E402

PLUGIN = "padless.runtime.trainers.axolotl.PacksPlugin"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs_of_demo(tmp_path_factory.mktemp("axolotl"))


def configuration(packed: Path, folder: Path, **settings: Any) -> Any:
    """Axolotl's own, checked by it, for a tiny model on a CPU."""
    model = tiny_model(vocab=4096)
    model.save_pretrained(folder / "model")
    lines = {
        "base_model": str(folder / "model"),
        "tokenizer_config": str(packed / "tokenizer"),
        "special_tokens": {"pad_token": "<|endoftext|>"},
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": MAX_LENGTH,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "attn_implementation": "sdpa",
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "val_set_size": 0,
        **settings,
    }
    path = folder / "axolotl.yaml"
    path.write_text(yaml.safe_dump(lines))
    return load_cfg(str(path))


def test_the_plugin_gives_axolotls_trainer_the_packs(packed: Path, tmp_path: Path) -> None:
    data = [{"path": str(packed), "type": None}]
    cfg = configuration(
        packed, tmp_path, plugins=[PLUGIN], datasets=data, test_datasets=data, remove_unused_columns=False
    )
    meta = loaded(cfg)
    assert isinstance(meta, TrainDatasetMeta) and meta.total_num_steps == len(PackedReader(packed)) // 2
    trainer, *_ = setup_model_and_trainer(cfg, meta)
    rows = []
    for batch in trainer.get_train_dataloader():
        assert batch["input_ids"].shape[0] == 1 and "attention_mask" not in batch
        rows.append(
            Given(
                input_ids=batch["input_ids"][0].cpu(),
                next_labels=after(batch["labels"][0].cpu()),
                position_ids=batch["position_ids"][0].cpu(),
            )
        )
    assert_same_loss("axolotl", "`padless.runtime.trainers.axolotl`, its trainer's loader", packed, rows)
    evaluated = next(iter(trainer.get_eval_dataloader()))
    assert "attention_mask" not in evaluated and evaluated["cu_seq_lens_q"].numel() > 2


def test_its_trainer_trains_with_the_losses_of_single_sequences(packed: Path, tmp_path: Path) -> None:
    data = [{"path": str(packed), "type": None}]
    cfg = configuration(packed, tmp_path, plugins=[PLUGIN], datasets=data, remove_unused_columns=False)
    trainer, *_ = setup_model_and_trainer(cfg, loaded(cfg))
    model, seen = trainer.model, []
    before = copy.deepcopy(model).eval()

    def sees(module: Any, args: Any, inputs: dict[str, Any], output: Any) -> None:
        seen.append((inputs, float(output.loss)))

    hook = model.register_forward_hook(sees, with_kwargs=True)
    trainer.train()
    hook.remove()
    inputs, loss = seen[0]
    assert len(seen) == len(PackedReader(packed)) // 2 and "attention_mask" not in inputs
    lengths = inputs["cu_seq_lens_q"].diff().tolist()
    total, targets = 0.0, 0
    ids, labels = (inputs[name].cpu().split(lengths, dim=1) for name in ("input_ids", "labels"))
    with torch.no_grad():
        for one, label in zip(ids, labels, strict=True):
            if trained := int((label != -100).sum()):
                total += float(before.cpu()(input_ids=one, labels=label).loss) * trained
                targets += trained
        mixed = float(before(input_ids=inputs["input_ids"].cpu(), labels=inputs["labels"].cpu()).loss)
    far = abs(mixed - total / targets)
    assert len(lengths) > 2 and far > TEETH
    assert loss == pytest.approx(total / targets, abs=TOLERANCE)
    how = "`padless.runtime.trainers.axolotl`, its trainer's training"
    shown("axolotl", how, sequences=len(lengths), apart=abs(loss - total / targets), mixed=far)


def loaded(cfg: Any) -> Any:
    """What Axolotl asks its plugins for, once it has checked the configuration."""
    return PluginManager.get_instance().load_datasets(cfg)


@pytest.mark.parametrize(
    "setting",
    [
        {"sample_packing": True},
        {"batch_flattening": True},
        {"val_set_size": 0.1},
        {"remove_unused_columns": None},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_would_spoil_packs_are_refused(
    packed: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    """`batch_flattening` is set behind Axolotl's own check, which lets it pass under FlashAttention alone."""
    plain = {"datasets": [{"path": str(packed), "type": None}], "remove_unused_columns": False}
    flattens = "batch_flattening" in setting
    cfg = configuration(packed, tmp_path, plugins=[PLUGIN], **plain | ({} if flattens else setting))
    cfg |= setting
    with pytest.raises(ValueError, match=next(iter(setting))):
        loaded(cfg)


def test_what_an_entry_says_beside_its_path_is_refused(packed: Path, tmp_path: Path) -> None:
    for name, value in (("type", "alpaca"), ("shards", 4), ("chat_template", "chatml")):
        entry = {"path": str(packed), "type": None, name: value}
        cfg = configuration(packed, tmp_path, plugins=[PLUGIN], datasets=[entry], remove_unused_columns=False)
        with pytest.raises(ValueError, match=f"{name} would be passed over"):
            loaded(cfg)


def test_a_split_of_a_folder_of_splits_is_taken_by_its_name(tmp_path: Path) -> None:
    packs_of_demo(tmp_path, "--eval-fraction", 0.3)
    folder = tmp_path / "packed"
    cfg = configuration(
        folder / "train",
        tmp_path,
        plugins=[PLUGIN],
        datasets=[{"path": str(folder), "split": "train", "type": None}],
        test_datasets=[{"path": str(folder), "split": "validation", "type": None}],
        remove_unused_columns=False,
    )
    meta = loaded(cfg)
    assert len(meta.train_dataset) == len(PackedReader(folder / "train"))
    assert len(meta.eval_dataset) == len(PackedReader(folder / "validation"))
    cfg.datasets[0].split = None
    with pytest.raises(ValueError, match="folder of splits"):
        loaded(cfg)


def weighted(folder: Path) -> str:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "weight": 0.5}]
    write(folder, {"messages": turns})
    return "loss_weight"


def seen(folder: Path) -> str:
    picture(folder / "0.png", 56, 56)
    record = asks("<image> w10", "w20", images=["0.png"])
    write(folder, record, "--tokenizer", vision_tokenizer(folder / "vision"))
    return "images"


def taught(folder: Path) -> str:
    write(folder, {"input_ids": [5, 6], "teacher_ids": [[5], [6]], "teacher_logprobs": [[-0.5], [-0.25]]})
    return "teacher_ids, teacher_logprobs"


def compared(folder: Path) -> str:
    write(folder, {"prompt": "hi", "chosen": "yo", "rejected": "no", "margin": 0.5})
    return "margin"


def write(folder: Path, record: dict[str, Any], *more: object) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(record) + "\n")
    built(folder / "rows.jsonl", folder / "packed", *more)


@pytest.mark.parametrize("made", [weighted, seen, taught, compared], ids=lambda made: made.__name__)
def test_folders_with_further_columns_are_refused(made: Callable[[Path], str], tmp_path: Path) -> None:
    columns, folder = made(tmp_path), tmp_path / "packed"
    data = [{"path": str(folder), "type": None}]
    cfg = configuration(folder, tmp_path, plugins=[PLUGIN], datasets=data, remove_unused_columns=False)
    with pytest.raises(ValueError, match=f"further columns .*{columns}"):
        loaded(cfg)


def test_axolotls_own_loading_takes_the_export_of_sequences(packed: Path, tmp_path: Path) -> None:
    """It knows tokenized rows by their columns, and packs them itself."""
    out = exported(packed, "axolotl")
    settings = yaml.safe_load((out / "axolotl.yaml").read_text())
    settings["datasets"][0]["path"] = str(out)
    cfg = configuration(packed, tmp_path, **settings)
    data = load_datasets(cfg=cfg).train_dataset
    found = sorted((row["input_ids"], row["labels"]) for row in data)
    assert found == sorted(sequences_of(packed)) and "position_ids" in data.column_names
    shown("axolotl", "`--to axolotl`, its loading for sample packing", sequences=len(found))
