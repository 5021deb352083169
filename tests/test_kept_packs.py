"""The cache of `pack`: what was used longest ago goes, and never what a living process uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from building import TOKENIZER

from padless.packer import pack
from padless.packer.errors import InputError
from padless.packer.kept_packs import KeptPacks, limit_bytes

HOLD = """
import sys
from pathlib import Path
from padless.packer.kept_packs import KeptPacks
for name in sys.argv[2:]:
    KeptPacks(Path(sys.argv[1]), 0).hold("packs", name)
print("held", flush=True)
sys.stdin.read()
"""


def entry(folder: Path, kind: str, name: str, *, size: int, used: int) -> Path:
    """Something that an earlier process left, used that many seconds after the epoch."""
    path = folder / kind / name
    if kind == "records":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    else:
        path.mkdir(parents=True)
        (path / "inside").write_bytes(bytes(size))
    os.utime(path, (used, used))
    return path


def names(folder: Path) -> set[str]:
    kinds = ("packs", "records", "tokenizers")
    return {path.name for kind in kinds for path in (folder / kind).glob("*")}


def test_what_was_used_longest_ago_goes_until_the_rest_fits(tmp_path: Path) -> None:
    entry(tmp_path, "packs", "old", size=100, used=1)
    entry(tmp_path, "records", "older.jsonl", size=100, used=0)
    entry(tmp_path, "tokenizers", "new", size=100, used=3)
    entry(tmp_path, "packs", "newer", size=100, used=4)
    KeptPacks(tmp_path, 250).make_room()
    assert names(tmp_path) == {"new", "newer"}


def test_nothing_goes_that_fits(tmp_path: Path) -> None:
    entry(tmp_path, "packs", "old", size=100, used=1)
    KeptPacks(tmp_path, 100).make_room()
    assert names(tmp_path) == {"old"}


def test_asking_for_an_entry_is_using_it_and_keeps_it(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        entry(tmp_path, "packs", name, size=100, used=number)
    kept = KeptPacks(tmp_path, 100)
    assert kept.hold("packs", "a").stat().st_mtime > 2
    kept.make_room()
    assert names(tmp_path) == {"a"}
    KeptPacks(tmp_path, 0).make_room()
    assert names(tmp_path) == {"a"}


def test_what_another_process_uses_stays_until_it_ends(tmp_path: Path) -> None:
    entry(tmp_path, "packs", "used", size=100, used=0)
    entry(tmp_path, "packs", "free", size=100, used=1)
    words = [sys.executable, "-c", HOLD, str(tmp_path), "used"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        KeptPacks(tmp_path, 0).make_room()
        assert names(tmp_path) == {"used"}
        other.kill()
        other.wait()
        KeptPacks(tmp_path, 0).make_room()
        assert names(tmp_path) == set()


def test_a_removal_that_was_killed_is_no_matter(tmp_path: Path) -> None:
    entry(tmp_path, "packs", "old", size=100, used=0)
    entry(tmp_path, "packs", ".old.gone", size=100, used=0)
    KeptPacks(tmp_path, 0).make_room()
    assert names(tmp_path) == set()


def test_pack_keeps_to_the_limit_and_packs_anew_what_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from padless.packer import pack\n"
        "print(pack([{'text': sys.argv[1]}], sys.argv[2], max_length=32, cache=sys.argv[3]).path)"
    )

    def packed(text: str) -> Path:
        words = [sys.executable, "-c", code, text, str(TOKENIZER), str(tmp_path)]
        return Path(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip())

    monkeypatch.setenv("PADLESS_PACKS_BYTES", "1")
    first = packed("one")
    assert first.is_dir()
    second = packed("two")
    assert second.is_dir() and not first.exists()
    assert {path.parent.name for path in tmp_path.glob("*/*")} == {"packs", "records", "locks"}
    assert packed("one") == first and first.is_dir()


def test_a_limit_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADLESS_PACKS_BYTES", "64 GiB")
    with pytest.raises(InputError, match="PADLESS_PACKS_BYTES is '64 GiB'"):
        limit_bytes()
    with pytest.raises(InputError, match="whole number of bytes"):
        pack([{"text": "a"}], TOKENIZER, max_length=32, cache=tmp_path)
