"""A build gives the same bytes everywhere, keeps its account, and splits by content alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import (
    DEMO,
    MAX_LENGTH,
    TOKENIZER,
    assert_verified,
    build_arguments,
    built,
    demo_rows,
    files_of,
    run_script,
    sequence_table,
    sequences_of,
    token_lists,
    workers_in,
    write_lines,
    write_many,
)

from padless.packer import PackConfig, pack_dataset
from padless.packer.strategies import CUTS, STRATEGIES
from padless.runtime.format import Manifest, SplitsManifest
from padless.runtime.reader import PackedReader

TEXT = "".join(f"{row['output']}\n\n" for row in demo_rows() if row["output"])


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of several chunks, and texts of another file."""
    folder = tmp_path_factory.mktemp("many")
    write_many(folder / "chats.jsonl")
    (folder / "texts.txt").write_text(TEXT * 8, encoding="utf-8")
    return folder


# -- the same bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--eval-fraction", 0.1)], ids=["one split", "eval split"])
def test_the_bytes_depend_on_neither_workers_nor_their_way_nor_hash_seeds(
    many: Path, tmp_path: Path, more: tuple[object, ...]
) -> None:
    """BR-116, BR-121."""
    built(many, tmp_path / "alone", *more, "--workers", 1)
    expected = files_of(tmp_path / "alone")
    assert any(name.endswith(".arrow") for name in expected)
    for way in ("threads", "processes"):
        for workers in (2, 5):
            with workers_in(way):
                built(many, tmp_path / f"{way}{workers}", *more, "--workers", workers)
            assert files_of(tmp_path / f"{way}{workers}") == expected, (way, workers)
    for seed in ("1", "2"):
        arguments = build_arguments(many, tmp_path / f"seed{seed}", *more, "--workers", 2)
        run = run_script(*arguments, PYTHONHASHSEED=seed)
        assert run.code == 0, run.err
        assert files_of(tmp_path / f"seed{seed}") == expected, seed


def test_the_input_for_it_has_several_chunks(many: Path, tmp_path: Path) -> None:
    # Otherwise one worker would do it all and the test above say little.
    started: list[float] = []
    pack_dataset(
        PackConfig(
            sources=(str(many),),
            tokenizer=str(TOKENIZER),
            max_length=MAX_LENGTH,
            output=str(tmp_path / "out"),
            progress=lambda stage, counts: started.append(counts["bytes"]) if stage == "tokenize" else None,
        )
    )
    assert len(set(started)) >= 5


@pytest.mark.parametrize(("way", "forks"), [("threads", 0), ("processes", 3)])
def test_the_two_ways_are_two_ways(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, forks: int
) -> None:
    fork, forked = os.fork, []

    def counted() -> int:
        forked.append(way)
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    with workers_in(way):
        built(many, tmp_path / "out", "--workers", 3)
    assert len(forked) == forks


def test_the_bytes_depend_on_no_place(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "here")
    elsewhere = tmp_path / "another place"
    shutil.copytree(TOKENIZER, elsewhere / "deep" / "tok")
    shutil.copy(DEMO, elsewhere / DEMO.name)
    options = ("--tokenizer", "deep/tok", "--output", "out")
    run = run_script(*build_arguments(DEMO.name, "", *options), cwd=elsewhere)
    assert run.code == 0, run.err
    assert files_of(elsewhere / "out") == files_of(tmp_path / "here")
    for name, data in files_of(tmp_path / "here").items():
        assert str(tmp_path).encode() not in data, name
        assert str(TOKENIZER).encode() not in data, name


def test_python_and_the_command_line_give_the_same_bytes(tmp_path: Path) -> None:
    built(DEMO, tmp_path / "cli", "--seed", 3)
    manifest = pack_dataset(
        PackConfig(
            sources=(str(DEMO),),
            tokenizer=str(TOKENIZER),
            max_length=MAX_LENGTH,
            output=str(tmp_path / "python"),
            seed=3,
        )
    )
    assert isinstance(manifest, Manifest)
    assert files_of(tmp_path / "python") == files_of(tmp_path / "cli")
    assert (tmp_path / "python" / "manifest.json").read_bytes() == manifest.to_json()


def test_the_seed_changes_the_order_of_packs_and_nothing_else(whole: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--seed", 7)
    assert sequences_of(tmp_path / "out") == sequences_of(whole)
    assert sequence_table(tmp_path / "out")["pack"] != sequence_table(whole)["pack"]


# -- the account ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", ["drop", "truncate"])
def test_what_is_cut_is_accounted_for(whole: Path, tmp_path: Path, overflow: str) -> None:
    facts = built(DEMO, tmp_path / "out", "--max-length", 128, "--overflow", overflow)
    assert_verified(tmp_path / "out")
    full = [len(tokens) for tokens in token_lists(whole)]
    assert facts["cut_tokens"] > 0
    assert facts["trained_tokens"] + facts["masked_tokens"] + facts["cut_tokens"] == sum(full)
    assert facts["trained_tokens"] + facts["masked_tokens"] == facts["tokens"]
    table = sequence_table(tmp_path / "out")
    assert table["record"] == list(range(400))
    assert [a + b for a, b in zip(table["length"], table["cut"], strict=True)] == full
    for length, status, reason in zip(full, table["status"], table["reason"], strict=True):
        if length <= 128:
            assert (status, reason) == ("whole", None)
        else:
            assert status in ({"drop": ("dropped",), "truncate": ("truncated", "dropped")}[overflow])
            assert reason == "too-long"
    assert facts["truncated_records"] == table["status"].count("truncated")
    assert facts["dropped_by_reason"] == {"too-long": table["status"].count("dropped")}


def test_a_truncated_chat_is_a_beginning_of_the_whole_one_and_ends_a_turn(tmp_path: Path) -> None:
    turns = [
        {"role": role, "content": f"{role} says {'word ' * 10}{number}"}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": turns}])
    built(source, tmp_path / "whole")
    length = len(token_lists(tmp_path / "whole")[0])
    facts = built(source, tmp_path / "cut", "--max-length", length // 2, "--overflow", "truncate")
    assert facts["truncated_records"] == 1
    full, cut = token_lists(tmp_path / "whole")[0], token_lists(tmp_path / "cut")[0]
    assert 0 < len(cut) <= length // 2
    assert full[: len(cut)] == cut
    assert cut[-1] == PackedReader(tmp_path / "cut").manifest.options["eos_id"]  # <|im_end|>


def test_the_fragments_of_a_text_are_the_text(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT, encoding="utf-8")
    options = ("--text-by", "file", "--max-length")
    built(tmp_path / "long.txt", tmp_path / "whole", *options, 100_000)
    facts = built(tmp_path / "long.txt", tmp_path / "split", *options, 100, "--overflow", "split")
    assert_verified(tmp_path / "split")
    table, fragments = sequence_table(tmp_path / "split"), token_lists(tmp_path / "split")
    assert table["part"] == list(range(len(fragments)))
    assert table["start"] == [100 * part for part in table["part"]]
    assert set(table["status"]) == {"fragment"}
    assert sum(fragments, ()) == token_lists(tmp_path / "whole")[0]
    assert (facts["split_records"], facts["cut_tokens"]) == (1, 0)
    assert facts["records"] == facts["kept_records"] == 1


def test_numbers_agree_with_manifest_report_and_packs(whole: Path, tmp_path: Path) -> None:
    facts = built(DEMO, tmp_path / "out")
    reader = PackedReader(tmp_path / "out")
    statistics = reader.manifest.statistics
    for name in ("sequences", "packs", "bound_packs", "tokens", "trained_tokens", "masked_tokens"):
        assert facts[name] == statistics[name], name
    packs = list(reader)
    assert facts["packs"] == len(packs)
    assert facts["tokens"] == sum(len(one.input_ids) for one in packs)
    assert facts["trained_tokens"] == sum(int((one.labels != -100).sum()) for one in packs)
    assert facts["utilization"] == pytest.approx(facts["tokens"] / (len(packs) * MAX_LENGTH))
    assert facts["bound_packs"] <= facts["packs"]


# -- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", sorted(STRATEGIES.keys() - CUTS))
def test_every_strategy_packs_the_same_sequences(whole: Path, tmp_path: Path, strategy: str) -> None:
    built(DEMO, tmp_path / "out", "--strategy", strategy)
    assert_verified(tmp_path / "out")
    assert sequences_of(tmp_path / "out") == sequences_of(whole)


def test_no_pack_has_more_sequences_than_asked(whole: Path, tmp_path: Path) -> None:
    assert max(len(one.seq_lengths) for one in PackedReader(whole)) > 3
    built(DEMO, tmp_path / "out", "--max-sequences-per-pack", 3)
    assert max(len(one.seq_lengths) for one in PackedReader(tmp_path / "out")) == 3
    assert sequences_of(tmp_path / "out") == sequences_of(whole)


def test_an_ordered_build_keeps_the_records_order(whole: Path, tmp_path: Path) -> None:
    built(DEMO, tmp_path / "out", "--strategy", "ordered", "--plan-window", 40)
    assert_verified(tmp_path / "out")
    packs = [one.sequence_ids.tolist() for one in PackedReader(tmp_path / "out")]
    firsts = [pack[0] for pack in packs]
    assert firsts == sorted(firsts)
    assert all(pack == sorted(pack) and pack[-1] - pack[0] < 40 for pack in packs)
    assert max(len(pack) for pack in packs) > 3
    assert sequences_of(tmp_path / "out") == sequences_of(whole)


def test_packs_share_out_evenly_and_nothing_is_dropped(whole: Path, tmp_path: Path) -> None:
    before = len(PackedReader(whole))
    found = built(DEMO, tmp_path / "out", "--packs-multiple", 8, "--eval-fraction", 0.1)
    packs = len(PackedReader(tmp_path / "out", split="train"))
    assert packs % 8 == 0 and before % 8 != 0 and packs < before + 8
    assert found["kept_records"] == found["records"] == 400
    assert_verified(tmp_path / "out")


def test_alignment_counts_the_padding_and_stores_none(whole: Path, tmp_path: Path) -> None:
    align = 16
    assert MAX_LENGTH % align == 0
    found = built(DEMO, tmp_path / "out", "--align", align)
    assert_verified(tmp_path / "out")
    padded = [
        sum(-(-int(n) // align) * align for n in one.seq_lengths) for one in PackedReader(tmp_path / "out")
    ]
    assert max(padded) <= MAX_LENGTH
    unaligned = [sum(-(-int(n) // align) * align for n in one.seq_lengths) for one in PackedReader(whole)]
    assert max(unaligned) > MAX_LENGTH  # so the option was needed
    assert sequences_of(tmp_path / "out") == sequences_of(whole)
    assert -(-sum(padded) // MAX_LENGTH) <= found["bound_packs"] <= found["packs"]


def test_labels_are_stored_for_plain_text_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    built(tmp_path / "text.txt", tmp_path / "auto")
    built(tmp_path / "text.txt", tmp_path / "always", "--labels", "always")
    assert not PackedReader(tmp_path / "auto").manifest.has_labels
    assert PackedReader(tmp_path / "always").manifest.has_labels
    assert sequences_of(tmp_path / "auto") == sequences_of(tmp_path / "always")
    for tokens, labels in sequences_of(tmp_path / "always").values():
        assert labels == [-100, *tokens[1:]]


def test_labels_are_stored_for_chats(whole: Path) -> None:
    reader = PackedReader(whole)
    assert reader.manifest.has_labels
    for tokens, labels in sequences_of(whole).values():
        trained = [label != -100 for label in labels]
        assert any(trained) and not all(trained[1:])
        assert [label for label in labels if label != -100] == [
            token for token, is_trained in zip(tokens, trained, strict=True) if is_trained
        ]


def test_ids_below_65536_are_stored_in_two_bytes(whole: Path) -> None:
    assert PackedReader(whole)[0].input_ids.dtype == np.uint16


@pytest.mark.shared
@pytest.mark.parametrize(("name", "kind"), [("gpt2", np.uint16), ("qwen3", np.int32)])
def test_the_tokenizer_decides_how_wide_ids_are(shared: Path, tmp_path: Path, name: str, kind: Any) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    built(tmp_path / "text.txt", tmp_path / "out", "--tokenizer", shared / "tokenizers" / name)
    assert PackedReader(tmp_path / "out")[0].input_ids.dtype == kind
    assert_verified(tmp_path / "out")


def test_a_limit_takes_the_first_records_of_all_sources(tmp_path: Path) -> None:
    rows = demo_rows()
    for name, part in (("a", rows[:30]), ("b", rows[30:60]), ("c", rows[60:])):
        write_lines(tmp_path / "in" / f"{name}.jsonl", part)
    write_lines(tmp_path / "first.jsonl", rows[:40])
    facts = built(tmp_path / "in", tmp_path / "limited", "--limit", 40)
    built(tmp_path / "first.jsonl", tmp_path / "first")
    assert facts["records"] == 40
    assert token_lists(tmp_path / "limited") == token_lists(tmp_path / "first")
    sources = PackedReader(tmp_path / "limited").manifest.sources
    assert [source.records for source in sources] == [30, 10, 0]
    assert_verified(tmp_path / "limited")


@pytest.mark.parametrize(
    ("text_by", "expected"),
    [
        ("line", ["# One", "a b", "c", "# Two", "d"]),
        ("blank", ["# One\na b", "c\n# Two\nd"]),
        ("file", ["# One\na b\n\nc\n# Two\nd\n"]),
        (r"# \w+", ["# One\na b\n\nc", "# Two\nd"]),
    ],
)
def test_text_is_cut_into_records_as_asked(tmp_path: Path, text_by: str, expected: list[str]) -> None:
    (tmp_path / "notes.txt").write_text("# One\na b\n\nc\n# Two\nd\n", encoding="utf-8")
    write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in expected])
    built(tmp_path / "notes.txt", tmp_path / "out", "--text-by", text_by)
    built(tmp_path / "rows.jsonl", tmp_path / "rows")
    assert token_lists(tmp_path / "out") == token_lists(tmp_path / "rows")


def test_columns_may_be_named(whole: Path, tmp_path: Path) -> None:
    rows = [
        {"q": row["instruction"], "more": row["input"], "a": row["output"], "input": "not this"}
        for row in demo_rows()
    ]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    named = [("--column", f"{role}={name}") for role, name in (("instruction", "q"), ("output", "a"))]
    words = [word for pair in named for word in pair]
    built(source, tmp_path / "out", *words, "--column", "input=more")
    assert token_lists(tmp_path / "out") == token_lists(whole)


def test_faults_are_dropped_counted_and_named_when_asked(tmp_path: Path) -> None:
    rows: list[Any] = [*demo_rows(), {"instruction": 3, "output": "x"}, {"instruction": "no output"}]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    facts = built(source, tmp_path / "out", "--on-bad-record", "drop")
    assert (facts["records"], facts["kept_records"], facts["dropped_records"]) == (402, 400, 2)
    assert facts["dropped_by_reason"] == {"malformed": 2}
    table = sequence_table(tmp_path / "out")
    assert table["status"][-2:] == ["dropped", "dropped"]
    assert table["pack"][-2:] == [None, None]
    assert_verified(tmp_path / "out")


def test_empty_replies_are_kept_and_counted_or_dropped(tmp_path: Path) -> None:
    rows = [{"instruction": "Say nothing.", "output": ""}, *demo_rows()[:20]]
    empty = sum(not row["output"] for row in rows)
    source = write_lines(tmp_path / "rows.jsonl", rows)
    facts = built(source, tmp_path / "kept")
    assert (facts["kept_records"], facts["empty_replies"]) == (21, empty)
    facts = built(source, tmp_path / "dropped", "--on-empty-reply", "drop")
    assert facts["dropped_by_reason"] == {"empty-reply": empty}
    assert_verified(tmp_path / "dropped")


def test_pack_dataset_gives_the_manifest_of_splits(tmp_path: Path) -> None:
    config = PackConfig(
        sources=(str(DEMO),),
        tokenizer=str(TOKENIZER),
        max_length=MAX_LENGTH,
        output=str(tmp_path / "out"),
        eval_fraction=0.2,
    )
    manifest = pack_dataset(config)
    assert isinstance(manifest, SplitsManifest)
    assert manifest.names == ("train", "validation")
