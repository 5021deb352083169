"""`push` against a stand-in of the Hub: one commit with what the folder holds, nothing left of before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from building import DEMO, TOKENIZER, pack
from hub_stand_in import Repository, StandIn, stand_in

NAME = "team/packed"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


def build(output: Path, *options: object) -> Path:
    words = ("--tokenizer", TOKENIZER, "--output", output, *options)
    run = pack("build", DEMO, *(words if "--max-length" in options else (*words, "--max-length", 1024)))
    assert run.code == 0, run.err
    return output


def on_disk(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def on_hub(hub: StandIn, branch: str = "main") -> dict[str, bytes]:
    found = hub.repositories[f"datasets/{NAME}"]
    return found.commits[found.refs[branch]]


@pytest.mark.parametrize("options", [(), ("--eval-fraction", 0.1)], ids=["one split", "splits"])
def test_the_repository_holds_what_the_folder_does(
    hub: StandIn, tmp_path: Path, options: tuple[object, ...]
) -> None:
    folder = build(tmp_path / "packed", *options)
    run = pack("push", folder, NAME)
    assert run.code == 0, run.err
    assert f"{NAME}/commit/" in run.out
    assert on_hub(hub) == on_disk(folder)  # README.md, which is written on the way, too
    assert len(hub.repositories[f"datasets/{NAME}"].commits) == 2  # the empty one and this


def test_a_second_push_takes_the_first_ones_files_away_and_no_others(hub: StandIn, tmp_path: Path) -> None:
    hub.repositories[f"datasets/{NAME}"] = Repository.of({"LICENSE": b"mine", "notes/plan.txt": b"mine"})
    pack("push", build(tmp_path / "first"), NAME)
    second = build(tmp_path / "second", "--max-length", 2048)
    assert pack("push", second, NAME).code == 0
    assert on_hub(hub) == on_disk(second) | {"LICENSE": b"mine", "notes/plan.txt": b"mine"}


def test_a_branch_is_made_and_main_stays(hub: StandIn, tmp_path: Path) -> None:
    folder = build(tmp_path / "packed")
    assert pack("push", folder, NAME, "--revision", "packed-1024").code == 0
    assert on_hub(hub) == {} and on_hub(hub, "packed-1024") == on_disk(folder)


def test_plans_go_along(hub: StandIn, tmp_path: Path) -> None:
    folder = build(tmp_path / "packed")
    assert pack("repack", folder, "--plan-only", "other", "--seed", 7).code == 0
    pack("push", folder, NAME)
    assert "plans/other.parquet" in on_hub(hub) and on_hub(hub) == on_disk(folder)


def test_a_damaged_folder_is_never_sent(hub: StandIn, tmp_path: Path) -> None:
    folder = build(tmp_path / "packed")
    shard = next(folder.glob("shard-*"))
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 1
    shard.write_bytes(bytes(raw))
    run = pack("push", folder, NAME)
    assert run.code == 2 and shard.name in run.err
    assert hub.requests == []


@pytest.mark.parametrize("edited", [False, True])
def test_the_card_is_that_of_the_folder(hub: StandIn, tmp_path: Path, edited: bool) -> None:
    folder = build(tmp_path / "packed")
    assert pack("report", folder, "--card").code == 0
    before = (folder / "README.md").read_bytes()
    if edited:
        (folder / "README.md").write_bytes(before + b"mine\n")
    build(folder, "--max-length", 2048, "--force")
    assert pack("push", folder, NAME).code == 0
    card = on_hub(hub)["README.md"]
    assert card == before + b"mine\n" if edited else card != before and b"| 2,048 |" in card
    assert card == (folder / "README.md").read_bytes()


def other_shards(content: bytes) -> bytes:
    return content.replace(b"shard-00000", b"shard-00001")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("state.json", other_shards),
        ("state.json", lambda content: content[:-3]),
        ("state.json", lambda content: None),
        ("dataset_info.json", lambda content: content.replace(b"seq_lengths", b"lengths")),
        ("dataset_info.json", lambda content: b"[]"),
        ("plans/other.parquet", lambda content: content[:-9]),
    ],
)
def test_what_has_no_checksum_must_belong_to_the_manifest(
    hub: StandIn, tmp_path: Path, name: str, change: Callable[[bytes], bytes | None]
) -> None:
    folder = build(tmp_path / "packed")
    assert pack("repack", folder, "--plan-only", "other", "--seed", 7).code == 0
    changed = change((folder / name).read_bytes())
    if changed is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(changed)
    run = pack("push", folder, NAME)
    assert run.code == 2 and str(folder / name) in run.err and "Traceback" not in run.err
    assert hub.requests == []


@pytest.mark.parametrize("name", ["dataset_dict.json", "validation/manifest.json"])
def test_splits_must_belong_to_the_manifest(hub: StandIn, tmp_path: Path, name: str) -> None:
    folder = build(tmp_path / "packed", "--eval-fraction", 0.1)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content.replace(b"validation", b"va1idation") + b" ")
    run = pack("push", folder, NAME)
    assert run.code == 2 and str(folder / name) in run.err
    assert hub.requests == []


def test_refusals_say_what_to_do(hub: StandIn, tmp_path: Path) -> None:
    folder = build(tmp_path / "packed")
    hub.read_only = True
    run = pack("push", folder, NAME)
    assert run.code == 2 and "hf auth login" in run.err
    run = pack("push", folder, "no-name")
    assert run.code == 2 and "ORG/NAME" in run.err
    run = pack("push", tmp_path, NAME)
    assert run.code == 2 and str(tmp_path) in run.err
