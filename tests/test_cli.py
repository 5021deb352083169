"""The command line: its names, its three channels (stdout, stderr, exit code), its help, its config file."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from building import (
    DEMO,
    MAX_LENGTH,
    TOKENIZER,
    build,
    build_arguments,
    built,
    config_file,
    demo_rows,
    files_of,
    pack,
    run_script,
    write_lines,
)

from padless.packer import PackConfig
from padless.packer.commands import make_app
from padless.packer.formats import FORMATS
from padless.packer.options import FIELD_OF_OPTION
from padless.packer.strategies import STRATEGIES
from padless.packer.verify import verify
from padless.runtime.reader import PackedReader

COMMANDS: dict[str, Any] = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
BUILD_OPTIONS = """
    --tokenizer --max-length --output --format --column --split --subset --revision --text-by --limit
    --weight --max-records --max-tokens --mix-by --mix-target --max-repeats
    --template --template-arg --image-root --system
    --train-on --expand-turns --bos --eos --allow-special --fim-rate --fim-spm-rate --fim-tokens --strategy
    --overflow --max-sequences-per-pack --align --packs-multiple --plan-window --homogeneous --on-bad-record
    --on-empty-reply --max-drop-share --eval-fraction --eval-source --eval-strategy --labels --shard-size
    --compression --workers --engine --ray-address --seed --config --force --quiet --profile --json
""".split()
BUILD_NAMES = """
    output records kept_records dropped_records dropped_by_reason sequences packs bound_packs tokens
    trained_tokens masked_tokens cut_tokens utilization seconds backends
""".split()
REPORT_NAMES = """
    packs sequences tokens capacity utilization bound_packs padding records tokens_by_fate by_source warnings
""".split()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("packed") / "out"
    built(DEMO, output)
    return output


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("splits") / "out"
    built(DEMO, output, "--eval-fraction", 0.2)
    return output


# -- help ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_option_has_help(command: str) -> None:
    made = COMMANDS[command]
    assert made.help
    for parameter in made.params:
        assert parameter.help or parameter.name == "help", parameter.name
    run = pack(command, "--help")
    assert (run.code, run.err) == (0, "")
    assert f"Usage: pack-dataset {command}" in run.out


def test_the_commands_are_those_of_the_design() -> None:
    assert {"build", "report", "inspect", "verify", "repack", "demo"} <= COMMANDS.keys()
    assert {"build", "report", "inspect", "verify", "demo"} <= set(re.findall(r"\w+", pack("--help").out))


def test_options_are_spelled_as_in_the_design() -> None:
    spelled = {name for parameter in COMMANDS["build"].params for name in parameter.opts if "--" in name}
    assert spelled - {"--help"} == set(BUILD_OPTIONS)


def test_options_and_fields_have_the_same_names_and_defaults() -> None:
    parameters = {FIELD_OF_OPTION.get(p.name, p.name): p for p in COMMANDS["build"].params}
    by_name = {field.name: field for field in fields(PackConfig)}
    only_command = {"config", "quiet", "profile", "json"}
    assert parameters.keys() - only_command == by_name.keys() - {"progress"}
    compared = 0
    for name, field in by_name.items():
        default = parameters[name].default if name in parameters else None
        if isinstance(field.default, (str, int, float)):
            assert default == field.default, name
            compared += 1
    assert compared > 15


@pytest.mark.parametrize("option", [name for name in BUILD_OPTIONS if name != "--config"])
def test_a_wrong_value_is_told_by_the_options_name(option: str, tmp_path: Path) -> None:
    name = option.removeprefix("--").replace("-", "_")
    given = {"tokenizer": str(TOKENIZER), "max_length": MAX_LENGTH, "output": str(tmp_path / "out")}
    run = pack("build", DEMO, "--config", config_file(tmp_path, json.dumps({**given, name: [[1]]})))
    told = f"{name} must be a mapping" if name in ("column", "template_arg") else f"error: {option} must "
    assert run.code == 2 and told in run.err, run.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-length", 0), "--max-length must be at least 1 token, got 0"),
        (("--column", "answer=x"), "--column has no role 'answer'"),
        (("--format", "csv"), "--format must be one of auto,"),
        (("--align", 3), "--max-length 1,024 is no multiple of align 3"),
        (("--align", 2000), "--align 2,000 is larger than --max-length 1,024"),
        (("--eval-fraction", 1), "--eval-fraction 1 leaves nothing to train on"),
        (("--eval-fraction", 0.1, "--eval-source", DEMO), "--eval-fraction and --eval-source exclude"),
        (("--expand-turns", "--train-on", "all"), "--expand-turns trains each turn "),
        (("--split", "all", "--eval-fraction", 0.1), "--split all keeps the sources' own splits"),
    ],
)
def test_options_that_cannot_be_are_told_as_they_are_typed(
    options: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    run = build(DEMO, tmp_path / "out", *options)
    assert run.code == 2 and f"error: {message}" in run.err, run.err
    assert not [item.name for item in fields(PackConfig) if "_" in item.name and item.name in run.err], (
        run.err
    )


def test_help_names_the_choices() -> None:
    text = " ".join(pack("build", "--help").out.split())
    for name in (*FORMATS, *STRATEGIES):
        assert name in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_prepared_alone_as_among_all(command: str) -> None:
    alone: Any = typer.main.get_command(make_app(command))
    assert list(alone.commands) == [command]
    alone_options, options = (
        [parameter.opts for parameter in made.params] for made in (alone.commands[command], COMMANDS[command])
    )
    assert alone_options == options


def test_without_arguments_there_is_help() -> None:
    run = pack()
    assert "Usage" in run.out + run.err and "build" in run.out + run.err


def test_help_needs_no_tokenizer_and_no_arrow() -> None:
    code = (
        "import sys; sys.argv = ['pack-dataset', 'build', '--help']\n"
        "from padless.packer.commands import run; code = run()\n"
        "heavy = {'tokenizers', 'fastokens', 'pyarrow', 'torch', 'transformers', 'datasets'}\n"
        "sys.exit(code or sorted(heavy & sys.modules.keys()) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# -- channels ------------------------------------------------------------------------------------------


def test_the_summary_goes_to_stdout_and_nothing_to_stderr(tmp_path: Path) -> None:
    run = run_script(*build_arguments(DEMO, tmp_path / "out"))
    assert (run.code, run.err) == (0, "")
    for words in ("400 records: 400 kept", "tokens", "packs of 1,024", "% full", str(tmp_path / "out")):
        assert words in run.out, words


def test_the_summary_counts_one_as_one(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "one.jsonl", demo_rows()[:1])
    run = run_script(*build_arguments(source, tmp_path / "out"))
    assert "1 record: 1 kept" in run.out and f"1 pack of {MAX_LENGTH:,}," in run.out, run.out
    assert "(at least 1 pack needed)" in run.out


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    run = run_script(*build_arguments(DEMO, tmp_path / "out", "--quiet"))
    assert (run.code, run.out, run.err) == (0, "", "")
    assert verify(tmp_path / "out").ok
    run = pack(*build_arguments(DEMO, tmp_path / "out", "-q"))
    assert (run.code, run.out, run.err) == (0, "", "")


def test_quiet_still_tells_errors(tmp_path: Path) -> None:
    run = pack(*build_arguments(tmp_path / "none.jsonl", tmp_path / "out", "--quiet"))
    assert run.code == 2 and "none.jsonl" in run.err


def test_quiet_and_json_prints_the_object(tmp_path: Path) -> None:
    run = build(DEMO, tmp_path / "out", "--quiet")
    assert run.json["records"] == 400 and run.err == ""


def test_the_profile_goes_to_stderr(tmp_path: Path) -> None:
    run = build(DEMO, tmp_path / "out", "--profile")
    assert run.json["records"] == 400
    for stage in ("tokenize", "plan", "write"):
        assert re.search(rf"\d s +{stage}", run.err), stage


def on_a_terminal(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout, and what a terminal on stderr was sent."""
    terminal, end = pty.openpty()
    code = "from padless.packer.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(end)
        seen = b""
        try:
            while data := os.read(terminal, 65536):
                seen += data
        except OSError:  # how Linux tells that the other end is closed
            pass
        out, _ = process.communicate(timeout=300)
    os.close(terminal)
    return process.returncode, out, seen.decode()


def test_progress_shows_on_a_terminal_and_not_with_quiet(tmp_path: Path) -> None:
    code, out, seen = on_a_terminal(build_arguments(DEMO, tmp_path / "out", "--json"))
    assert code == 0 and json.loads(out)["records"] == 400
    assert "tokenize" in seen and "400 records" in seen
    code, out, seen = on_a_terminal(build_arguments(DEMO, tmp_path / "quiet", "--quiet"))
    assert (code, out, seen) == (0, "", "")


def test_errors_on_a_terminal_are_red(tmp_path: Path) -> None:
    code, out, seen = on_a_terminal(build_arguments(tmp_path / "none.jsonl", tmp_path / "out"))
    assert (code, out) == (2, "")
    assert "\x1b[1;31m" in seen and "none.jsonl" in seen


def test_brackets_in_names_are_printed_as_they_are(tmp_path: Path) -> None:
    # rich would take [red] for markup, and drop it.
    run = pack(*build_arguments(tmp_path / "[red]none.jsonl", tmp_path / "out"))
    assert "[red]none.jsonl" in run.err
    (tmp_path / "[bold] texts").mkdir()
    source = write_lines(tmp_path / "[bold] texts" / "a [b].jsonl", demo_rows()[:20])
    run = pack(*build_arguments(source, tmp_path / "[red]out"))
    assert run.code == 0, run.err
    assert "a [b].jsonl: alpaca" in run.out and "[red]out" in run.out


# -- JSON ----------------------------------------------------------------------------------------------


def test_build_gives_the_names_of_the_design(tmp_path: Path) -> None:
    facts = built(DEMO, tmp_path / "out")
    assert set(BUILD_NAMES) <= facts.keys()
    assert facts["output"] == str(tmp_path / "out")
    assert facts["records"] == facts["kept_records"] + facts["dropped_records"] == 400
    assert facts["tokens"] == facts["trained_tokens"] + facts["masked_tokens"]
    assert 0.9 < facts["utilization"] <= 1
    assert facts["seconds"] > 0
    assert set(facts["backends"]) == {"tokenizer", "template"}
    assert facts["dropped_by_reason"] == {} and facts["cut_tokens"] == 0


def test_splits_are_summed_and_listed(splits: Path) -> None:
    facts = built(DEMO, splits, "--eval-fraction", 0.2)  # finished: the same numbers again
    assert list(facts["splits"]) == ["train", "validation"]
    for name in ("records", "sequences", "packs", "tokens", "trained_tokens", "masked_tokens", "cut_tokens"):
        assert facts[name] == sum(split[name] for split in facts["splits"].values()), name
    capacity = facts["packs"] * MAX_LENGTH
    assert facts["utilization"] == pytest.approx(facts["tokens"] / capacity)
    assert "splits" not in built(DEMO, splits.parent / "one")


def test_dropped_records_are_counted_by_reason(tmp_path: Path) -> None:
    facts = built(DEMO, tmp_path / "out", "--max-length", 128, "--overflow", "drop")
    assert facts["dropped_records"] == sum(facts["dropped_by_reason"].values()) > 0
    manifest = PackedReader(tmp_path / "out").manifest
    assert facts["dropped_by_reason"] == manifest.statistics["dropped_by_reason"]
    assert facts["cut_tokens"] == sum(manifest.statistics["cut_by_reason"].values())


def test_report_inspect_and_verify_give_json(packed: Path) -> None:
    report = pack("report", packed, "--json")
    assert (report.code, report.err) == (0, "")
    assert set(REPORT_NAMES) <= report.json.keys()
    facts = built(DEMO, packed)
    for name in ("packs", "sequences", "tokens", "bound_packs", "utilization"):
        assert report.json[name] == pytest.approx(facts[name]), name
    assert report.json["records"] == {"in": 400, "whole": 400, "truncated": 0, "split": 0, "dropped": 0}
    inspected = pack("inspect", packed, "--pack", 2, "--json")
    assert inspected.code == 0
    expected = PackedReader(packed)[2]
    assert len(inspected.json["sequences"]) == len(expected.seq_lengths)
    verified = pack("verify", packed, "--json")
    assert verified.code == 0 and verified.json["ok"] is True


def test_they_print_for_people_too(packed: Path) -> None:
    for command in ("report", "inspect", "verify"):
        run = pack(command, packed)
        assert (run.code, run.err) == (0, "")
        assert len(run.out.splitlines()) > 3


def test_verify_is_exit_code_1_on_a_damaged_folder(packed: Path, tmp_path: Path) -> None:
    for name, data in files_of(packed).items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(data)
    assert run_script("verify", tmp_path / "out").code == 0
    (shard,) = (tmp_path / "out").glob("*.arrow")
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(bytes(damaged))
    run = run_script("verify", tmp_path / "out")
    assert run.code == 1
    assert "FAIL" in run.out and shard.name in run.out
    run = pack("verify", tmp_path / "out", "--json")
    assert run.code == 1 and run.json["ok"] is False


def test_a_folder_of_splits_asks_for_one(splits: Path) -> None:
    for command in ("report", "inspect"):
        run = pack(command, splits)
        assert run.code == 2
        assert "train" in run.err and "validation" in run.err
        assert pack(command, splits, "--split", "validation").code == 0
        assert pack(command, splits / "train").code == 0
    assert pack("verify", splits).code == 0


def test_a_pack_that_is_not_there_is_refused(packed: Path) -> None:
    run = pack("inspect", packed, "--pack", 1000)
    assert run.code == 2 and "1000" in run.err and run.err.startswith("error: ")


def test_the_version_is_printed() -> None:
    run = pack("--version")
    assert run.code == 0 and re.fullmatch(r"padless \S+\n", run.out)
