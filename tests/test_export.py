"""Exports: what a reader written from each trainer's contract gets back is what was packed, to the token."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import DEMO, TOKENIZER, built, pack, write_lines
from export_readers import LENGTH, READERS, arrow_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed import Folder, Seq, write_folder

from padless.packer.export import ExportConfig, check_export, export
from padless.packer.exports import EXPORTS, boundary_lines, rows, target_of
from padless.packer.tokenizer_files import read_files
from padless.runtime.reader import PackedReader

TOKENS = {"tokenizer.json": (TOKENIZER / "tokenizer.json").read_bytes()}


MASKLESS = {"megatron"}
"""Forms without a place for a loss mask."""
FILLED_APART = {"torchtune"}
"""Forms whose filling is one more sequence."""
FILLED = ("automodel", "llamafactory", "torchtitan", "torchtune")
"""Forms whose rows are all of one length."""


def test_every_form_has_a_reader_here() -> None:
    assert {*READERS, "mds"} == {*EXPORTS}


@st.composite
def folders(draw: st.DrawFn, *, masked: bool) -> Folder:
    """Packs of one to four sequences, of one token too, whose ids are all different."""
    packs, first = [], 1
    for _ in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
        while sum(lengths) > LENGTH:
            lengths.pop()
        row = []
        for length in lengths:
            trained = draw(st.lists(st.booleans(), min_size=length, max_size=length)) if masked else None
            row.append(Seq(list(range(first, first + length)), trained))
            first += length
        packs.append(row)
    return Folder(
        packs=packs, max_length=LENGTH, labels=masked or draw(st.booleans()), tokenizer=TOKENS,
        packs_per_batch=draw(st.integers(1, 3)), packs_per_shard=3,
    )  # fmt: skip


@pytest.mark.parametrize("to", READERS)
def test_a_form_gives_back_every_token_and_label(to: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @given(folders(masked=to not in MASKLESS), st.sampled_from([1, 2**20]), st.sampled_from([1, 2 * LENGTH]))
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(folder: Folder, shard_size: int, filled: int) -> None:
        root = tmp_path_factory.mktemp("export")
        write_folder(root / "packed", folder)
        config = ExportConfig(
            folder=str(root / "packed"), to=to, output=str(root / "out"), shard_size=shard_size
        )
        with patch.object(rows, "FILLED_TOKENS", filled):
            found = export(config)
        assert found.packs == len(folder.packs) and found.sequences == sum(map(len, folder.packs))
        assert check_export(str(root / "out")) == []
        want = []
        for row in folder.packs:
            want += [(seq.tokens, seq.labels()) for seq in row]
            filling = LENGTH - sum(len(seq.tokens) for seq in row)
            if filling and to in FILLED_APART:
                want.append((None, [-100] * filling))  # type: ignore[arg-type]
        got = READERS[to](root / "out")
        assert [labels for _, labels in got] == [labels for _, labels in want]
        assert all(mine == ids or ids is None for (mine, _), (ids, _) in zip(got, want, strict=True))

    check()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    packs = [[Seq([1, 2, 3]), Seq([4, 5])], [Seq([6, 7, 8, 9], [False, False, True, True])]]
    extras = {
        "reward": ("sequence", "list<float32>", pa.list_(pa.float32()), [[0.5, 1.5], [2.5]]),
        "weight": ("token", "list<float32>", pa.list_(pa.float32()), [[0.0, 1, 2, 3, 4], [5.0, 6, 7, 8]]),
        "origin": ("pack", "int32", pa.int32(), [7, 8]),
    }  # fmt: skip
    write_folder(tmp_path / "packed", Folder(packs=packs, extras=extras, tokenizer=TOKENS))
    return tmp_path / "packed"


def test_further_columns_go_along_where_the_form_has_room(packed: Path, tmp_path: Path) -> None:
    assert pack("export", packed, "--to", "unpacked", "--output", tmp_path / "out").code == 0
    rows = arrow_rows(tmp_path / "out")
    assert [row["reward"] for row in rows] == [0.5, 1.5, 2.5]
    assert [row["weight"] for row in rows] == [[0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    assert [row["origin"] for row in rows] == [7, 7, 8]


def weighted(folder: Path, weights: list[list[float]]) -> Path:
    """Two packs of one sequence whose last two tokens are trained."""
    kind = ("token", "list<float32>", pa.list_(pa.float32()), weights)
    masks = [False, True, True]
    packs = [[Seq([1, 2, 3], masks)], [Seq([4, 5, 6], masks)]]
    write_folder(folder, Folder(packs=packs, extras={"loss_weight": kind}, tokenizer=TOKENS))
    return folder


@pytest.mark.parametrize("to", READERS)
def test_weights_go_along_or_are_refused(to: str, tmp_path: Path) -> None:
    run = pack(
        *("export", weighted(tmp_path / "packed", [[0, 1, 1], [0, 1, 0.5]]), "--to", to),
        *("--output", tmp_path / "out"),
    )
    if to in ("unpacked", "axolotl"):
        assert [row["loss_weight"] for row in arrow_rows(tmp_path / "out")] == [[0, 1, 1], [0, 1, 0.5]]
    elif to == "parquet":
        assert pq.read_table(tmp_path / "out" / "data-00000.parquet")["loss_weight"][1].as_py() == [0, 1, 0.5]
    elif to not in MASKLESS:  # it refuses the masks
        assert run.code == 2 and "weighs 0.5" in run.err and "unpacked" in run.err
        assert os.listdir(tmp_path) == ["packed"]


def test_weights_that_say_what_labels_do_need_no_place(tmp_path: Path) -> None:
    folder = weighted(tmp_path / "packed", [[0, 1, 1], [0, 1, 1]])
    run = pack("export", folder, "--to", "automodel", "--output", tmp_path / "out")
    assert run.code == 0 and "left behind" not in run.out


JUDGED = [
    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"},
    {"prompt": "2 + 2 = ", "completion": "5", "label": False},
    {"prompt_ids": [9, 8], "response_ids": [7, 6], "old_logprobs": [-0.5, -2.0], "advantages": -1.5},
]


@pytest.mark.parametrize("row", JUDGED, ids=["pair", "rated", "rollout"])
def test_bad_answers_are_not_given_to_who_would_train_them(row: dict[str, Any], tmp_path: Path) -> None:
    """Their rows look like any others once the column is gone that says what they are."""
    source = write_lines(tmp_path / "rows.jsonl", [row])
    built(source, tmp_path / "packed", "--max-length", 64, "--max-drop-share", 1)
    for to in sorted({*EXPORTS} - {"mds", "megatron"}):
        run = pack("export", tmp_path / "packed", "--to", to, "--output", tmp_path / to)
        if to in ("unpacked", "parquet"):
            assert run.code == 0
        else:
            assert run.code == 2 and "says how good they are" in run.err and "unpacked" in run.err
            assert not (tmp_path / to).exists()


def test_columns_that_are_left_behind_are_named(packed: Path, tmp_path: Path) -> None:
    for to, told in (("torchtitan", True), ("nemo", True), ("parquet", False)):
        run = pack("export", packed, "--to", to, "--output", tmp_path / to)
        readme = (tmp_path / to / "README.md").read_text()
        for words in (run.out + run.err, readme):
            assert ("left behind" in words) is told
            assert all((f"`{name}`" in words) is told for name in ("reward", "weight", "origin"))


def test_datasets_loads_what_is_written_for_it(packed: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for to in ("unpacked", "automodel", "torchtune", "torchtitan", "llamafactory"):
        pack("export", packed, "--to", to, "--output", tmp_path / to)
        assert list(datasets.load_from_disk(str(tmp_path / to))) == arrow_rows(tmp_path / to), to


def test_torchtune_gets_tensors_and_is_refused_another_collator(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    torch = pytest.importorskip("torch")
    from padless.runtime.trainers.torchtune import PackedFolder

    pack("export", packed, "--to", "torchtune", "--output", tmp_path / "out")
    items = PackedFolder(source=str(tmp_path / "out"))
    assert len(items) == 2
    assert {name: value.dtype for name, value in items[0].items()} == dict.fromkeys(
        ("tokens", "labels", "input_pos", "seq_lens"), torch.int64
    )
    with pytest.raises(ValueError, match="packed: True"):
        PackedFolder(source=str(tmp_path / "out"), packed=False)


def test_masks_that_a_form_cannot_tell_are_refused(packed: Path, tmp_path: Path) -> None:
    run = pack("export", packed, "--to", "megatron", "--output", tmp_path / "out")
    assert run.code == 2 and "1 masked token" in run.err and "nemo" in run.err
    assert os.listdir(tmp_path) == ["packed"]


@pytest.mark.parametrize("train_on", ["all", "assistant"])
def test_targets_that_nemo_drops_are_counted(train_on: str, tmp_path: Path) -> None:
    """Megatron-Bridge trains nothing where the token that predicts is the tokenizer's end token."""
    built(DEMO, tmp_path / "packed", "--limit", 20, "--train-on", train_on)
    out = pack("export", tmp_path / "packed", "--to", "nemo", "--output", tmp_path / "out")
    assert out.code == 0, out.err
    end = read_files(str(TOKENIZER)).named_token_id("eos_token")
    targets = [
        row.input_ids[at - 1]
        for row in PackedReader(tmp_path / "packed")
        for at in np.flatnonzero(row.labels != -100).tolist()
    ]
    dropped = sum(before == end for before in targets)
    assert bool(dropped) is (train_on == "all")
    told = f"{dropped:,} of {len(targets):,} trained tokens stand right behind an end token"
    assert (told in (tmp_path / "out" / "README.md").read_text()) is bool(dropped)


def test_unknown_forms_are_named(packed: Path, tmp_path: Path) -> None:
    run = pack("export", packed, "--to", "tfrecord", "--output", tmp_path / "out")
    assert run.code == 2 and "tfrecord" in run.err and "torchtune" in run.err


@given(
    st.lists(st.integers(1, 3), max_size=40),
    st.sampled_from([0, 7, 98, 99_980, 10**8 - 20, 2**40]),
    st.sampled_from([2, 3, 8192]),
)
@settings(max_examples=80, deadline=None)
def test_boundaries_are_the_lines_that_a_csv_writer_gives(lengths: list[int], first: int, chunk: int) -> None:
    ends = np.cumsum([first + 1, *lengths], dtype=np.int64)
    lines = "".join(f"{start},{end}\n" for start, end in pairwise([0, *ends.tolist()])).encode()
    with patch.object(boundary_lines, "_LINES", chunk), patch.object(boundary_lines, "_STORED", 7 * chunk):
        pieces = list(boundary_lines.boundary_lines(ends))
        assert b"".join(pieces) == lines
        assert gzip.decompress(b"".join(boundary_lines.stored_gzip(pieces))) == lines


def test_by_a_plan_packs_come_as_it_says(tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in (3, 9, 4, 7, 12, 5)))
    words = ("--tokenizer", TOKENIZER, "--max-length", 32, "--output", tmp_path / "packed")
    assert pack("build", data, *words).code == 0
    assert pack("repack", tmp_path / "packed", "--plan-only", "short", "--max-length", 16).code == 0
    for to, plan, output in (
        ("automodel", ["--plan", "short"], "rows"),
        ("unpacked", [], "plain"),
        ("unpacked", ["--plan", "short"], "planned"),
    ):
        words = ("--to", to, *plan, "--output", tmp_path / output)
        assert pack("export", tmp_path / "packed", *words).code == 0
    assert {len(row["input_ids"]) for row in arrow_rows(tmp_path / "rows")} == {16}
    rows = [sorted(map(str, arrow_rows(tmp_path / name))) for name in ("plain", "planned")]
    assert rows[0] == rows[1] and len(rows[0]) == 6


@pytest.mark.parametrize("to", FILLED)
@pytest.mark.parametrize("plan", [[], ["--plan", "own"]], ids=["as stored", "by a plan"])
def test_short_packs_are_filled_up_a_few_at_a_time(
    to: str, plan: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record batch of them, filled up at once, was fifty times the memory of its tokens."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"word {n}"}) + "\n" for n in range(20)))
    words = (
        "--tokenizer",
        TOKENIZER,
        "--max-length",
        64,
        "--strategy",
        "none",
        "--output",
        tmp_path / "packed",
    )
    assert pack("build", data, *words).code == 0
    assert pack("repack", tmp_path / "packed", "--plan-only", "own", "--strategy", "none").code == 0
    monkeypatch.setattr(rows, "FILLED_TOKENS", 3 * 64)
    run = pack("export", tmp_path / "packed", "--to", to, *plan, "--output", tmp_path / "out")
    assert run.code == 0 and "of the rows are tokens" in (tmp_path / "out" / "README.md").read_text()
    (file,) = (tmp_path / "out").glob("*.arrow")
    batches = [batch.num_rows for batch in pa.ipc.open_stream(file.read_bytes())]
    assert batches == [3, 3, 3, 3, 3, 3, 2]
    assert {len(next(iter(row.values()))) for row in arrow_rows(tmp_path / "out")} == {64}


@pytest.mark.parametrize("to", EXPORTS)
def test_every_form_says_how_to_use_it(to: str, packed: Path, tmp_path: Path) -> None:
    target = target_of(to)
    assert target.reader and target.rows and "{output}" in target.how
    if to in READERS and to not in MASKLESS:
        pack("export", packed, "--to", to, "--output", tmp_path / "out")
        readme = (tmp_path / "out" / "README.md").read_text()
        assert f'"{tmp_path / "out"}' in readme and "{output}" not in readme
