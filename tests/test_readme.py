"""The README is true: its commands run, its options exist, its tables come from the raw rows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from building import DEMO, TOKENIZER, pack
from packed import Folder, Seq, write_folder

from padless.packer.formats import FORMATS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_option_that_the_readme_names_exists() -> None:
    known = {"--json"}
    for command in ("build", "estimate", "report", "inspect", "verify", "repack", "export", "push", "demo"):
        known |= set(re.findall(r"--[a-z][a-z-]+", pack(command, "--help").out))
    for script in (ROOT / "scripts").glob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', script.read_text()))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named and named <= known, named - known


def test_the_readmes_way_from_data_to_report_runs(tmp_path: Path) -> None:
    block = README.split("## Pack a data set")[1].split("```")[1]
    commands = [line.split("#")[0].split() for line in block.strip().splitlines()]
    assert [words[1] for words in commands] == ["build", "report", "inspect", "verify"]
    stand_ins = {"alpaca_data.json": str(DEMO), "qwen3/": str(TOKENIZER), "packed": str(tmp_path / "packed")}
    for words in commands:
        run = pack(*(stand_ins.get(word, word) for word in words[1:]))
        assert run.code == 0, (words, run.err)
        assert run.out


def test_the_readmes_record_of_each_format_is_recognised_and_packed(tmp_path: Path) -> None:
    block = README.split("One record of each")[1].split("```")[1]
    lines = [shlex.split(line) for line in block.strip().splitlines()]
    tried = []
    for (echo, record, arrow, file), words in zip(lines[::2], lines[1::2], strict=True):
        assert (echo, arrow, words[:3]) == ("echo", ">", ["pack-dataset", "build", file])
        (tmp_path / file).write_text(record + "\n")
        stand_ins = {
            "qwen3/": str(TOKENIZER),
            file: str(tmp_path / file),
            words[-1]: str(tmp_path / words[-1]),
        }
        run = pack(*(stand_ins.get(word, word) for word in words[1:]))
        assert run.code == 0, (words, run.err)
        name = file.removesuffix(".jsonl")
        assert f"{file}: {name} (columns: " in run.out
        tried.append(name)
    assert sorted(tried) == sorted(FORMATS)


def test_the_readmes_mix_gives_the_shares_it_names(tmp_path: Path) -> None:
    block = README.split("```yaml\n")[1].split("```")[0]
    for name, word in (("chats", "{} a"), ("code", "x = {}"), ("texts", "the {}")):
        rows = [json.dumps({"text": (word.format(n) + " ") * 10}) for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
        block = block.replace(f"{name}.jsonl", str(tmp_path / f"{name}.jsonl"))
    block = block.replace("qwen3/", str(TOKENIZER)).replace(
        "output: packed", f"output: {tmp_path / 'packed'}"
    )
    (tmp_path / "mix.yaml").write_text(block)
    run = pack("build", "--config", tmp_path / "mix.yaml")
    assert run.code == 0, run.err
    facts = json.loads((tmp_path / "packed" / "manifest.json").read_bytes())["statistics"]
    shares = [source["tokens"] / facts["tokens"] for source in facts["by_source"]]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    block = next(block for block in blocks if "manifest = pack_dataset(" in block)
    source = tmp_path / "data.jsonl"
    source.write_text('{"text": "one two three"}\n')
    code = block.replace('"data.jsonl"', repr(str(source))).replace('"qwen3/"', repr(str(TOKENIZER)))
    code = code.replace('"packed"', repr(str(tmp_path / "packed")))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1", run.stdout.split()[1]] and int(run.stdout.split()[1]) > 3


def test_the_readmes_line_for_notebooks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("PADLESS_CACHE", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    block = next(block for block in blocks if "import pack\n" in block).replace(
        '"qwen3/"', repr(str(TOKENIZER))
    )
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["packs"][0].seq_lengths.sum() == len(names["packs"].to_hf()[0]["input_ids"])


def test_the_readmes_training_runs_and_learns(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    block = next(block for block in blocks if "prepare_model(model, data=" in block)
    assert 15 <= len(block.splitlines()) <= 25
    model = tmp_path / "model"
    shutil.copytree(TOKENIZER, model)
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    config = dict(model_type="qwen3", vocab_size=len(vocabulary) + 300, hidden_size=32, intermediate_size=64)
    config |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "data.jsonl").write_text('{"text": "one two three"}\n' * 400)
    stand_ins = {"data.jsonl": tmp_path / "data.jsonl", "qwen3/": model, "packed": tmp_path / "packed"}
    for name, path in stand_ins.items():
        block = block.replace(f'"{name}"', repr(str(path)))
    block = block.replace("max_length=1024", "max_length=64").replace("lr=1e-4", "lr=1e-2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=240, env=environment
    )
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[0]) for line in run.stdout.splitlines()]
    assert len(losses) > 3 and losses[-1] < losses[0] - 0.5, losses


def test_the_readmes_captured_training_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU a replay is the step once more; tests/test_models_gpu.py runs it as it is."""
    import torch
    from tiny_models import tiny

    packs = [[Seq([length] * length) for length in (9, 2, 5, 3)]] * 20
    write_folder(tmp_path / "packed", Folder(packs=packs, max_length=64))
    losses: list[float] = []
    names: dict[str, Any] = {"model": tiny("qwen3").train(), "losses": losses}

    class Graph:
        def replay(self) -> None:
            names["optimizer"].zero_grad()
            names["loss"] = names["step"]()

    for name in ("Stream", "stream", "current_stream", "synchronize", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    block = next(block for block in blocks if "torch.cuda.graph(" in block)
    for there, here in (
        ('"packed"', repr(str(tmp_path / "packed"))),
        ('"cuda"', '"cpu"'),
        (".pin_memory()", ""),
        ("lr=1e-4, fused=True, capturable=True", "lr=1e-2"),
        ("1024", "64"),
    ):
        assert there in block
        block = block.replace(there, here)
    exec(block + "    losses.append(float(loss))\n", names)
    assert len(losses) == len(packs) - 1 and losses[-1] < losses[0] - 1, losses


def test_the_readmes_tables_come_from_the_raw_rows() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "readme_tables.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
