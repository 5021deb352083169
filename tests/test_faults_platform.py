"""Public faults of platforms and of shifting: names that other systems refuse, code pages, parts of a row.

The numbers are those of the collection of faults that the cases were written from.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from building import TOKENIZER, build_arguments, built, files_of, pack, run_script, write_lines

from padless.packer import PackConfig, pack_dataset
from padless.packer.errors import InputError
from padless.packer.exports import EXPORTS
from padless.runtime.reader import PackedReader

PLAIN = re.compile(r"[A-Za-z0-9._/-]+")
TEXTS = [{"text": f"Größe {number} – naïve café 😀 日本"} for number in range(20)]


def test_files_have_names_that_every_system_takes(tmp_path: Path) -> None:
    """BR-190: whatever the sources are called; and no path in the manifest is absolute."""
    source = write_lines(tmp_path / "in" / "a:b ünï?.jsonl", TEXTS)
    built(source, tmp_path / "packed", "--eval-fraction", 0.2)
    pack("repack", tmp_path / "packed" / "train", "--plan-only", "short", "--max-length", 512)
    assert all(PLAIN.fullmatch(name) for name in files_of(tmp_path / "packed"))
    manifest = PackedReader(tmp_path / "packed", split="train").manifest
    paths = [source.path for source in manifest.sources] + [file.file for file in manifest.files]
    assert not any(path.startswith(("/", "..")) or "\\" in path for path in paths)
    for to in sorted({*EXPORTS} - {"mds", "megatron"}):
        run = pack(
            *(
                "export",
                tmp_path / "packed",
                "--split",
                "train",
                "--to",
                to,
                "--output",
                tmp_path / "out" / to,
            )
        )
        assert run.code == 0, run.err
    assert all(PLAIN.fullmatch(name) for name in files_of(tmp_path / "out"))


def test_splits_that_can_be_no_folder_are_refused_with_their_name(tmp_path: Path) -> None:
    """BR-190."""
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list(TEXTS) for name in ("train", "x/y")}
    config = PackConfig(
        sources=(datasets.DatasetDict(splits),), split="all", tokenizer=str(TOKENIZER), max_length=512,
        output=str(tmp_path / "out"),
    )  # fmt: skip
    with pytest.raises(InputError, match="x/y"):
        pack_dataset(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="its code page is not set by LC_ALL")
def test_a_machine_with_another_code_page_gives_the_same_bytes(tmp_path: Path) -> None:
    """BR-191: data, template and configuration are UTF-8 wherever they are read."""
    lines = "".join(
        json.dumps({"messages": [{"role": "user", "content": "Ärger 😀"}, {"role": "assistant", **row}]},
                   ensure_ascii=False) + "\n"
        for row in ({"content": row["text"]} for row in TEXTS)
    )  # fmt: skip
    source = tmp_path / "chats.jsonl"
    source.write_text(lines, encoding="utf-8")
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}«{{ m.role }}»{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "ß🙂{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        encoding="utf-8",
    )
    config = tmp_path / "config.yaml"
    config.write_text("system: Größe 😀\n", encoding="utf-8")
    found = []
    for name, environment in (("utf8", {"PYTHONUTF8": "1"}), ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0"})):
        words = build_arguments(source, tmp_path / name, "--template", template, "--config", config)
        run = run_script(*words, PYTHONCOERCECLOCALE="0", **environment)
        assert run.code == 0, run.err
        run = run_script("inspect", tmp_path / name, PYTHONCOERCECLOCALE="0", **environment)
        assert run.code == 0, run.err
        found.append(files_of(tmp_path / name))
    assert found[0] == found[1]
    ids = PackedReader(tmp_path / "ascii")[0].input_ids
    assert len(ids) > 100


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_row_that_ranks_share_keeps_the_target_at_each_cut(ranks: int, tmp_path: Path) -> None:
    """BR-023: labels are shifted before anybody divides the row; six tokens, five targets."""
    source = write_lines(tmp_path / "in.jsonl", [{"input_ids": [11, 12, 13, 14, 15, 16]}])
    built(source, tmp_path / "packed", "--max-length", 6)
    assert pack("export", tmp_path / "packed", "--to", "torchtitan", "--output", tmp_path / "out").code == 0
    (file,) = (tmp_path / "out").glob("*.arrow")
    (row,) = pa.ipc.open_stream(file.read_bytes()).read_all().to_pylist()
    size = 6 // ranks
    parts = [row["labels"][rank * size :][:size] for rank in range(ranks)]
    assert parts == {2: [[12, 13, 14], [15, 16, -100]], 3: [[12, 13], [14, 15], [16, -100]]}[ranks]
