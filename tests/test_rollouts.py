"""Rollouts as records: values stay with their tokens, groups in one pack, through repack and collate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import assert_verified, build, built, files_of, pack, write_lines
from toys import packed, refused, word_tokenizer

from padless.runtime.batch import Pack
from padless.runtime.collate import collate
from padless.runtime.reader import PackedReader


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "words")


def rollout(number: int, prompt: int, response: int, **more: Any) -> dict[str, Any]:
    """Ids are 10 and up; the log-probability of a response's token is that token, negative."""
    ids = [10 + (number + place) % 80 for place in range(prompt + response)]
    return {
        "prompt_ids": ids[:prompt],
        "response_ids": ids[prompt:],
        "old_logprobs": [-token / 8 for token in ids[prompt:]],
        "advantages": number / 4 - 1,
        "reward": -float(number),
        "group_id": number // 3,
    } | more


ROWS = [rollout(n, 1 + n % 4, 2 + n % 5) for n in range(12)]


def by_sequence(folder: Path) -> dict[int, dict[str, Any]]:
    """Columns of every sequence, by its number."""
    found: dict[int, dict[str, Any]] = {}
    for number, one in enumerate(PackedReader(folder)):
        ends = np.cumsum(one.seq_lengths)
        for place, (sequence, end, length) in enumerate(
            zip(one.sequence_ids, ends, one.seq_lengths, strict=True)
        ):
            mine = slice(end - length, end)
            columns = {
                name: (values[mine] if one.extra_levels[name] == "token" else values[place]).tolist()
                for name, values in one.extras.items()
            }
            columns |= {
                "ids": one.input_ids[mine].tolist(),
                "labels": one.labels[mine].tolist(),
                "pack": number,
            }
            found[int(sequence)] = columns
    return found


def check_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    found = by_sequence(folder)
    assert len(found) == len(rows)
    for number, row in enumerate(rows):
        before, answer, one = len(row["prompt_ids"]), row["response_ids"], found[number]
        assert one["ids"] == row["prompt_ids"] + answer
        assert one["labels"] == [-100] * before + answer
        assert one["old_logprobs"] == [0.0] * before + row["old_logprobs"]
        assert one["advantages"] == [0.0] * before + [row["advantages"]] * len(answer)
        assert (one["reward"], one["group_id"]) == (row["reward"], row["group_id"])
    packs: dict[int, set[int]] = {}
    for one in found.values():
        packs.setdefault(one["group_id"], set()).add(one["pack"])
    assert all(len(some) == 1 for some in packs.values()) and len({min(some) for some in packs.values()}) > 1


def test_values_stay_with_their_tokens_and_groups_share_a_pack(tmp_path: Path, words: Path) -> None:
    packed(tmp_path, ROWS, words, "--max-length", 40)
    check_rows(tmp_path / "packed", ROWS)
    manifest = PackedReader(tmp_path / "packed").manifest
    kinds = {column.name: (column.level, column.type) for column in manifest.extras}
    assert kinds == {
        "old_logprobs": ("token", "list<float32>"),
        "advantages": ("token", "list<float32>"),
        "reward": ("sequence", "list<float32>"),
        "group_id": ("sequence", "list<int64>"),
    }
    assert manifest.options["grouped_by"] == "group_id" and manifest.options["formats"] == ["rollout"]
    assert_verified(tmp_path / "packed")
    packs: list[Pack] = [*PackedReader(tmp_path / "packed")]
    batch = collate(packs)
    assert batch["advantages"].shape == batch["labels"].shape and len(batch["reward"]) == 12


def test_repacked_rollouts_are_those_of_a_fresh_build(tmp_path: Path, words: Path) -> None:
    packed(tmp_path, ROWS, words, "--max-length", 40)
    fresh = tmp_path / "fresh"
    built(tmp_path / "rows.jsonl", fresh, "--tokenizer", words, "--max-length", 30, "--max-drop-share", 1)
    run = pack("repack", tmp_path / "packed", "--max-length", 30, "--output", tmp_path / "again")
    assert run.code == 0, run.err
    check_rows(tmp_path / "again", ROWS)
    assert files_of(tmp_path / "again") == files_of(fresh)


def test_text_takes_values_of_the_whole_answer(tmp_path: Path, words: Path) -> None:
    rows = [
        {"prompt": "w10 w11 ", "response": "w12 w13", "advantages": 0.5, "reward": 1, "group_id": "a"},
        {"prompt": "w20 ", "response": "w21", "advantages": -0.5, "reward": 0, "group_id": "a"},
    ]
    packed(tmp_path, rows, words)
    found = by_sequence(tmp_path / "packed")
    assert found[0]["advantages"] == [0, 0, 0.5, 0.5, 0.5] and found[1]["advantages"] == [0, -0.5, -0.5]
    assert [found[n]["reward"] for n in (0, 1)] == [1, 0]
    assert found[0]["group_id"] == found[1]["group_id"] >= 0 and "old_logprobs" not in found[0]


def test_a_mask_leaves_tokens_of_a_response_out(tmp_path: Path, words: Path) -> None:
    rows = [
        rollout(0, 2, 3, response_mask=[1, 0, True]),
        {
            "input_ids": [10, 11, 12],
            "response_mask": [0, 1, 1],
            "old_logprobs": [0, -1, -2],
            "advantages": [0, 3, 4],
        }
        | {"reward": 1, "group_id": 5},
    ]
    packed(tmp_path, rows, words)
    found = by_sequence(tmp_path / "packed")
    assert found[0]["labels"] == [-100, -100, 12, -100, 14]
    assert found[0]["old_logprobs"][3] == -13 / 8 and found[0]["advantages"] == [0, 0, -1, 0, -1]
    assert found[1]["labels"] == [-100, 11, 12] and found[1]["advantages"] == [0, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logprobs": [-1.0]}, "old_logprobs has 1 entries for 3 tokens"),
        ({"advantages": [1.0] * 5}, "advantages has 5 entries for 3 tokens: one for each, unshifted"),
        ({"old_logprobs": [1.0, "x", 2.0]}, "old_logprobs must be finite numbers, got 'x'"),
        ({"reward": float("inf")}, "reward must be finite numbers"),
        ({"group_id": -1}, "group_id must be a whole number from 0, or a name"),
        ({"response_mask": [0, 1, 2]}, "response_mask must be a list of 0 and 1"),
        ({"response_ids": "w1"}, "response_ids must be a list of integers"),
        ({"response_ids": [10, 11, 9999]}, "input_ids has 9999"),
        ({"video_grid_thw": [[1, 2, 2]]}, "video_grid_thw says that some of its ids stand for images or"),
    ],
)
def test_bad_rollouts_are_refused_with_what_is_wrong(
    tmp_path: Path, words: Path, change: dict[str, Any], message: str
) -> None:
    """BR-182, BR-183: values that are not one for each token of the response."""
    said = refused(tmp_path, [rollout(0, 2, 3), rollout(1, 2, 3) | change], words)
    assert "record 1" in said and message in said


def test_values_by_token_beside_text_are_refused(tmp_path: Path, words: Path) -> None:
    rows = [{"prompt": "w10 ", "response": "w12", "old_logprobs": [-1.0], "advantages": 1}]
    assert "the answer is text: give the response_ids" in refused(tmp_path, rows, words)


def test_a_column_of_some_rollouts_is_refused(tmp_path: Path, words: Path) -> None:
    some = rollout(1, 2, 3)
    del some["old_logprobs"]
    assert "1 of 2 rollouts have old_logprobs" in refused(tmp_path, [rollout(0, 2, 3), some], words)


def test_a_group_that_fits_no_pack_is_refused(tmp_path: Path, words: Path) -> None:
    rows = [rollout(n, 2, 10, group_id=7) for n in range(6)]
    assert "group 7 has 72 tokens, a pack holds 64" in refused(tmp_path, rows, words, "--max-length", 64)


def test_rollouts_are_packed_apart_from_other_records(tmp_path: Path, words: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", ROWS)
    write_lines(tmp_path / "in" / "b.jsonl", [{"text": "w10 w11"}])
    run = build(tmp_path / "in", tmp_path / "out", "--tokenizer", words, "--max-length", 64)
    assert run.code == 2 and "b.jsonl has text records and other sources have rollouts" in run.err
    assert not (tmp_path / "out").exists()


def test_rollouts_are_not_mixed(tmp_path: Path, words: Path) -> None:
    assert "once each" in refused(tmp_path, ROWS, words, "--max-length", 64, "--mix-target", 100)


def test_rollouts_are_never_cut_apart(tmp_path: Path, words: Path) -> None:
    assert "--strategy wrapped is for text" in refused(tmp_path, ROWS, words, "--strategy", "wrapped")
    assert "mid-conversation" in refused(tmp_path, ROWS, words, "--overflow", "split")


def test_rollouts_without_any_value_are_plain_sequences(tmp_path: Path, words: Path) -> None:
    packed(tmp_path, [{"prompt_ids": [10], "response_ids": [11, 12]}], words)
    assert PackedReader(tmp_path / "packed").manifest.extras == ()
    assert by_sequence(tmp_path / "packed")[0]["labels"] == [-100, 11, 12]


def test_negative_rewards_and_dropped_rollouts(tmp_path: Path, words: Path) -> None:
    """BR-185: each sequence keeps its own reward where one before it is dropped."""
    rows = [
        rollout(1, 2, 3, group_id=None),
        rollout(2, 2, 90, group_id=None),
        rollout(3, 2, 3, group_id=None),
    ]
    packed(tmp_path, rows, words, "--overflow", "drop")
    found = by_sequence(tmp_path / "packed")
    assert {number: one["reward"] for number, one in found.items()} == {0: -1.0, 2: -3.0}
    assert "group_id" not in found[0]
    assert_verified(tmp_path / "packed")
