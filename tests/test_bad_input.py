"""A user's mistake ends in one clear line, exit code 2, and nothing that looks like a data set."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import (
    DEMO,
    TOKENIZER,
    Run,
    build,
    build_arguments,
    built,
    demo_rows,
    files_of,
    pack,
    run_script,
    workers_in,
    write_lines,
    write_many,
)
from mistakes import CASES, chats

from padless.packer import PackConfig, pack_dataset
from padless.packer.errors import InputError


def assert_refused(run: Run, *said: str) -> None:
    """Exit code 2 and one line on stderr that says all of it."""
    assert run.code == 2, (run.out, run.err)
    assert run.out == ""
    assert "Traceback" not in run.err
    assert run.err.startswith("error: ")
    assert run.err.count("\n") == 1, run.err
    for words in said:
        assert words in run.err, (words, run.err)


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_in_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    arguments, said = CASES[name](tmp_path / "in")
    before = files_of(tmp_path)
    source, *options = arguments
    assert_refused(build(source, tmp_path / "out", *options), *said)
    assert not (tmp_path / "out").exists()
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("name", ["a malformed line", "a record that is too long", "nothing but faults"])
def test_an_empty_folder_that_was_there_stays_and_stays_empty(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    source, *options = CASES[name](tmp_path / "in")[0]
    assert_refused(build(source, tmp_path / "out", *options))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["a malformed line", "a record that is too long", "nothing but faults"])
def test_a_data_set_that_was_there_survives_a_failed_replacement(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    built(DEMO, tmp_path / "out")
    before = files_of(tmp_path / "out")
    source, *options = CASES[name](tmp_path / "in")[0]
    assert_refused(build(source, tmp_path / "out", *options, "--force"))
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_the_first_bad_record_of_many_chunks_is_named_whichever_worker_meets_it(
    way: str, tmp_path: Path
) -> None:
    lines = write_many(tmp_path / "data.jsonl").read_text().splitlines()
    lines[2400] = lines[5000] = lines[9000] = "{"
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    with workers_in(way):
        assert_refused(build(tmp_path / "data.jsonl", tmp_path / "out", "--workers", 3), "line 2,401")
    assert not (tmp_path / "out").exists()


def test_line_numbers_of_later_files_are_their_own(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", demo_rows()[:50])
    write_lines(tmp_path / "in" / "b.jsonl", [*demo_rows()[50:60], {"instruction": 1, "output": ""}])
    run = build(tmp_path / "in", tmp_path / "out")
    assert_refused(run, "b.jsonl", "record 10", "line 11")


@pytest.mark.shared
def test_a_tokenizer_without_a_template_packs_no_chats(shared: Path, tmp_path: Path) -> None:
    run = build(chats(tmp_path), tmp_path / "out", "--tokenizer", shared / "tokenizers" / "gpt2")
    assert_refused(run, "gpt2", "no chat template", "--template")
    assert not (tmp_path / "out").exists()


# -- outputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
@pytest.mark.parametrize(
    "names",
    [
        ["thesis.txt"],
        ["manifest.json"],
        ["manifest.json", "README.md"],
        [".work/notes.txt"],
        ["train/thesis.txt"],
        ["state.json"],
    ],
    ids=" ".join,
)
def test_a_folder_of_something_else_is_refused_even_by_force(
    tmp_path: Path, names: list[str], force: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text('{"name": "an app", "icons": []}')
    before = files_of(tmp_path / "out")
    run = build(DEMO, tmp_path / "out", *force)
    assert_refused(run, "out", "did not write", "another folder")
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    "name",
    [
        "thesis.txt",
        "tokenizer/thesis.txt",
        ".work/thesis.txt",
        ".thesis.tmp",
        "more/thesis.txt",
        "shard-1.arrow",
    ],
)
def test_something_of_the_users_in_a_packed_folder_is_never_swept_away(tmp_path: Path, name: str) -> None:
    built(DEMO, tmp_path / "out")
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_text("years of work")
    run = build(DEMO, tmp_path / "out", "--seed", 5, "--force")
    assert_refused(run, name.split("/")[0], "did not write")
    assert (tmp_path / "out" / name).read_text() == "years of work"
    assert pack("verify", tmp_path / "out").code == 0


def test_notes_and_reports_beside_the_data_stay(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("about the data")
    built(DEMO, tmp_path / "out", "--seed", 5, "--force")
    assert (tmp_path / "out" / "README.md").read_text() == "about the data"


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert_refused(build(DEMO, tmp_path / "out"), "out is a file", "give a folder")
    assert_refused(build(DEMO, tmp_path / "out", "--force"), "out is a file", "give a folder")
    assert_refused(build(DEMO, tmp_path / "out" / "below"), "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_output_that_is_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert_refused(build(DEMO, tmp_path / "out"), "out")
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing can be written."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("root may write everywhere, and no read-only file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_place_that_cannot_be_written_is_named(read_only: Path) -> None:
    run = build(DEMO, read_only / "out")
    assert_refused(run, str(read_only / "out"))
    assert list(read_only.iterdir()) == []


# -- the script and Python -----------------------------------------------------------------------------


def test_the_script_refuses_as_the_commands_do(tmp_path: Path) -> None:
    run = run_script(*build_arguments(tmp_path / "none.jsonl", tmp_path / "out"))
    assert_refused(run, "none.jsonl")
    run = run_script(*build_arguments(DEMO, tmp_path / "out", "--tokenizer", tmp_path / "tok"))
    assert_refused(run, "no tokenizer folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build"], ["missing", "SOURCE", "--tokenizer", "--max-length", "--output"]),
        (["build", DEMO, "--output", "x"], ["missing", "--tokenizer", "--max-length"]),
    ],
    ids=["nothing", "half"],
)
def test_missing_options_are_named_together(arguments: list[object], said: list[str]) -> None:
    assert_refused(pack(*arguments), *said, "--help")


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "--no-such-option"],
        ["build", DEMO, "--max-length", "long"],
        ["nonsense"],
        ["report"],
        ["inspect", "a", "b"],
        ["verify"],
    ],
    ids=lambda words: " ".join(str(word) for word in words if word != DEMO),
)
def test_wrong_use_is_exit_code_2(arguments: list[object]) -> None:
    run = pack(*arguments)
    assert run.code == 2
    assert run.out == ""
    assert "Usage" in run.err and "Traceback" not in run.err


@pytest.mark.parametrize("command", ["report", "inspect", "verify"])
def test_a_folder_that_was_never_packed_is_refused(command: str, tmp_path: Path) -> None:
    assert_refused(pack(command, tmp_path), str(tmp_path))
    assert_refused(pack(command, tmp_path / "none"), "none")


def test_python_raises_what_the_command_line_prints(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"max_length must be at least 1 token, got 0"):
        PackConfig(sources=(str(DEMO),), tokenizer="t", max_length=0, output="o")
    with pytest.raises(InputError, match="sources must be a sequence"):
        PackConfig(sources=str(DEMO), tokenizer="t", max_length=8, output="o")  # type: ignore[arg-type]
    config = PackConfig(
        sources=(str(DEMO),), tokenizer=str(TOKENIZER), max_length=8, output=str(tmp_path / "o")
    )
    with pytest.raises(InputError, match="max_length is 8"):
        pack_dataset(config)
    assert not (tmp_path / "o").exists()
