"""The reader hands out what the folder holds, and refuses what contradicts itself."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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
    xxh3,
)

from padless.runtime.format import (
    BatchError,
    ChecksumError,
    ForeignFileError,
    FormatError,
    MissingFileError,
    NotPackedError,
    PlanError,
    SplitError,
    TruncatedFileError,
)
from padless.runtime.reader import PackedReader

THREE_PACKS = [count_up(3, 1, 2), count_up(4, first=4), count_up(2, 5, first=5)]


def shard(path: Path, number: int = 0) -> Path:
    return sorted(path.glob("shard-*.arrow"))[number]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_folder(tmp_path / "packed", Folder(packs=THREE_PACKS))
    return tmp_path / "packed"


@pytest.mark.parametrize("packs_per_batch", [1, 2, 5])
@pytest.mark.parametrize("packs_per_shard", [1, 3])
def test_packs_come_in_order_over_shards_and_batches(
    tmp_path: Path, packs_per_shard: int, packs_per_batch: int
) -> None:
    folder = Folder(packs=THREE_PACKS, packs_per_shard=packs_per_shard, packs_per_batch=packs_per_batch)
    write_folder(tmp_path / "packed", folder)
    reader = PackedReader(tmp_path / "packed", verify=True)
    wanted = [[1, 1, 1, 2, 3, 3], [4, 4, 4, 4], [5, 5, 6, 6, 6, 6, 6]]
    assert len(reader) == 3
    assert [pack.input_ids.tolist() for pack in reader] == wanted
    assert [reader[index].input_ids.tolist() for index in (0, 1, 2)] == wanted
    assert [reader[index].input_ids.tolist() for index in (-3, -2, -1)] == wanted
    assert reader[np.int64(2)].sequence_ids.tolist() == [4, 5]


def test_a_pack_has_its_boundaries_and_its_sums(packed: Path) -> None:
    pack = PackedReader(packed)[0]
    assert pack.labels.tolist() == [-100, 1, 1, -100, -100, 3]
    assert pack.seq_lengths.tolist() == [3, 1, 2]
    assert pack.sequence_ids.tolist() == [0, 1, 2]
    assert (pack.num_tokens, pack.num_targets, pack.max_seqlen, pack.attention_cost) == (
        6,
        3,
        3,
        14,
    )
    assert pack.extras == {}


@pytest.mark.parametrize("index", [3, -4, 10**9])
def test_an_index_outside_names_the_limits(packed: Path, index: int) -> None:
    with pytest.raises(IndexError, match=rf"pack {index} of 3: give -3 to 2"):
        PackedReader(packed)[index]


def test_packs_are_taken_one_by_one(packed: Path) -> None:
    packs = PackedReader(packed)
    for index in (slice(0, 1), "0", 0.0, None):
        with pytest.raises(TypeError, match="packs are taken by one whole number, not by"):
            packs[index]  # type: ignore[index]


@pytest.mark.parametrize("id_type", ["uint16", "int32"])
def test_labels_that_are_left_out_are_the_ids_but_for_sequence_starts(tmp_path: Path, id_type: str) -> None:
    for name, labels in (("with", True), ("without", False)):
        folder = Folder(packs=THREE_PACKS, labels=labels, id_type=id_type)
        write_folder(tmp_path / name, folder)
    stored, derived = PackedReader(tmp_path / "with"), PackedReader(tmp_path / "without")
    assert not derived.manifest.has_labels
    for one, other in zip(stored, derived, strict=True):
        assert one.labels.tolist() == other.labels.tolist()
        assert one.labels.dtype == other.labels.dtype == np.int32
        assert other.input_ids.dtype == np.dtype(id_type)


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_arrays_are_read_only_and_mapped_unless_compressed(tmp_path: Path, compression: str | None) -> None:
    folder = Folder(packs=[count_up(3000, 9000)], max_length=12000, compression=compression)
    write_folder(tmp_path / "packed", folder)
    reader = PackedReader(tmp_path / "packed")
    before = pa.total_allocated_bytes()
    pack = reader[0]
    assert pack.input_ids.tolist() == [1] * 3000 + [2] * 9000
    assert not any(
        array.flags.writeable for array in (pack.input_ids, pack.labels, pack.seq_lengths, pack.sequence_ids)
    )
    copied = pa.total_allocated_bytes() - before > 10_000
    assert copied == (compression is not None)


@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_blocks_are_the_packs_in_their_order_and_checked(
    packed: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("padless.runtime.batch._CHECKED_TOKENS", tokens)
    reader = PackedReader(packed)
    names = ("input_ids", "labels", "seq_lengths", "sequence_ids", "num_tokens")
    for name in names:
        parts = [batch.flat(name, rows) for batch, rows in reader.blocks()]
        assert np.concatenate(parts).tolist() == [v for b in reader.batches() for v in b.flat(name).tolist()]
    lengths = np.concatenate([batch.lengths("seq_lengths", rows) for batch, rows in reader.blocks()])
    assert lengths.tolist() == [len(pack.seq_lengths) for pack in reader]

    def change(rows: list[dict[str, Any]]) -> None:
        rows[-1]["input_ids"][-1] = 60_000

    rewrite_shard(packed, 1, change)
    with pytest.raises(BatchError, match="input_ids reach from"):
        list(PackedReader(packed).blocks())


def test_only_a_few_decompressed_batches_are_kept(tmp_path: Path) -> None:
    packs = [count_up(1000, first=number) for number in range(12)]
    write_folder(tmp_path / "packed", Folder(packs=packs, max_length=1000, compression="zstd"))
    reader = PackedReader(tmp_path / "packed")
    before = pa.total_allocated_bytes()
    for _ in range(3):
        assert [pack.input_ids[0] for pack in reader] == list(range(12))
    # A pack is 6,000 bytes decompressed: ids and labels.
    assert pa.total_allocated_bytes() - before < 6 * 6_000


def test_extra_columns_come_at_their_level(tmp_path: Path) -> None:
    float2 = pa.list_(pa.list_(pa.float32(), 2))
    folder = Folder(
        packs=[count_up(2, 1), count_up(2)],
        packs_per_batch=2,
        extras={
            "topk": (
                "token",
                "list<fixed_size_list<float32, 2>>",
                float2,
                [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10]]],
            ),
            "half": ("token", "list<float16>", pa.list_(pa.float16()), [[1, 2, 3], [4, 5]]),
            "reward": ("sequence", "list<float64>", pa.list_(pa.float64()), [[0.5, 1.5], [2.5]]),
            "pair": ("sequence", "list<string>", pa.list_(pa.string()), [["a", "ä"], ["a"]]),
            "good": ("sequence", "list<bool>", pa.list_(pa.bool_()), [[True, False], [True]]),
            "lane": ("pack", "int8", pa.int8(), [7, -8]),
        },
    )
    write_folder(tmp_path / "packed", folder)
    first, second = PackedReader(tmp_path / "packed")
    assert first.extras["topk"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert second.extras["topk"].tolist() == [[7, 8], [9, 10]]
    assert second.extras["half"].tolist() == [4, 5]
    assert first.extras["reward"].tolist() == [0.5, 1.5]
    assert first.extras["pair"].tolist() == ["a", "ä"]
    assert (first.extras["good"].tolist(), second.extras["good"].tolist()) == (
        [True, False],
        [True],
    )
    assert (first.extras["lane"], second.extras["lane"]) == (7, -8)


def test_a_column_that_the_manifest_does_not_list_is_ignored(tmp_path: Path) -> None:
    extras = {"later": ("pack", "int8", pa.int8(), [1, 2, 3])}
    write_folder(tmp_path / "packed", Folder(packs=THREE_PACKS, extras=extras))
    edit_manifest(
        tmp_path / "packed",
        lambda content: content.update(
            columns=[column for column in content["columns"] if column["name"] != "later"]
        ),
    )
    assert PackedReader(tmp_path / "packed")[0].extras == {}


def test_an_empty_folder_has_no_packs(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=[], dropped=2))
    reader = PackedReader(tmp_path / "packed", verify=True)
    assert len(reader) == 0 and list(reader) == []
    assert reader.sequence_table().num_rows == 2
    with pytest.raises(IndexError, match="pack 0 of 0"):
        reader[0]


def test_the_sequence_table_comes_whole_or_by_columns(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=THREE_PACKS, dropped=1))
    reader = PackedReader(tmp_path / "packed")
    assert reader.sequence_table().num_rows == 7
    columns = ["offset", "pack"]
    assert reader.sequence_table(columns).to_pydict() == {
        "offset": [0, 3, 4, 0, 0, 2, None],
        "pack": [0, 0, 0, 1, 2, 2, None],
    }
    arrays = reader.sequence_columns("pack", "length", "status", "reason")
    assert arrays["pack"].tolist() == [0, 0, 0, 1, 2, 2, -1]
    assert arrays["length"].tolist() == [3, 1, 2, 4, 2, 5, 0]
    assert arrays["status"].tolist() == ["whole"] * 6 + ["dropped"]
    assert arrays["reason"].tolist() == [None] * 6 + ["too long"]


def test_a_split_is_asked_for_and_opened(tmp_path: Path) -> None:
    folder = Folder(packs=[count_up(3)])
    write_splits(tmp_path / "packed", {"train": folder, "validation": folder})
    with pytest.raises(SplitError, match="train, validation"):
        PackedReader(tmp_path / "packed")
    reader = PackedReader(tmp_path / "packed", split="train")
    assert reader.path == tmp_path / "packed" / "train" and len(reader) == 1


def test_a_plan_that_is_not_there_is_refused_with_those_that_are(packed: Path) -> None:
    with pytest.raises(PlanError, match="no plan 'long' .* there: none"):
        PackedReader(packed, plan="long")
    (packed / "plans").mkdir()
    (packed / "plans" / "short.parquet").write_bytes(b"")
    with pytest.raises(PlanError, match="there: short"):
        PackedReader(packed, plan="long")


def test_a_reader_can_be_pickled_after_use(packed: Path) -> None:
    reader = PackedReader(packed)
    assert len(reader[0].input_ids) == 6
    copy = pickle.loads(pickle.dumps(reader))
    assert [pack.input_ids.tolist() for pack in copy] == [p.input_ids.tolist() for p in reader]
    assert copy.manifest == reader.manifest


def test_a_spawned_process_reads_the_same_packs(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(packed.parent)
    reader = PackedReader("packed")
    code = "import os, pickle, sys\nos.chdir('/')\nprint(pickle.load(sys.stdin.buffer)[1].input_ids.tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(reader), capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == "[4, 4, 4, 4]"


def test_threads_share_a_reader(tmp_path: Path) -> None:
    packs = [count_up(8, first=number) for number in range(40)]
    write_folder(tmp_path / "packed", Folder(packs=packs, compression="zstd"))
    reader = PackedReader(tmp_path / "packed")
    order = [number for _ in range(5) for number in np.random.default_rng(0).permutation(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: int(reader[number].input_ids[0]), order))
    assert found == order


# Damage, file by file. Each is found before any element is touched, and named.


def test_a_missing_shard_is_named_on_opening(packed: Path) -> None:
    """BR-129: at once, and not when its first pack is asked for."""
    lost = shard(packed, 1)
    lost.unlink()
    with pytest.raises(MissingFileError, match=f"{lost.name}.*rebuild"):
        PackedReader(packed)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_is_named_on_opening(packed: Path, change: int) -> None:
    data = shard(packed).read_bytes()
    shard(packed).write_bytes(data[:-1] if change < 0 else data + b"x")
    message = f"{shard(packed).name} has {len(data) + change} bytes, the manifest says {len(data)}"
    with pytest.raises(TruncatedFileError, match=message):
        PackedReader(packed)


def test_a_changed_byte_is_found_by_verify(packed: Path) -> None:
    """BR-128: and is never skipped."""
    data = bytearray(shard(packed).read_bytes())
    data[len(data) // 2] ^= 1
    shard(packed).write_bytes(data)
    with pytest.raises(ChecksumError, match=shard(packed).name):
        PackedReader(packed, verify=True)


def test_a_shard_of_another_folder_is_foreign(tmp_path: Path, packed: Path) -> None:
    write_folder(tmp_path / "other", Folder(packs=THREE_PACKS, id_type="int32"))
    data = shard(tmp_path / "other").read_bytes()
    name = shard(packed).name
    (packed / name).write_bytes(data)
    edit_manifest(
        packed,
        lambda content: content["shards"][0].update(bytes=len(data), checksum=xxh3(data)),
    )
    reader = PackedReader(packed)
    with pytest.raises(ForeignFileError, match="list.*int32.* for column input_ids.*list<uint16>"):
        reader[0]


def test_a_shard_that_is_no_arrow_is_foreign(packed: Path) -> None:
    path = shard(packed)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(ForeignFileError, match=f"{path.name} is no Arrow stream"):
        PackedReader(packed)[0]


@pytest.mark.parametrize("offset", [0, 8, 184])
def test_an_offset_that_is_no_record_batch_is_refused(packed: Path, offset: int) -> None:
    edit_manifest(packed, lambda content: content["shards"][1].update(batches=[[offset, 1]]))
    with pytest.raises(BatchError, match=f"record batch at byte {offset}"):
        PackedReader(packed)[2]


def test_a_batch_of_other_size_than_listed_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", Folder(packs=THREE_PACKS, packs_per_shard=3))

    def swap(content: dict[str, Any]) -> None:
        (first, _), second, third = content["shards"][0]["batches"]
        content["shards"][0]["batches"] = [[first, 2], third]

    edit_manifest(tmp_path / "packed", swap)
    with pytest.raises(BatchError, match="holds 1 packs, the manifest says 2"):
        PackedReader(tmp_path / "packed")[0]


Rows = list[dict[str, Any]]


def put(column: str, value: Any) -> Callable[[Rows], None]:
    return lambda rows: rows[0].update({column: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("input_ids", None), "input_ids has nulls"),
        (put("labels", [1, None, 1, 2, 3, 3]), "labels has nulls"),
        (put("num_tokens", None), "num_tokens has nulls"),
        (put("input_ids", [1, 1, 1, 2, 3, 301]), "reach from 1 to 301, not 0 to 300"),
        (put("labels", [1, 1, 1, 2, 3, 301]), "labels reach from 1 to 301"),
        (put("labels", [-101, 1, 1, 2, 3, 3]), "labels reach from -101"),
        (put("labels", [-100, 1]), "labels is not as long as input_ids"),
        (put("sequence_ids", [0, 1]), "sequence_ids is not as long as seq_lengths"),
        (put("seq_lengths", [3, 1, 3]), "do not sum to the tokens"),
        (put("seq_lengths", [6, 1, -1]), "seq_lengths holds -1"),
        (put("seq_lengths", [3, 3, 0]), "seq_lengths holds 0"),
        (put("num_tokens", 7), "num_tokens is not"),
        (put("num_targets", 4), "num_targets is not"),
        (put("num_targets", -1), "num_targets is not"),
        (put("max_seqlen", 2), "max_seqlen is not"),
        (put("attention_cost", 1), "attention_cost is not"),
    ],
)
def test_a_pack_that_contradicts_itself_is_refused(
    packed: Path, change: Callable[[Rows], None], words: str
) -> None:
    rewrite_shard(packed, 0, change)
    reader = PackedReader(packed, verify=True)
    with pytest.raises(BatchError, match=f"{words}.*rebuild"):
        reader[0]


def test_a_wrong_token_far_away_is_found_before_its_pack_is_handed_out(tmp_path: Path) -> None:
    # Long enough that the packs of one record batch are looked through apart.
    packs = [count_up(100_000, first=number) for number in (1, 301, 2)]
    write_folder(tmp_path / "packed", Folder(packs=packs, packs_per_shard=3, packs_per_batch=3))
    reader = PackedReader(tmp_path / "packed")
    assert int(reader[0].input_ids.max()) == 1
    assert int(reader[2].input_ids.max()) == 2
    for _ in range(2):  # and not only at the first touch
        for touch in (lambda: reader[1], lambda: list(reader), lambda: reader.batch(0)):
            with pytest.raises(BatchError, match="record batch at byte .* reach from 301 to 301"):
                touch()


def test_a_pack_without_sequences_is_refused(packed: Path) -> None:
    def empty(rows: Rows) -> None:
        lists = ("input_ids", "labels", "seq_lengths", "sequence_ids")
        rows[0].update({name: [] for name in lists})

    rewrite_shard(packed, 0, empty)
    with pytest.raises(BatchError, match="holds no sequence"):
        PackedReader(packed)[0]


def test_a_sequence_table_that_is_none_is_refused(packed: Path) -> None:
    path = packed / "sequences.parquet"
    garbage = b"x" * path.stat().st_size
    path.write_bytes(garbage)
    with pytest.raises(ChecksumError, match=r"sequences\.parquet is xxh3"):
        PackedReader(packed).sequence_table()
    edit_manifest(packed, lambda content: content["sequence_tables"][0].update(checksum=xxh3(garbage)))
    with pytest.raises(ForeignFileError, match=r"sequences\.parquet is no sequence table"):
        PackedReader(packed).sequence_table()
    path.unlink()
    with pytest.raises(MissingFileError, match=r"sequences\.parquet"):
        PackedReader(packed).sequence_table()


@pytest.mark.parametrize(
    ("column", "value"),
    [("pack", 3), ("pack", 2**58), ("pack", -2), ("source", 9), ("offset", -1), ("length", -5), ("row", -1)],
)
def test_a_table_that_points_outside_is_refused(packed: Path, column: str, value: int) -> None:
    """Whoever counts by packs or cuts by offsets would allocate without bound, or end with an IndexError."""
    rewrite_table(packed, lambda lines: lines[1].update({column: value}))
    reader = PackedReader(packed)
    with pytest.raises(ForeignFileError, match=rf"{column} reaches from "):
        reader.sequence_table()
    with pytest.raises(ForeignFileError, match=rf"{column} reaches from "):
        reader.sequence_columns(column)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_anywhere_in_a_shard_never_does_more_than_raise(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    # pyarrow ends the process on bad offsets it is let near; this test would not return.
    path = tmp_path_factory.mktemp("damage") / "packed"
    write_folder(path, Folder(packs=THREE_PACKS, packs_per_batch=2))
    content = bytearray(shard(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    shard(path).write_bytes(content)
    try:
        packs = list(PackedReader(path))
    except FormatError as problem:
        assert shard(path).name in str(problem)
    else:
        assert all(pack.seq_lengths.sum() == len(pack.input_ids) for pack in packs)
        assert all(0 <= pack.input_ids.min() <= pack.input_ids.max() <= 300 for pack in packs)


@settings(max_examples=40, deadline=None)
@given(
    packs=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=8),
    trained=st.booleans(),
    id_type=st.sampled_from(["uint16", "int32"]),
)
def test_whatever_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    packs: list[list[int]],
    trained: bool,
    id_type: str,
) -> None:
    path = tmp_path_factory.mktemp("round") / "packed"
    rows = [
        [Seq([number] * length, [trained] * length) for number, length in enumerate(lengths)]
        for lengths in packs
    ]
    write_folder(path, Folder(packs=rows, id_type=id_type, packs_per_batch=3, packs_per_shard=5))
    for pack, lengths in zip(PackedReader(path), packs, strict=True):
        assert pack.seq_lengths.tolist() == lengths
        assert pack.input_ids.tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
        assert pack.num_targets == (trained and sum(lengths) - len(lengths))


def test_reading_loads_neither_torch_nor_pandas(packed: Path) -> None:
    code = (
        "import sys\n"
        "from padless.runtime.reader import PackedReader\n"
        f"reader = PackedReader({str(packed)!r}, verify=True)\n"
        "assert len(list(reader)) == 3 and len(reader.sequence_columns('pack', 'reason')) == 2\n"
        "print(sorted({'torch', 'pandas', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_url_that_went_through_a_path_is_told_so() -> None:
    with pytest.raises(NotPackedError, match="a Path drops a slash of s3://: give a URL as text"):
        PackedReader(Path("s3://bucket/packed"))
