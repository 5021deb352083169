"""Per-message weights: a float32 for each token, from the record to the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import assert_verified, build, built, files_of, workers_in, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import CHAT, chat, packed, refused, word_tokenizer

from padless.runtime.collate import collate
from padless.runtime.reader import PackedReader

GENERATION = CHAT.replace(
    "message['content'] + '<|im_end|>\\n' }}",
    "'' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_tokenizer(tmp_path_factory.mktemp("words"))


def weighed(folder: Path) -> dict[int, list[float]]:
    """Sequence -> the weights of its tokens."""
    found = {}
    for pack in PackedReader(folder):
        ends = np.cumsum(pack.seq_lengths)
        for number, end, length in zip(pack.sequence_ids, ends, pack.seq_lengths, strict=True):
            found[int(number)] = pack.extras["loss_weight"][end - length : end].tolist()
    return found


def with_weights(*weights: float | None, key: str = "weight") -> dict[str, Any]:
    """A chat whose answers have these weights, each 6 tokens after a question of 6."""
    row = chat(*(word for n in range(len(weights)) for word in (f"w{10 + n}", f"w{20 + n}")))
    for turn, weight in zip(row["messages"][1::2], weights, strict=True):
        if weight is not None:
            turn[key] = weight
    return row


def expected(*weights: float | None) -> list[float]:
    """Of an answer's 6 tokens its word and its end are trained."""
    return [
        value
        for weight in weights
        for value in [0.0] * 9 + [float(np.float32(1 if weight is None else weight))] * 2 + [0.0]
    ]


@pytest.mark.parametrize("key", ["weight", "loss_weight"])
@pytest.mark.parametrize("template", [CHAT, GENERATION], ids=["located", "marked"])
def test_weights_become_a_column_of_the_tokens(tmp_path: Path, key: str, template: str) -> None:
    folder = word_tokenizer(tmp_path / "words", template=template)
    rows = [with_weights(0.25, None, 0, 3, key=key), with_weights(None)]
    packed(tmp_path, rows, folder)
    assert weighed(tmp_path / "packed") == {0: expected(0.25, None, 0, 3), 1: expected(None)}
    assert_verified(tmp_path / "packed")
    reader = PackedReader(tmp_path / "packed")
    (column,) = reader.manifest.extras
    assert (column.name, column.level, column.type) == ("loss_weight", "token", "list<float32>")
    batch = collate(list(reader))
    assert batch["loss_weight"].shape == batch["input_ids"].shape
    assert ((batch["loss_weight"] > 0) == (batch["labels"] != -100)).all()
    assert "loss_weight" not in batch.model_inputs()


def test_without_weights_there_is_no_such_column(tmp_path: Path, words: Path) -> None:
    packed(tmp_path, [with_weights(0, 1, None), with_weights(1.0)], words)
    assert PackedReader(tmp_path / "packed").manifest.extras == ()


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([None, 0, 0.5, 1, 2.25]), min_size=1, max_size=6), min_size=1, max_size=8
    )
)
def test_weights_go_with_their_tokens_whatever_is_dropped_or_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[float | None]]
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    rows = [*rows, [0.5]]
    packed(
        folder,
        [with_weights(*weights) for weights in rows],
        word_tokenizer(folder / "words"),
        *("--overflow", "truncate", "--max-length", 40),
    )
    found = weighed(folder / "packed")
    for number, values in found.items():
        whole = expected(*rows[number])
        assert values == whole[: len(values)]
    assert len(rows) - 1 in found
    assert_verified(folder / "packed")


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_chunks_with_and_without_weights_go_together(tmp_path: Path, words: Path, way: str) -> None:
    files = [tmp_path / "in" / f"{n}.jsonl" for n in range(4)]
    for number, file in enumerate(files):
        write_lines(file, [with_weights(0.5 if number == 2 else None)] * 5)
    with workers_in(way):
        built(tmp_path / "in", tmp_path / "packed", "--tokenizer", words, "--max-length", 64)
    assert weighed(tmp_path / "packed") == {n: expected(0.5 if 10 <= n < 15 else None) for n in range(20)}
    built(tmp_path / "in", tmp_path / "again", "--tokenizer", words, "--max-length", 64, "--workers", 1)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "packed")


def test_weights_of_expanded_turns_stay_with_their_turn(tmp_path: Path, words: Path) -> None:
    packed(tmp_path, [with_weights(0.5, None)], words, "--expand-turns")
    untrained = [0.0] * 12
    assert weighed(tmp_path / "packed") == {0: expected(0.5), 1: untrained + expected(None)}


def test_a_system_turn_put_before_moves_weights_with_their_turns(tmp_path: Path, words: Path) -> None:
    packed(tmp_path, [with_weights(0.5, None)], words, "--system", "w40")
    assert weighed(tmp_path / "packed") == {0: [0.0] * 6 + expected(0.5, None)}


def test_weights_and_train_on_all_contradict_each_other(tmp_path: Path, words: Path) -> None:
    assert "train_on all" in refused(tmp_path, [with_weights(0.5)], words, "--train-on", "all")


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 1e39, 1e-40, "0.5", [1]])
def test_what_is_no_weight_is_refused_with_the_turn(tmp_path: Path, words: Path, weight: Any) -> None:
    run = build(
        write_lines(tmp_path / "rows.jsonl", [with_weights(weight)]),
        tmp_path / "packed",
        *("--tokenizer", words, "--max-length", 64),
    )
    assert run.code == 2
    assert "rows.jsonl, record 0 (line 1): messages[1].weight must be a weight from 0 to" in run.err


def tokens(count: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": [10 + n for n in range(count)], **more}


def test_tokenized_records_bring_weights_of_their_tokens(tmp_path: Path, words: Path) -> None:
    rows = [
        tokens(4, loss_weight=[9, 0.5, 0, 2]),
        tokens(4, loss_weight=[1, 1, 3, 1], loss_mask=[0, 0, 1, 1]),
        tokens(3),
        tokens(3, loss_weight=None),
    ]
    packed(tmp_path, rows, words)
    assert weighed(tmp_path / "packed") == {0: [0, 0.5, 0, 2], 1: [0, 0, 3, 1], 2: [0, 1, 1], 3: [0, 1, 1]}
    (pack,) = PackedReader(tmp_path / "packed")
    assert ((pack.extras["loss_weight"] > 0) == (pack.labels != -100)).all()
    assert_verified(tmp_path / "packed")


def test_weights_of_tokens_stay_with_them_where_records_are_cut(tmp_path: Path, words: Path) -> None:
    weights = [1 + n for n in range(11)]
    source = write_lines(tmp_path / "x.jsonl", [tokens(11, loss_weight=weights), tokens(3)])
    common = ("--tokenizer", words, "--max-length", 4)
    built(source, tmp_path / "split", *common, "--overflow", "split")
    assert weighed(tmp_path / "split") == {0: [0, 2, 3, 4], 1: [0, 6, 7, 8], 2: [0, 10, 11], 3: [0, 1, 1]}
    built(source, tmp_path / "wrapped", *common, "--overflow", "split", "--strategy", "wrapped")
    found = weighed(tmp_path / "wrapped")
    assert found == {0: [0, 2, 3, 4], 1: [0, 6, 7, 8], 2: [0, 10, 11], 3: [0], 4: [0, 1]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (tokens(2, loss_weight=[1]), "loss_weight has 1 entries for 2 input_ids"),
        (tokens(2, loss_weight=[1, -1]), "loss_weight must be a list of numbers from 0 to"),
        (tokens(2, loss_weight=[1, "1"]), "loss_weight must be a list of numbers from 0 to"),
        (tokens(2, loss_weight=2), "loss_weight must be a list of numbers from 0 to"),
        (tokens(2, seq_lengths=[1, 1]), "seq_lengths says that it is a pack of several sequences"),
    ],
)
def test_weights_of_tokens_that_cannot_be_are_refused(
    tmp_path: Path, words: Path, record: dict[str, Any], message: str
) -> None:
    run = build(write_lines(tmp_path / "x.jsonl", [record]), tmp_path / "out", "--tokenizer", words)
    assert run.code == 2 and message in run.err, run.err
