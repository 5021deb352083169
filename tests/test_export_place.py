"""Where an export lies: done again, forced, failed, killed, behind a link, somebody else's."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from building import TOKENIZER, pack
from packed import Folder, Seq, write_folder

from padless.packer.errors import InputError
from padless.packer.export import ExportConfig, check_export, export

TOKENS = {"tokenizer.json": (TOKENIZER / "tokenizer.json").read_bytes()}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    packs = [[Seq([1, 2, 3]), Seq([4, 5])], [Seq([6, 7, 8, 9], [False, False, True, True])]]
    write_folder(tmp_path / "packed", Folder(packs=packs, tokenizer=TOKENS))
    return tmp_path / "packed"


def test_a_second_run_finds_its_work_done(packed: Path, tmp_path: Path) -> None:
    words = ("export", packed, "--to", "nemo", "--output", tmp_path / "out")
    assert "written in" in pack(*words).out
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    assert "is there already" in pack(*words).out
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before


def test_other_data_need_force(packed: Path, tmp_path: Path) -> None:
    pack("export", packed, "--to", "nemo", "--output", tmp_path / "out")
    refused = pack("export", packed, "--to", "parquet", "--output", tmp_path / "out")
    assert refused.code == 2 and "--force" in refused.err
    assert (tmp_path / "out" / "metadata.json").exists()
    assert pack("export", packed, "--to", "parquet", "--output", tmp_path / "out", "--force").code == 0
    assert not (tmp_path / "out" / "metadata.json").exists()
    assert sorted(os.listdir(tmp_path)) == ["out", "packed"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_what_padless_did_not_write_is_never_touched(packed: Path, tmp_path: Path, force: list[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    run = pack("export", packed, "--to", "nemo", "--output", tmp_path / "out", *force)
    assert run.code == 2 and "give another folder" in run.err
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_force_takes_away_only_what_an_export_wrote(packed: Path, tmp_path: Path, kind: str) -> None:
    words = ("export", packed, "--output", tmp_path / "out")
    assert pack(*words, "--to", "unpacked").code == 0
    mine = tmp_path / "out" / "mine" / "notes.txt" if kind == "folder" else tmp_path / "out" / "notes.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("years of work")
    before = sorted(tmp_path.rglob("*"))
    assert pack(*words, "--to", "unpacked").code == 0  # nothing to do
    run = pack(*words, "--to", "parquet", "--force")
    assert run.code == 2 and mine.relative_to(tmp_path / "out").parts[0] in run.err and "move it" in run.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("harm", ["missing", "shorter"])
def test_a_damaged_export_is_not_done(packed: Path, tmp_path: Path, harm: str) -> None:
    words = ("export", packed, "--to", "unpacked", "--output", tmp_path / "out")
    pack(*words)
    file = tmp_path / "out" / "data-00000.arrow"
    whole = file.read_bytes()
    file.unlink()
    if harm == "shorter":
        file.write_bytes(whole[:-1])
    run = pack(*words)
    assert run.code == 2 and str(file) in run.err and "--force writes the export anew" in run.err
    assert pack(*words, "--force").code == 0 and file.read_bytes() == whole


def test_force_writes_anew_what_has_another_checksum(packed: Path, tmp_path: Path) -> None:
    words = ("export", packed, "--to", "unpacked", "--output", tmp_path / "out", "--force")
    pack(*words)
    file = tmp_path / "out" / "data-00000.arrow"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "written in" in pack(*words).out and file.read_bytes() == whole
    assert "is there already" in pack(*words).out


def test_who_opens_the_hidden_folder_before_its_rename_finds_the_work_done(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExportConfig(folder=str(packed), to="unpacked", output=str(tmp_path / "out"))
    hidden = str(tmp_path / ".out.export")
    lock, opened = fcntl.flock, []

    def another_is_done_first(descriptor: int, how: int) -> None:
        if not opened:
            opened.append(descriptor)
            os.rename(hidden, tmp_path / "aside")  # as the other one's, which it puts in place
            assert not export(config).was_there
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", another_is_done_first)
    assert export(config).was_there and opened
    assert sorted(os.listdir(tmp_path)) == ["aside", "out", "packed"]


def test_a_failed_export_leaves_nothing(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from padless.packer.exports.job import Job

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Job, "bytes", fail)
    run = pack("export", packed, "--to", "unpacked", "--output", tmp_path / "out")
    assert run.code == 2 and "disk is full" in run.err and "it begins anew" in run.err
    assert os.listdir(tmp_path) == ["packed"]


def test_leftovers_of_a_killed_run_are_no_matter(packed: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.export").mkdir()
    (tmp_path / ".out.export" / ".data-00000.arrow.tmp").write_bytes(b"half")
    assert pack("export", packed, "--to", "unpacked", "--output", tmp_path / "out").code == 0
    assert sorted(os.listdir(tmp_path)) == ["out", "packed"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed_and_stays(packed: Path, tmp_path: Path, exists: bool) -> None:
    (tmp_path / "disk").mkdir()
    if exists:
        (tmp_path / "disk" / "rows").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "rows")
    words = ("export", packed, "--to", "unpacked", "--output", tmp_path / "out")
    assert "written in" in pack(*words).out and "is there already" in pack(*words).out
    assert (tmp_path / "out").is_symlink() and os.listdir(tmp_path / "disk") == ["rows"]
    assert pack(*words, "--force", "--shard-size", 1).code == 0
    assert sorted(os.listdir(tmp_path)) == ["disk", "out", "packed"]
    assert check_export(str(tmp_path / "disk" / "rows")) == []


@pytest.mark.parametrize("where", ["packed/rows", "packed/plans/deep/rows", "link/rows"])
def test_a_packed_folder_is_given_nothing_that_builds_do_not_write(
    packed: Path, tmp_path: Path, where: str
) -> None:
    """A second build, or repack, would refuse the folder for what lies in it."""
    (tmp_path / "link").symlink_to(packed)
    before = sorted(packed.iterdir())
    run = pack("export", packed, "--to", "unpacked", "--output", tmp_path / where)
    assert run.code == 2 and "give a folder beside it" in run.err
    assert sorted(packed.iterdir()) == before


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_the_current_folder_is_not_replaced(
    packed: Path, tmp_path: Path, force: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = pack("export", packed, "--to", "unpacked", "--output", ".", *force)
    assert run.code == 2 and "the current folder" in run.err and "rows" in run.err
    assert pack("export", packed, "--to", "unpacked", "--output", "./rows").code == 0
    monkeypatch.chdir(tmp_path / "here" / "rows")
    assert "is there already" in pack("export", packed, "--to", "unpacked", "--output", ".").out


def test_a_mount_is_refused_before_any_work(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be renamed: the export would be written whole, and lost."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path / "out"))
    run = pack("export", packed, "--to", "unpacked", "--output", tmp_path / "out")
    assert run.code == 2 and "where a disk is mounted" in run.err
    assert sorted(os.listdir(tmp_path)) == ["out", "packed"]


def test_a_record_that_lists_no_files_is_somebody_elses(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "export.json").write_text('{"format": "padless-export"}')
    run = pack("export", packed, "--to", "unpacked", "--output", tmp_path / "out", "--force")
    assert run.code == 2 and "no export of padless wrote" in run.err


def test_changed_files_are_found(packed: Path, tmp_path: Path) -> None:
    pack("export", packed, "--to", "unpacked", "--output", tmp_path / "out")
    file = tmp_path / "out" / "data-00000.arrow"
    raw = bytearray(file.read_bytes())
    raw[-20] ^= 1
    file.write_bytes(bytes(raw))
    assert check_export(str(tmp_path / "out")) == [f"{file} is not as it was written"]
    with pytest.raises(InputError, match="no export"):
        check_export(str(packed))
