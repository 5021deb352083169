"""verify finds packs that break what they were planned under; bounds know of pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from building import assert_verified, build_arguments, built, pack, write_lines
from packed import edit_manifest, rewrite_shard


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n} ", "chosen": "yes " * 12, "rejected": "no " * 12} for n in range(9)]
    built(write_lines(tmp_path / "pairs.jsonl", rows), tmp_path / "out", "--max-length", 48)
    assert_verified(tmp_path / "out")
    return tmp_path / "out"


def constraint(folder: Path, *options: object) -> dict[str, Any]:
    run = pack("verify", folder, "--json", *options)
    (found,) = (check for check in run.json["checks"] if check["name"] in ("constraints", "plan other"))
    assert run.code == (0 if found["ok"] else 1)
    return dict(found)


def test_pairs_that_share_packs_are_told_and_a_torn_one_is_found(pairs: Path) -> None:
    assert "9 groups by pair_id share packs" in constraint(pairs)["detail"]

    def tear(rows: list[dict[str, Any]]) -> None:
        first, second = rows[0], rows[1]
        first["pair_id"], second["pair_id"] = (
            [second["pair_id"][0], *first["pair_id"][1:]],
            [first["pair_id"][0], *second["pair_id"][1:]],
        )

    rewrite_shard(pairs, 0, tear)
    found = constraint(pairs)
    assert not found["ok"] and found["detail"] == ("sequences of one pair_id are in different packs (2 such)")


def test_the_bound_of_pairs_is_what_pairs_can_reach(pairs: Path) -> None:
    facts = json.loads((pairs / "manifest.json").read_bytes())["statistics"]
    assert facts["packs"] == facts["bound_packs"] == 9  # two of them fit no pack together
    assert facts["tokens"] <= 8 * 48  # which the tokens alone do not tell


def test_a_plan_is_held_to_its_own_cap_and_to_the_pairs(pairs: Path) -> None:
    run = pack("repack", pairs, "--plan-only", "other", "--max-length", 300)
    assert run.code == 0, run.err
    assert "9 groups by pair_id share packs" in constraint_of_plan(pairs)


def constraint_of_plan(folder: Path) -> str:
    checks = pack("verify", folder, "--plan", "other", "--json").json["checks"]
    (found,) = (check for check in checks if check["name"] == "plan other")
    assert found["ok"], found
    return str(found["detail"])


def test_packs_over_the_cap_and_of_several_sources_are_found(tmp_path: Path) -> None:
    rows = [{"text": f"{n} is a number"} for n in range(20)]
    first = write_lines(tmp_path / "a.jsonl", rows)
    second = write_lines(tmp_path / "b.jsonl", rows)
    assert pack(*build_arguments(first, tmp_path / "out", second)).code == 0

    def claim_cap(content: dict[str, Any]) -> None:
        content["options"]["max_sequences_per_pack"] = 3

    def claim_source(content: dict[str, Any]) -> None:
        content["options"].update(max_sequences_per_pack=40, homogeneous=True, source_arguments=[0, 1])

    edit_manifest(tmp_path / "out", claim_cap)
    assert constraint(tmp_path / "out")["detail"] == "a pack holds 40 sequences, max_sequences_per_pack is 3"
    edit_manifest(tmp_path / "out", claim_source)
    assert "hold more than one source" in constraint(tmp_path / "out")["detail"]
