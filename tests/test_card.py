"""The card in a packed folder: the Hub's own library reads it, and loads the packs by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from building import DEMO, assert_verified, built, files_of, pack
from hub_stand_in import Repository, stand_in
from packed import Folder, count_up, edit_manifest, write_folder

from padless.packer.report import build_report
from padless.runtime.reader import PackedReader


def metadata(folder: Path) -> dict[str, object]:
    block = (folder / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    found: dict[str, object] = yaml.safe_load(block)
    return found


LOAD = """
import json, sys, datasets
loaded = datasets.load_dataset("org/packed", cache_dir=sys.argv[1])
print(json.dumps({name: [split["input_ids"][:], split["seq_lengths"][:]] for name, split in loaded.items()}))
"""


def loaded_from_the_hub(folder: Path, scratch: Path) -> dict[str, list[Any]]:
    """What `load_dataset` gives once the folder is on the Hub, or a stand-in of it."""
    pytest.importorskip("datasets")
    with stand_in() as hub:
        hub.repositories["datasets/org/packed"] = Repository.of(files_of(folder))
        run = subprocess.run(
            [sys.executable, "-c", LOAD, str(scratch / "cache")],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(scratch / "home")},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[Any]] = json.loads(run.stdout)
    return found


def packs_of(reader: PackedReader) -> list[Any]:
    return [[one.input_ids.tolist() for one in reader], [one.seq_lengths.tolist() for one in reader]]


def test_load_dataset_gives_the_packs(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    built(DEMO, folder, "--shard-size", 60_000)
    run = pack("report", folder, "--card")
    assert run.code == 0 and str(folder / "README.md") in run.out
    reader = PackedReader(folder)
    assert len(reader.manifest.shards) > 1
    assert loaded_from_the_hub(folder, tmp_path) == {"train": packs_of(reader)}
    assert_verified(folder)


def test_every_split_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    built(DEMO, folder, "--eval-fraction", 0.1)
    assert pack("report", folder, "--card").code == 0
    wanted = {name: packs_of(PackedReader(folder, split=name)) for name in ("train", "validation")}
    assert loaded_from_the_hub(folder, tmp_path) == wanted


def test_the_card_tells_the_reports_numbers_and_no_markup(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    write_folder(folder, Folder(packs=[count_up(8, 2), count_up(7)], max_length=10))
    nasty = "a|b`<script>\n# c"
    edit_manifest(folder, lambda content: content["sources"][0].update(path=nasty))
    assert pack("report", folder, "--card").code == 0
    card = (folder / "README.md").read_text()
    before = 1 - build_report(folder)["padding"]["random"]["8"]
    assert f"| train | 2 | 10 | 3 | 17 | 82.4% | 85.00% | {before:.1%} |" in card
    assert "| a&#124;b&#96;&#60;script&#62; # c | train | 3 | 0 | 17 |" in card
    assert metadata(folder)["size_categories"] == ["n<1K"]


def test_a_card_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    write_folder(folder, Folder(packs=[count_up(3)]))
    assert pack("report", folder, "--card").code == 0
    assert pack("report", folder, "--card").code == 0  # ours is written anew
    (folder / "README.md").write_text("# mine\n")
    run = pack("report", folder, "--card")
    assert run.code == 2 and "was not written by pack-dataset" in run.err
    assert (folder / "README.md").read_text() == "# mine\n"


def test_a_card_that_was_edited_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    write_folder(folder, Folder(packs=[count_up(3)]))
    assert pack("report", folder, "--card").code == 0
    edited = (folder / "README.md").read_text() + "Licensed to all.\n"
    (folder / "README.md").write_text(edited)
    run = pack("report", folder, "--card")
    assert run.code == 2 and "changed since" in run.err
    assert (folder / "README.md").read_text() == edited


def test_a_card_is_of_one_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", Folder(packs=[count_up(3)]))
    assert pack("report", tmp_path / "a", tmp_path / "a", "--card").code == 2
    assert not (tmp_path / "a" / "README.md").exists()


def test_a_card_takes_no_option_that_it_would_pass_over(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", Folder(packs=[count_up(3)]))
    for more in (("--html", tmp_path / "x.html"), ("--plan", "b"), ("--split", "c"), ("--model", "d")):
        run = pack("report", tmp_path / "a", "--card", *more)
        assert run.code == 2 and "leave --html, --model, --split and --plan out" in run.err, run.err
    assert not (tmp_path / "a" / "README.md").exists()
    found = pack("report", tmp_path / "a", "--card", "--json").json
    assert found == {"card": str(tmp_path / "a" / "README.md")}
