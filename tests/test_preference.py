"""Judged answers: what rows of pairs and of labelled answers become, and that pairs stay together."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from building import assert_verified, build, built, files_of, pack, sequence_table, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from toys import BOS, CHAT, END, EOS, byte_tokenizer, packed, refused, targets, turns, word_tokenizer

from padless.packer.errors import InputError, RecordError
from padless.packer.formats import FORMATS, detect
from padless.packer.formats.examples import Chat, Columns, Pair, Preference, Rated
from padless.packer.strategies import CUTS, STRATEGIES
from padless.runtime.collate import collate
from padless.runtime.reader import PackedReader

USUAL = Columns({})
ASK, YES, NO = turns("w10", "w20")[0], turns("w10", "w20")[1], turns("w10", "w21")[1]
PAIR = Preference(Chat([ASK, YES], None, 1), Chat([ASK, NO], None, 1))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, PAIR),
        ({"prompt": "w10", "chosen": YES, "rejected": [NO]}, PAIR),
        ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, PAIR),
        ({"prompt": "w10 ", "chosen": [ASK, YES], "rejected": [ASK, NO], "score_chosen": 3.0}, PAIR),
        ({"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]}, PAIR),
        (
            {
                "conversations": [{"from": "human", "value": "w10"}],
                "chosen": {"from": "gpt", "value": "w20"},
                "rejected": {"from": "gpt", "value": "w21"},
            },
            PAIR,
        ),
        ({"question": "q", "chosen": "a", "rejected": "b"}, Preference(Pair("q", "a"), Pair("q", "b"))),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: q\n\nAssistant: yet"},
            Preference(
                Pair("\n\nHuman: q\n\nAssistant:", " yes"), Pair("\n\nHuman: q\n\nAssistant:", " yet")
            ),
        ),
        ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, Preference(PAIR.chosen, PAIR.chosen)),
        ({"prompt": "q", "completion": "a", "label": True}, Rated(Pair("q", "a"), True)),
        (
            {"messages": [ASK, YES, ASK, NO], "label": False},
            Rated(Chat([ASK, YES, ASK, NO], None, 3), False),
        ),
        (
            {"conversations": [{"from": "human", "value": "w10"}, {"from": "gpt", "value": "w20"}]}
            | {"kto_tag": True},
            Rated(Chat([ASK, YES], None, 1), True),
        ),
    ],
)
def test_a_row_is_told_by_its_columns_and_becomes(row: dict[str, Any], expected: object) -> None:
    assert detect(row, USUAL, "here") == "preference"
    assert FORMATS["preference"].convert(row, USUAL) == expected


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "yes", "rejected": "yet"}, "no column prompt or question or query, and chosen"),
        ({"chosen": [ASK, YES], "rejected": [YES, NO]}, "not both conversations"),
        ({"chosen": [ASK, YES], "rejected": [{**ASK, "content": "w11"}, NO]}, "not begin with the same turn"),
        ({"prompt": "other", "chosen": [ASK, YES], "rejected": [ASK, NO]}, "the prompt is not in them"),
        ({"prompt": [NO], "chosen": [ASK, YES], "rejected": [ASK, NO]}, "not begin with the prompt"),
        ({"prompt": [ASK], "chosen": [YES], "rejected": [{"role": "tool", "content": "x"}]}, "the rejected"),
        ({"prompt": [ASK], "chosen": [YES], "rejected": [{"role": "assistant"}]}, r"rejected\[0\] \(assist"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "chosen must be text"),
        ({"chosen": "a"}, "no column rejected"),
        ({"messages": [ASK, YES], "label": "good"}, r"label must be true or false \(or 1 or 0\), got 'good'"),
        ({"messages": [YES, ASK], "label": True}, "the last turn is not the assistant's"),
        ({"text": "q", "label": True}, "no prompt and completion, and no messages"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "label": False},
            "label False beside chosen and",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "kto_tag": 1}, "kto_tag 1 beside chosen and reject"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_naming_the_column(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        FORMATS["preference"].convert(row, USUAL)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [ASK, YES], "label": "greeting"}, "messages"),
        ({"text": "t", "label": True}, "text"),
        ({"prompt": "q", "completion": "a", "chosen": None, "rejected": None}, "prompt-completion"),
    ],
)
def test_labels_of_other_kinds_and_empty_pairs_are_no_judgement(row: dict[str, Any], name: str) -> None:
    assert detect(row, USUAL, "here") == name


def test_a_pair_gives_two_sequences_that_are_tied(tmp_path: Path, words: Path) -> None:
    other = {"prompt": "w11", "chosen": [turns("", "w22")[1]], "rejected": [turns("", "w23")[1]]}
    found = packed(tmp_path, [{"chosen": [ASK, YES], "rejected": [ASK, NO]}, other], words)
    assert targets(found) == [[20, END], [21, END], [22, END], [23, END]]
    table = sequence_table(tmp_path / "packed")
    assert table["record"] == [0, 0, 1, 1] and table["part"] == [0, 1, 0, 1]
    assert_verified(tmp_path / "packed")
    reader = PackedReader(tmp_path / "packed")
    batch = collate(list(reader))
    order = batch["sequence_ids"].argsort()
    assert batch["pair_id"][order].tolist() == [0, 0, 1, 1]
    assert batch["is_chosen"][order].tolist() == [1, 0, 1, 0]
    run = pack("inspect", tmp_path / "packed")
    assert ", pair_id 1, is_chosen 0 " in " ".join(run.out.split())
    levels = {column.name: (column.level, column.type) for column in reader.manifest.extras}
    assert levels == {"pair_id": ("sequence", "list<int64>"), "is_chosen": ("sequence", "list<int8>")}


def test_pair_ids_count_over_all_sources_and_sequences_of_no_pair_have_none(
    tmp_path: Path, words: Path
) -> None:
    first = write_lines(tmp_path / "in" / "a.jsonl", [{"messages": [ASK, YES]}] * 3)
    write_lines(tmp_path / "in" / "b.jsonl", [{"chosen": [ASK, YES], "rejected": [ASK, NO]}] * 2)
    built(first.parent, tmp_path / "packed", "--tokenizer", words, "--max-length", 128)
    (one,) = PackedReader(tmp_path / "packed")
    found = sorted(
        zip(
            one.sequence_ids.tolist(),
            one.extras["pair_id"].tolist(),
            one.extras["is_chosen"].tolist(),
            strict=True,
        )
    )
    assert [row[1:] for row in found] == [(-1, -1)] * 3 + [(3, 1), (3, 0), (4, 1), (4, 0)]


def test_labels_of_single_answers_become_a_column(tmp_path: Path, words: Path) -> None:
    rows = [{"messages": [ASK, YES, ASK, NO], "label": True}, {"messages": [ASK, NO], "label": False}]
    assert targets(packed(tmp_path, rows, words)) == [[21, END], [21, END]]
    (one,) = PackedReader(tmp_path / "packed")
    assert dict(zip(one.sequence_ids.tolist(), one.extras["label"].tolist(), strict=True)) == {0: 1, 1: 0}


@pytest.mark.parametrize("long", ["chosen", "rejected"])
def test_both_of_a_pair_are_dropped_where_one_is_too_long(tmp_path: Path, words: Path, long: str) -> None:
    """BR-180: never one side only, and counted."""
    short = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
    row = {**short, long: [{"role": "assistant", "content": "w20 " * 100}]}
    found = packed(tmp_path, [short, row, short], words, "--overflow", "drop")
    assert targets(found) == [[20, END], [21, END]] * 2
    table = sequence_table(tmp_path / "packed")
    assert table["record"] == [0, 0, 1, 2, 2]
    assert (table["status"][2], table["reason"][2]) == ("dropped", "too-long")
    assert table["cut"] == [0, 0, 12 + 12 + 99, 0, 0]
    assert_verified(tmp_path / "packed")


def test_both_answers_begin_with_the_prompt_and_one_begin_token(tmp_path: Path) -> None:
    """BR-179: prompt w10, chosen w20, rejected w21; an answer carries no begin token of its own."""
    words = word_tokenizer(tmp_path / "words", template=None, begin="<bos>")
    found = packed(tmp_path, [{"prompt": "w10 ", "chosen": "w20", "rejected": "w21"}], words)
    assert [ids for ids, _ in found] == [[BOS, 10, 20, EOS], [BOS, 10, 21, EOS]]
    assert targets(found) == [[20, EOS], [21, EOS]]


def test_both_of_a_pair_are_dropped_where_one_is_refused(tmp_path: Path) -> None:
    template = "{% if messages[-1].content == 'w66' %}{{ raise_exception('not that') }}{% endif %}"
    words = word_tokenizer(tmp_path / "words", template=template + CHAT)
    rows = [{"prompt": [ASK], "chosen": [YES], "rejected": [{**NO, "content": "w66"}]}]
    rows.append({"prompt": [ASK], "chosen": [YES], "rejected": [NO]})
    assert "record 0 (line 1): the chat template refuses it: not that" in refused(tmp_path, rows, words)
    found = packed(tmp_path, rows, words, "--on-bad-record", "drop")
    assert targets(found) == [[20, END], [21, END]]
    assert sequence_table(tmp_path / "packed")["reason"] == ["malformed", None, None]
    assert_verified(tmp_path / "packed")


def test_a_pair_is_counted_as_truncated_where_its_second_half_is(tmp_path: Path, words: Path) -> None:
    longer = [NO, {**ASK, "content": "w11 " * 60}, YES]
    rows = [{"prompt": [ASK], "chosen": [YES], "rejected": longer}]
    found = packed(tmp_path, rows, words, "--overflow", "truncate")
    assert targets(found) == [[20, END], [21, END]]
    table = sequence_table(tmp_path / "packed")
    assert table["status"] == ["truncated", "truncated"] and table["cut"][0] > 60 and table["cut"][1] == 0
    assert_verified(tmp_path / "packed")


@pytest.mark.parametrize("strategy", sorted(STRATEGIES.keys() - CUTS))
def test_the_two_of_a_pair_share_a_pack(tmp_path: Path, words: Path, strategy: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [ASK], "chosen": [{**YES, "content": "w20 " * (n % 11 + 1)}], "rejected": [NO]}
        for n in range(40)
    ]
    alone = write_lines(tmp_path / "in" / "a.jsonl", [{"messages": [ASK, YES]}] * 6)
    write_lines(tmp_path / "in" / "b.jsonl", rows)
    options = ("--tokenizer", words, "--max-length", 64, "--strategy", strategy, "--packs-multiple", 2)
    built(alone.parent, tmp_path / "packed", *options)
    packs_of_pair: dict[int, list[int]] = {}
    reader = PackedReader(tmp_path / "packed")
    for number, one in enumerate(reader):
        for pair in one.extras["pair_id"].tolist():
            packs_of_pair.setdefault(pair, []).append(number)
    assert len(packs_of_pair.pop(-1)) == 6
    assert len(packs_of_pair) == 40
    assert all(len(packs) == 2 and len(set(packs)) == 1 for packs in packs_of_pair.values())
    assert reader.manifest.options["grouped_by"] == "pair_id" and len(reader) % 2 == 0
    assert_verified(tmp_path / "packed")


def test_a_pair_that_fits_no_pack_together_goes_by_overflow(tmp_path: Path, words: Path) -> None:
    long = [{"role": "assistant", "content": "w20 " * 40}]
    rows = [{"prompt": [ASK], "chosen": [YES], "rejected": [NO]}]
    rows.append({"prompt": [ASK], "chosen": long, "rejected": long})
    said = refused(tmp_path, rows, words, "--max-length", 64)
    assert "record 1 (line 2)" in said and "tokens together and max_length is 64" in said
    assert "truncate" not in said and "--overflow drop" in said
    packed(tmp_path, rows, words, "--max-length", 64, "--overflow", "drop")
    table = sequence_table(tmp_path / "packed")
    assert table["status"] == ["whole", "whole", "dropped"] and table["reason"][2] == "too-long"
    assert_verified(tmp_path / "packed")


def test_a_cap_below_a_pair_is_refused(tmp_path: Path, words: Path) -> None:
    rows = [{"prompt": [ASK], "chosen": [YES], "rejected": [NO]}]
    assert "--max-sequences-per-pack 1 is too small for what shares a pack" in refused(
        tmp_path, rows, words, "--max-sequences-per-pack", 1
    )


def test_pairs_stay_on_one_side_of_a_split(tmp_path: Path, words: Path) -> None:
    rows = [{"prompt": f"w{n}", "chosen": [YES], "rejected": [NO]} for n in range(10, 50)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    options = ("--tokenizer", words, "--max-length", 64, "--eval-fraction", 0.3)
    built(source, tmp_path / "packed", *options)
    for split in ("train", "validation"):
        table = sequence_table(tmp_path / "packed" / split)
        assert table["part"] == [0, 1] * (len(table["part"]) // 2)
        for one in PackedReader(tmp_path / "packed" / split):
            records = [table["record"][n] for n in one.sequence_ids.tolist()]
            assert one.extras["pair_id"].tolist() == records
    assert_verified(tmp_path / "packed")


def test_strings_are_taken_as_they_are_and_go_through_a_template_that_is_named(
    tmp_path: Path, words: Path
) -> None:
    rows = [{"prompt": "w10 ", "chosen": "w20", "rejected": "w21"}]
    assert [ids for ids, _ in packed(tmp_path / "a", rows, words)] == [[10, 20, 2], [10, 21, 2]]
    template = tmp_path / "template.jinja"
    template.write_text(CHAT)
    found = packed(tmp_path / "b", rows, words, "--template", template)
    assert targets(found) == [[20, END], [21, END]]


def test_turns_of_pairs_are_not_expanded(tmp_path: Path, words: Path) -> None:
    rows = [{"prompt": [ASK], "chosen": [YES], "rejected": [NO]}]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    run = build(source, tmp_path / "packed", "--tokenizer", words, "--expand-turns")
    assert run.code == 2 and "apart" in run.err


@pytest.mark.parametrize("row", [{"prompt": "q", "completion": "a"}, {"messages": [ASK, YES]}])
@pytest.mark.parametrize("label", [0, 1])
def test_a_label_that_is_a_number_is_asked_about_and_taken_as_told(row: dict[str, Any], label: int) -> None:
    row = {**row, "label": label}
    with pytest.raises(InputError, match="--format preference or --format (prompt-completion|messages)"):
        detect(row, USUAL, "rows.jsonl")
    found = FORMATS["preference"].convert(row, USUAL)
    assert isinstance(found, Rated) and found.label is bool(label)


SEAM = {"prompt": "Cost: ", "chosen": "12", "rejected": "$12"}


@pytest.mark.parametrize("swapped", [False, True])
def test_both_answers_of_strings_begin_behind_the_same_prompt_ids(tmp_path: Path, swapped: bool) -> None:
    """BR-178: a merge over the seam (space and $) on one side moves the boundary on both, and no id."""
    tokenizer = byte_tokenizer(tmp_path / "bytes", (" ", "$"), template=None)
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    row = {**SEAM, "chosen": "$12", "rejected": "12"} if swapped else SEAM
    found = packed(tmp_path, [row, {**SEAM, "rejected": "13"}], tokenizer)
    texts = [row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]]
    assert [ids for ids, _ in found[:2]] == [[*library.encode(text).ids, EOS] for text in texts]
    prompts = [ids[: labels.index(next(t for t in labels if t != -100))] for ids, labels in found[:2]]
    assert prompts[0] == prompts[1] == library.encode("Cost:").ids
    assert targets(found[:2]) == [[*library.encode(text).ids[5:], EOS] for text in texts]
    assert targets(found[2:]) == [[*library.encode(text).ids, EOS] for text in ("12", "13")]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.text("ab $", max_size=4)] * 3), min_size=1, max_size=4))
def test_whatever_merges_the_prompts_of_a_pair_are_the_same(rows: list[tuple[str, str, str]]) -> None:
    merges = [("a", "b"), (" ", "$"), ("b", "a"), ("a", "a"), ("$", "$")]
    with TemporaryDirectory() as scratch:
        tokenizer = byte_tokenizer(Path(scratch) / "bytes", *merges, template=None)
        given_rows = [{"prompt": "x" + p, "chosen": c, "rejected": r} for p, c, r in rows]
        found = packed(Path(scratch), given_rows, tokenizer, "--format", "preference")
    assert len(found) == 2 * len(rows)
    for (ids, labels), (other, others) in zip(found[::2], found[1::2], strict=True):
        begin = next(place for place, label in enumerate(labels) if label != -100)
        assert begin == next(place for place, label in enumerate(others) if label != -100)
        assert ids[:begin] == other[:begin]
        assert labels[begin:] == ids[begin:] and others[begin:] == other[begin:]


def test_margins_are_a_column_of_both_sequences_through_repack_and_plans(tmp_path: Path, words: Path) -> None:
    rows = [
        {"prompt": [ASK], "chosen": [YES], "rejected": [NO], "margin": margin}
        for margin in (0.5, None, 2, -1.25, 0)
    ]
    packed(tmp_path, rows, words)
    expected = [0.5, 0.5, 0, 0, 2, 2, -1.25, -1.25, 0, 0]

    def margins(folder: Path, **options: Any) -> list[float]:
        reader = PackedReader(folder, **options)
        found = {}
        for one in reader:
            found.update(zip(one.sequence_ids.tolist(), one.extras["margin"].tolist(), strict=True))
        return [found[number] for number in sorted(found)]

    assert margins(tmp_path / "packed") == expected
    kinds = {column.name: column.type for column in PackedReader(tmp_path / "packed").manifest.extras}
    assert kinds["margin"] == "list<float32>"
    assert_verified(tmp_path / "packed")
    assert pack("repack", tmp_path / "packed", "--output", tmp_path / "again", "--max-length", 32).code == 0
    built(
        tmp_path / "rows.jsonl",
        tmp_path / "fresh",
        "--tokenizer",
        words,
        "--max-length",
        32,
        "--max-drop-share",
        1,
    )
    assert files_of(tmp_path / "again") == files_of(tmp_path / "fresh")
    assert pack("repack", tmp_path / "packed", "--plan-only", "other", "--seed", 3).code == 0
    assert margins(tmp_path / "packed", plan="other") == expected
    batch = collate(list(PackedReader(tmp_path / "packed")))
    assert sorted(batch["margin"].tolist()) == sorted(expected)


def test_without_margins_there_is_no_such_column_and_a_folder_without_joins_one_with(
    tmp_path: Path, words: Path
) -> None:
    plain = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
    for name, row in (("one", plain), ("two", {**plain, "margin": 1.5})):
        source = write_lines(tmp_path / f"{name}.jsonl", [row])
        built(source, tmp_path / name, "--tokenizer", words)
    assert "margin" not in {column.name for column in PackedReader(tmp_path / "one").manifest.extras}
    assert pack("repack", tmp_path / "one", tmp_path / "two", "--output", tmp_path / "both").code == 0
    values = [value for one in PackedReader(tmp_path / "both") for value in one.extras["margin"].tolist()]
    assert sorted(values) == [0, 0, 1.5, 1.5]


@pytest.mark.parametrize("margin", ["2", True, 1e39, [1]])
def test_a_margin_that_is_no_number_is_refused(tmp_path: Path, words: Path, margin: Any) -> None:
    row = {"prompt": [ASK], "chosen": [YES], "rejected": [NO], "margin": margin}
    assert "margin must be a finite number" in refused(tmp_path, [row], words)
