"""Options from a file: its names, what goes before it, and sizes with a unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from building import (
    DEMO,
    MAX_LENGTH,
    TOKENIZER,
    build,
    build_arguments,
    built,
    config_file,
    files_of,
    pack,
)

from padless.runtime.reader import PackedReader


@pytest.mark.parametrize("plural", [True, False], ids=["names of fields", "names of options"])
def test_a_file_can_say_it_all(tmp_path: Path, plural: bool) -> None:
    text = f"tokenizer: {TOKENIZER}\noutput: {tmp_path / 'out'}\n"
    if plural:
        text += f"sources: [{DEMO}]\nmax_length: {MAX_LENGTH}\ncolumns: {{output: output}}\n"
    else:
        text += f"source: {DEMO}\nmax-length: {MAX_LENGTH}\ncolumn: {{output: output}}\n"
    run = pack("build", "--config", config_file(tmp_path, text), "--json")
    assert run.code == 0, run.err
    built(DEMO, tmp_path / "same", "--column", "output=output")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "same")


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    config = config_file(tmp_path, "seed: 3\nstrategy: none\nmax_length: 50\n")
    built(DEMO, tmp_path / "out", "--config", config, "--seed", 0)
    options = PackedReader(tmp_path / "out").manifest.options
    assert (options["seed"], options["strategy"], options["max_length"]) == (0, "none", MAX_LENGTH)


def test_the_file_may_say_how_to_tell(tmp_path: Path) -> None:
    run = pack(*build_arguments(DEMO, tmp_path / "a", "--config", config_file(tmp_path, "quiet: true\n")))
    assert (run.code, run.out, run.err) == (0, "", "")
    run = pack(*build_arguments(DEMO, tmp_path / "b", "--config", config_file(tmp_path, "json: true\n")))
    assert run.json["records"] == 400
    run = pack(*build_arguments(DEMO, tmp_path / "c", "--config", config_file(tmp_path, "quiet: please\n")))
    assert run.code == 2 and "--quiet must be true or false" in run.err


def test_the_file_is_not_in_the_bytes(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "a", "--config", config_file(tmp_path, "seed: 3\nworkers: 1\n"))
    built(DEMO, tmp_path / "b", "--seed", 3)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("given", "size"),
    [("65536", 65536), ("512MiB", 2**29), ("1GB", 10**9), ("1.5 kib", 1536), ("2mb", 2 * 10**6), ("7b", 7)],
)
def test_sizes_may_have_a_unit(tmp_path: Path, given: str, size: int) -> None:
    built(DEMO, tmp_path / "option", "--shard-size", given)
    config = tmp_path / "config.yaml"
    config.write_text(f"shard-size: {given}")
    built(DEMO, tmp_path / "file", "--config", config)
    for name in ("option", "file"):
        assert json.loads((tmp_path / name / "manifest.json").read_text())["options"]["shard_size"] == size


@pytest.mark.parametrize("given", ["much", "-1", "5TB", "1 2", "MiB", ""])
def test_what_is_no_size_is_refused(tmp_path: Path, given: str) -> None:
    run = build(DEMO, tmp_path / "packed", "--shard-size", given)
    assert run.code == 2 and "MiB" in run.err and "Traceback" not in run.err
