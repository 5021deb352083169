"""verify finds every way in which a folder is not what its manifest says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import (
    Folder,
    Seq,
    count_up,
    edit_manifest,
    rewrite_shard,
    rewrite_table,
    write_folder,
    write_splits,
)

from padless.packer.verify import verify
from padless.packer.verify_account import record_fates
from padless.runtime.format import ManifestError, NotPackedError, SplitError

PACKS = [
    [Seq([1, 1, 1], [False, True, True]), Seq([2])],
    [Seq([3] * 4, source=1)],
    [Seq([4, 4], source=1), Seq([5] * 5, [True, True, False, True, True], source=1)],
]
Rows = list[dict[str, Any]]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_folder(tmp_path / "packed", Folder(packs=PACKS, dropped=1))
    # The dropped record came from source 0 in the writer's eyes; the last source is what it is.
    rewrite_table(tmp_path / "packed", lambda lines: lines[-1].update(source=1))

    def move(content: dict[str, Any]) -> None:
        content["sources"][0]["records"], content["sources"][1]["records"] = 2, 4

    edit_manifest(tmp_path / "packed", move)
    return tmp_path / "packed"


def failures(path: Path) -> dict[str, str]:
    return {check.name: check.detail for check in verify(path).checks if not check.ok}


def test_a_sound_folder_passes_every_check(packed: Path) -> None:
    report = verify(packed)
    assert failures(packed) == {} and report.ok and report.warnings == ()
    names = [check.name for check in report.checks]
    assert names == ["files", "load_from_disk files", "sequence table", "packs", "account", "constraints"]
    assert report.to_json()["checks"][3]["detail"].startswith("5 sequences in 3 packs")


@pytest.mark.parametrize("labels", [True, False])
def test_folders_with_and_without_labels_pass(tmp_path: Path, labels: bool) -> None:
    folder = Folder(packs=[count_up(3, 2), count_up(1)], labels=labels, packs_per_batch=2)
    write_folder(tmp_path / "packed", folder)
    assert verify(tmp_path / "packed").ok


def test_a_folder_without_packs_passes(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[], dropped=3))
    assert failures(tmp_path / "packed") == {}


@pytest.mark.parametrize(
    "name", ["sequences.parquet", "tokenizer/tokenizer.json", "shard-00001", "shard-00000"]
)
def test_every_listed_file_is_read_to_its_last_byte(packed: Path, name: str) -> None:
    file = next(
        found
        for found in packed.rglob("*")
        if str(found.relative_to(packed)) == name or found.name.startswith(name)
    )
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert list(failures(packed)) == ["files"] and file.name in failures(packed)["files"]
    file.unlink()
    assert "not on disk" in failures(packed)["files"]


def test_a_foreign_shard_is_a_warning(packed: Path) -> None:
    (packed / "shard-00007-deadbeef.arrow").write_bytes(b"x")
    report = verify(packed)
    assert report.ok
    assert "shard-00007-deadbeef.arrow is not in the manifest" in report.warnings[0]


def test_what_has_no_manifest_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(NotPackedError):
        verify(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        ("state.json", lambda x: x["_data_files"].pop(), "does not list the manifest's shards"),
        ("state.json", lambda x: x["_data_files"].reverse(), "does not list the manifest's"),
        ("state.json", lambda x: x.update(_fingerprint="0"), "fingerprint is another plan's"),
        ("dataset_info.json", lambda x: x["features"].pop("labels"), "manifest's columns"),
        ("dataset_info.json", lambda x: x.update(features=None), "manifest's columns"),
    ],
)
def test_what_load_from_disk_reads_agrees_with_the_manifest(
    packed: Path, file: str, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    content = json.loads((packed / file).read_text())
    edit(content)
    (packed / file).write_text(json.dumps(content))
    assert words in failures(packed)["load_from_disk files"]
    (packed / file).write_text("[]")
    assert "no JSON object" in failures(packed)["load_from_disk files"]
    (packed / file).unlink()
    assert "cannot be read" in failures(packed)["load_from_disk files"]


def swap_packs(rows: Rows) -> None:
    rows.reverse()


def swap_sequences(rows: Rows) -> None:
    rows[0].update(
        input_ids=[2, 1, 1, 1],
        labels=[-100, -100, 1, 1],
        seq_lengths=[1, 3],
        sequence_ids=[1, 0],
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_packs, "sequence 2 has pack 0 in the shards, the table says 1"),
        (swap_sequences, "sequence 1 has offset 0 in the shards, the table says 3"),
        (lambda rows: rows[0].update(seq_lengths=[2, 2]), "max_seqlen"),
        (
            lambda rows: rows[0].update(seq_lengths=[1, 3], sequence_ids=[0, 1]),
            "sequences train their first token|sequence 1 has offset",
        ),
        (lambda rows: rows[0].update(sequence_ids=[0, 0]), "a sequence is in two places"),
        (lambda rows: rows[1].update(sequence_ids=[0]), "a sequence is in two places"),
        (lambda rows: rows[1].update(sequence_ids=[9]), "outside the table's 6 lines"),
        (lambda rows: rows[1].update(sequence_ids=[-1]), "outside the table's 6 lines"),
        (lambda rows: rows[1].update(sequence_ids=[5]), "sequence 5 has pack 1"),
        (lambda rows: rows[1].update(labels=[3, 3, 3, 3]), "1 sequences train their first token"),
        (lambda rows: rows[1].update(labels=[-100, 3, 4, 3]), "neither -100 nor its token"),
        (lambda rows: rows[1].update(labels=[-100, 3, -100, 3]), "num_targets is not the count"),
        (lambda rows: rows[1].update(num_targets=2), "num_targets is not the count"),
        (
            lambda rows: rows[1].update(labels=[-100, 3, -100, 3], num_targets=2),
            "sequence 2 has num_targets 2 in the shards, the table says 3",
        ),
    ],
)
def test_a_sequence_that_is_not_where_the_table_says_is_found(
    packed: Path, change: Callable[[Rows], None], words: str
) -> None:
    rewrite_shard(packed, 0, change)
    found = failures(packed)["packs"]
    assert any(word in found for word in words.split("|")), found


def test_a_sequence_that_is_in_no_pack_is_found(packed: Path) -> None:
    rewrite_table(packed, lambda lines: lines[-1].update(pack=0, offset=0, status="whole", reason=None))
    assert "1 sequences have a pack in the table and are in none" in failures(packed)["packs"]


def test_a_pack_over_max_length_is_found(packed: Path) -> None:
    edit_manifest(packed, lambda content: content["statistics"].update(max_length=6))
    assert "a pack holds 7 tokens, max_length is 6" in failures(packed)["packs"]


@pytest.mark.parametrize("key", ["sequences", "tokens"])
def test_a_shard_whose_sums_are_not_the_manifests_is_found(packed: Path, key: str) -> None:
    def move_one(content: dict[str, Any]) -> None:
        content["shards"][0][key] -= 1
        content["shards"][1][key] += 1

    edit_manifest(packed, move_one)
    assert "holds 3 sequences and 8 tokens" in failures(packed)["packs"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[3].update(record=0), "records are out of order"),
        (lambda lines: lines[1].update(part=1), "not numbered 0, 1"),
        (lambda lines: lines[1].update(record=0), "not numbered 0, 1"),
        (lambda lines: lines[1].update(source=1), "records per source are [1, 5]"),
        (lambda lines: lines[1].update(source=-1), "source reaches from -1"),
        (lambda lines: lines[5].update(length=2), "dropped and has a place or a length"),
        (lambda lines: lines[5].update(pack=1), "dropped and has a place or a length"),
        (lambda lines: lines[4].update(pack=None), "dropped and has a place or a length"),
        (lambda lines: lines[1].update(reason="why not"), "no reason though"),
        (lambda lines: lines[5].update(reason=None), "no reason though"),
        (lambda lines: lines[1].update(record=0, part=1, cut=3), "cut is not on its record's"),
    ],
)
def test_a_line_that_makes_no_sense_is_found(
    packed: Path, change: Callable[[Rows], None], words: str
) -> None:
    rewrite_table(packed, change)
    assert words in failures(packed)["sequence table"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda x: x["records"].update({"in": 7}), "records is"),
        (lambda x: x["records"].update(whole=4, split=1), "records is"),
        (lambda x: x.update(dropped_by_reason={"too long": 2}), "dropped_by_reason is"),
        (lambda x: x.update(dropped_by_reason={"bad": 1}), "dropped_by_reason is"),
        (lambda x: x.update(trained_tokens=10), "trained_tokens is 9"),
        (lambda x: x.update(masked_tokens=0), "masked_tokens is 6"),
        (lambda x: x.update(cut_tokens=6), "cut_tokens is 5"),
        (lambda x: x.update(cut_by_reason={"too long": 4}), "cut_by_reason sums to 4"),
        (lambda x: x.update(bound_packs=4), "bound_packs is 4"),
    ],
)
def test_an_account_that_does_not_add_up_is_found(
    packed: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    def change(content: dict[str, Any]) -> None:
        edit(content["statistics"])

    edit_manifest(packed, change)
    assert words in failures(packed)["account"]


def test_a_record_counts_once_by_its_worst_part() -> None:
    lines = [
        (0, "whole", None),
        (1, "fragment", "too long"),
        (1, "fragment", "too long"),
        (2, "whole", None),
        (2, "truncated", "too long"),
        (3, "whole", None),
        (3, "dropped", "no reply"),
        (7, "dropped", "bad"),
        (7, "dropped", "worse"),
        (8, "dropped", "bad"),
    ]
    table = {
        name: np.array([line[place] for line in lines], dtype=object if place else np.int64)
        for place, name in enumerate(("record", "status", "reason"))
    }
    fates, reasons = record_fates(table)
    assert fates == {"in": 6, "whole": 1, "dropped": 3, "truncated": 1, "split": 1}
    assert reasons == {"no reply": 1, "bad": 2}


def test_every_split_is_verified_and_named(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    write_splits(path, {"train": Folder(packs=PACKS), "validation": Folder(packs=[count_up(2)])})
    report = verify(path)
    assert report.ok and len(report.checks) == 2 * 7
    assert verify(path, split="train").ok
    with pytest.raises(SplitError, match="train, validation"):
        verify(path, split="test")
    next((path / "validation").glob("shard-*")).unlink()
    assert list(failures(path)) == ["validation: files"]
    edit_manifest(path / "train", lambda content: content.update(seed=5))
    assert list(failures(path)) == ["train: manifest", "validation: files"]


@settings(max_examples=60, deadline=None)
@given(
    packs=st.lists(
        st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=4),
        min_size=1,
        max_size=7,
    ),
    packs_per_batch=st.integers(1, 3),
)
def test_any_folder_that_is_right_passes(
    tmp_path_factory: pytest.TempPathFactory, packs: list[list[list[bool]]], packs_per_batch: int
) -> None:
    path = tmp_path_factory.mktemp("right") / "packed"
    rows = [[Seq([7] * len(trained), trained) for trained in pack] for pack in packs]
    write_folder(path, Folder(packs=rows, packs_per_batch=packs_per_batch, packs_per_shard=4))
    assert failures(path) == {}
