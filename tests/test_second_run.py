"""A build into a folder that is not empty: finished, of another build, stopped halfway, or in use."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from building import (
    DEMO,
    TOKENIZER,
    Gate,
    assert_verified,
    await_chunks,
    build,
    build_arguments,
    built,
    demo_rows,
    files_of,
    pack,
    start,
    state_of,
    write_lines,
    write_many,
)

from padless.runtime.format import MissingFileError
from padless.runtime.reader import PackedReader

WAYS = pytest.mark.parametrize("way", ["threads", "processes"])


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "many.jsonl")


@pytest.fixture(scope="module")
def undisturbed(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that a build of `many` gives when nothing comes between."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    built(many, output)
    return files_of(output)


# -- a finished folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--eval-fraction", 0.2)], ids=["one split", "eval split"])
def test_the_same_command_again_says_so_and_touches_nothing(tmp_path: Path, more: tuple[object, ...]) -> None:
    first = built(DEMO, tmp_path / "out", *more)
    before = state_of(tmp_path / "out")
    run = build(DEMO, tmp_path / "out", *more, "--workers", 1)
    assert run.code == 0
    assert run.json["was_finished"] is True and first["was_finished"] is False
    for name in ("records", "kept_records", "sequences", "packs", "tokens", "trained_tokens", "utilization"):
        assert run.json[name] == first[name], name
    assert state_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", 1], ["seed 0, now 1"]),
        (["--max-length", 2048], ["max_length 1024, now 2048"]),
        (["--strategy", "none"], ["strategy 'bfd', now 'none'"]),
        (["--eval-fraction", 0.1], ["splits", "train", "validation"]),
        (["--template", "chatml"], ["another chat template"]),
        (["--train-on", "all"], ["train_on 'auto', now 'all'"]),
    ],
    ids=lambda words: str(words[0]),
)
def test_other_options_are_refused_naming_what_differs(
    tmp_path: Path, options: list[object], said: list[str]
) -> None:
    built(DEMO, tmp_path / "out")
    before = state_of(tmp_path / "out")
    run = build(DEMO, tmp_path / "out", *options)
    assert run.code == 2
    for words in ["another build", "--output", "--force", *said]:
        assert words in run.err, (words, run.err)
    assert state_of(tmp_path / "out") == before


def test_changed_sources_are_refused_by_name(tmp_path: Path) -> None:
    rows = demo_rows()
    for name in ("a", "b"):
        write_lines(tmp_path / "in" / f"{name}.jsonl", rows[:50])
    built(tmp_path / "in", tmp_path / "out")
    before = state_of(tmp_path / "out")
    text = (tmp_path / "in" / "b.jsonl").read_text()
    (tmp_path / "in" / "b.jsonl").write_text(text.replace("e", "a", 1))  # as long as before
    run = build(tmp_path / "in", tmp_path / "out")
    assert run.code == 2
    assert "b.jsonl has changed" in run.err and "a.jsonl" not in run.err
    write_lines(tmp_path / "in" / "c.jsonl", rows[:3])
    run = build(tmp_path / "in", tmp_path / "out")
    assert run.code == 2 and "source" in run.err
    assert state_of(tmp_path / "out") == before


def test_a_changed_eval_source_is_refused(tmp_path: Path) -> None:
    rows = demo_rows()
    train, held = write_lines(tmp_path / "a.jsonl", rows[50:]), write_lines(tmp_path / "b.jsonl", rows[:50])
    built(train, tmp_path / "out", "--eval-source", held)
    write_lines(held, rows[1:50])
    run = build(train, tmp_path / "out", "--eval-source", held)
    assert run.code == 2 and "b.jsonl has changed" in run.err


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out")
    shutil.copytree(TOKENIZER, tmp_path / "tok")
    spec = json.loads((tmp_path / "tok" / "tokenizer.json").read_text())
    spec["model"]["merges"].pop()
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(spec))
    run = build(DEMO, tmp_path / "out", "--tokenizer", tmp_path / "tok")
    assert run.code == 2 and "another tokenizer" in run.err


def test_a_source_that_was_only_touched_is_the_same(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", demo_rows())
    built(source, tmp_path / "out")
    os.utime(source, (1, 1))
    assert built(source, tmp_path / "out")["was_finished"] is True


@pytest.mark.parametrize("more", [(), ("--eval-fraction", 0.2)], ids=["one split", "eval split"])
@pytest.mark.parametrize("what", ["shard-*.arrow", "sequences*.parquet", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_not_finished(
    tmp_path: Path, what: str, more: tuple[object, ...]
) -> None:
    built(DEMO, tmp_path / "out", *more)
    before = files_of(tmp_path / "out")
    file = next((tmp_path / "out").rglob(what))
    file.unlink()
    run = build(DEMO, tmp_path / "out", *more)
    assert run.code == 2 and str(file) in run.err and "--force" in run.err
    built(DEMO, tmp_path / "out", *more, "--force")
    assert files_of(tmp_path / "out") == before


# -- force ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [(), ("--eval-fraction", 0.2)], ids=["one split", "eval split"])
@pytest.mark.parametrize("second", [(), ("--eval-fraction", 0.2)], ids=["one split", "eval split"])
def test_force_leaves_what_a_fresh_build_gives(
    tmp_path: Path, first: tuple[object, ...], second: tuple[object, ...]
) -> None:
    built(DEMO, tmp_path / "out", *first, "--shard-size", 20_000)
    old = files_of(tmp_path / "out")
    built(DEMO, tmp_path / "out", *second, "--seed", 9, "--force")
    built(DEMO, tmp_path / "fresh", *second, "--seed", 9)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert_verified(tmp_path / "out")
    assert len([name for name in old if name.endswith(".arrow")]) > 2


def test_force_on_the_same_build_gives_the_same_bytes(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out")
    before = files_of(tmp_path / "out")
    assert built(DEMO, tmp_path / "out", "--force")["was_finished"] is False
    assert files_of(tmp_path / "out") == before


def test_force_on_nothing_is_a_build(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--force")
    assert_verified(tmp_path / "out")


# -- a build that was stopped --------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_a_stopped_build_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, many: Path, undisturbed: dict[str, bytes], way: str, stop: signal.Signals
) -> None:
    output = tmp_path / "out"
    arguments, gate = build_arguments(many, output, "--workers", 2), Gate(tmp_path / "gate")
    with start(*arguments, way=way, gate=gate) as process:
        await_chunks(output, process, gate, 2)
        if stop == signal.SIGINT:  # as a terminal does: to all of them
            os.killpg(process.pid, stop)
        else:
            process.send_signal(stop)
        out, err = process.communicate(timeout=300)
    assert out == "" and "Traceback" not in err
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on" in err
    assert [path.name for path in output.iterdir()] == [".work"]
    facts = built(many, output)  # at once: a killed parent's workers may still be there
    assert facts["resumed_chunks"] >= 2
    assert files_of(output) == undisturbed


def test_what_was_done_for_other_options_is_not_taken_over(
    tmp_path: Path, many: Path, undisturbed: dict[str, bytes]
) -> None:
    output = tmp_path / "out"
    other = build_arguments(many, output, "--workers", 2, "--train-on", "all")
    gate = Gate(tmp_path / "gate")
    with start(*other, way="threads", gate=gate) as process:
        await_chunks(output, process, gate, 2)
        process.kill()
    assert built(many, output)["resumed_chunks"] == 0
    assert files_of(output) == undisturbed


def test_a_force_that_is_stopped_leaves_the_old_data_set(tmp_path: Path, many: Path) -> None:
    output = tmp_path / "out"
    built(DEMO, output)
    before = files_of(output)
    arguments = build_arguments(many, output, "--force", "--workers", 2)
    with start(*arguments, way="processes", gate=Gate(tmp_path / "gate")) as process:
        while not (output / ".work" / "journal.jsonl").exists():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    left = files_of(output)
    assert {name: left[name] for name in before} == before
    assert all(name.startswith(".work/") for name in left.keys() - before.keys())


def _build_until(call: int, arguments: list[str]) -> None:
    """In a forked process: build, and die at the so-manieth rename or removal of a file."""
    left = call

    def dying(real: Callable[..., None]) -> Callable[..., None]:
        def run(*paths: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            real(*paths)

        return run

    os.replace, os.remove = dying(os.replace), dying(os.remove)
    os._exit(pack(*arguments, "--quiet").code)


@pytest.mark.parametrize(
    ("old", "first"), [((), 0), (("--eval-fraction", 0.2), 1)], ids=["one split", "eval split"]
)
def test_a_build_that_dies_anywhere_leaves_the_old_set_or_none_or_the_new_one(
    tmp_path: Path, old: tuple[object, ...], first: int
) -> None:
    rows = demo_rows()
    before = write_lines(tmp_path / "before.jsonl", rows[:60])
    source = write_lines(tmp_path / "after.jsonl", rows[60:120])
    new = ("--eval-fraction", 0.3, "--workers", 1, "--force")
    built(before, tmp_path / "old", *old)
    built(source, tmp_path / "new", *new)
    sets = {"old": files_of(tmp_path / "old"), "new": files_of(tmp_path / "new")}
    seen = set()
    for call in range(first, 100, 2):  # every second one, to save time
        output = tmp_path / f"out{call}"
        shutil.copytree(tmp_path / "old", output)
        child = multiprocessing.get_context("fork").Process(
            target=_build_until, args=(call, build_arguments(source, output, *new))
        )
        child.start()
        child.join()
        if (output / "manifest.json").exists():
            assert pack("verify", output).code == 0
            left = files_of(output)
            state = next(name for name, files in sets.items() if files.items() <= left.items())
        else:
            state = "none"
        for path in output.rglob("state.json"):  # what load_from_disk would read is there
            for file in json.loads(path.read_text())["_data_files"]:
                assert (path.parent / file["filename"]).exists(), call
        seen.add(state)
        if child.exitcode == 0:
            break
        assert child.exitcode == 9
        built(source, output, *new)
        assert files_of(output) == sets["new"], call
    assert child.exitcode == 0 and call > 20
    assert seen == {"old", "none", "new"}


# -- two at once ---------------------------------------------------------------------------------------


@WAYS
def test_a_second_build_is_refused_while_the_first_runs(
    tmp_path: Path, many: Path, undisturbed: dict[str, bytes], way: str
) -> None:
    output = tmp_path / "out"
    arguments, gate = build_arguments(many, output, "--workers", 2), Gate(tmp_path / "gate")
    with start(*arguments, way=way, gate=gate) as process:
        await_chunks(output, process, gate)
        for more in ((), ("--force",), ("--seed", 4)):
            run = build(many, output, *more)
            assert run.code == 2
            assert "another build is writing into" in run.err and str(output) in run.err
        assert process.poll() is None
        gate.open()
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert files_of(output) == undisturbed


def test_a_lock_file_without_its_process_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "out" / ".work").mkdir(parents=True)
    (tmp_path / "out" / ".work" / "lock").write_text("1")  # a process that is there, and holds nothing
    built(DEMO, tmp_path / "out")
    assert_verified(tmp_path / "out")


# -- shards that were finished -------------------------------------------------------------------------


def _build_to_shard(shards: int, arguments: list[str]) -> None:
    """In a forked process: build, and die when so many shards have their names."""
    replace = os.replace

    def dying(*paths: object) -> None:
        nonlocal shards
        if "shard-" in str(paths[1]):
            shards -= 1
            if shards < 0:
                os._exit(9)
        replace(*paths)  # type: ignore[arg-type]

    os.replace = dying  # type: ignore[assignment]
    os._exit(pack(*arguments, "--quiet").code)


def _die_after(shards: int, arguments: list[str]) -> None:
    child = multiprocessing.get_context("fork").Process(target=_build_to_shard, args=(shards, arguments))
    child.start()
    child.join()
    assert child.exitcode == 9


def assert_taken_over(kept: dict[Path, int]) -> None:
    """Finished shards (path -> inode) were not written again, but for one whose end was not told yet.

    One worker writes two shards at a time: one of them may have its name when the other dies with it.
    """
    assert sum(path.stat().st_ino != number for path, number in kept.items()) <= 1


SMALL_SHARDS = ("--shard-size", 30_000, "--workers", 1)


@pytest.mark.parametrize("more", [(), ("--eval-fraction", 0.3)], ids=["one split", "eval split"])
def test_finished_shards_are_not_written_again(tmp_path: Path, more: tuple[object, ...]) -> None:
    built(DEMO, tmp_path / "whole", *SMALL_SHARDS, *more)
    output = tmp_path / "out"
    _die_after(3, build_arguments(DEMO, output, *SMALL_SHARDS, *more))
    kept = {path: path.stat().st_ino for path in output.rglob("shard-*")}
    assert len(kept) == 3
    built(DEMO, output, *SMALL_SHARDS, *more)
    assert_taken_over(kept)
    assert files_of(output) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_finished_shard_that_is_not_whole_is_written_again(tmp_path: Path, damage: str) -> None:
    built(DEMO, tmp_path / "whole", *SMALL_SHARDS)
    output = tmp_path / "out"
    _die_after(3, build_arguments(DEMO, output, *SMALL_SHARDS))
    victim = sorted(output.glob("shard-*"))[1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.unlink()
    if damage != "gone":
        victim.write_bytes(data if damage == "changed" else data[:-8])
    built(DEMO, output, *SMALL_SHARDS)
    assert files_of(output) == files_of(tmp_path / "whole")


def test_shards_of_another_build_are_swept_away(tmp_path: Path) -> None:
    output = tmp_path / "out"
    _die_after(3, build_arguments(DEMO, output, *SMALL_SHARDS))
    built(DEMO, output, *SMALL_SHARDS, "--seed", 5)
    built(DEMO, tmp_path / "whole", *SMALL_SHARDS, "--seed", 5)
    assert files_of(output) == files_of(tmp_path / "whole")


def test_a_force_that_dies_leaves_no_shard_once_the_old_build_is_asked_for_again(tmp_path: Path) -> None:
    output = tmp_path / "out"
    built(DEMO, output)
    before = files_of(output)
    _die_after(3, build_arguments(DEMO, output, *SMALL_SHARDS, "--seed", 5, "--force"))
    assert len(list(output.glob("shard-*"))) > 1
    assert built(DEMO, output)["was_finished"] is True
    assert files_of(output) == before


def test_a_repack_keeps_its_finished_shards(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "packed")
    arguments = ["repack", tmp_path / "packed", "--seed", 3, "--shard-size", 30_000, "--workers", 1]
    assert pack(*arguments, "--output", tmp_path / "whole").code == 0
    output = tmp_path / "out"
    _die_after(3, [*map(str, arguments), "--output", str(output)])
    kept = {path: path.stat().st_ino for path in output.rglob("shard-*")}
    assert len(kept) == 3
    assert pack(*arguments, "--output", output).code == 0
    assert_taken_over(kept)
    assert files_of(output) == files_of(tmp_path / "whole")


def test_a_reader_during_a_rebuild_has_the_old_packs_or_says_that_they_are_gone(tmp_path: Path) -> None:
    """Never new ones among them: a shard's name depends on its bytes."""
    built(DEMO, tmp_path / "out", "--shard-size", 40_000)
    old = {number: pack.input_ids.tolist() for number, pack in enumerate(PackedReader(tmp_path / "out"))}
    whole, begun = PackedReader(tmp_path / "out"), PackedReader(tmp_path / "out")
    assert len(whole.manifest.shards) > 2
    for number in old:
        whole[number]
    begun[0]
    built(DEMO, tmp_path / "out", "--force", "--max-length", 900, "--seed", 3)
    assert {number: pack.input_ids.tolist() for number, pack in enumerate(whole)} == old
    mapped = begun.manifest.shards[0].packs
    assert [begun[number].input_ids.tolist() for number in range(mapped)] == [*old.values()][:mapped]
    with pytest.raises(MissingFileError, match=f"{begun.manifest.shards[1].file} is in the manifest and not"):
        begun[mapped]
    fresh = [pack.input_ids.tolist() for pack in PackedReader(tmp_path / "out")]
    assert max(map(len, fresh)) <= 900 < max(map(len, old.values()))
