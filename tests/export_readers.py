"""Readers of exports, written from each trainer's contract: ids and unshifted labels of all sequences."""

from __future__ import annotations

import csv
import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Sequences = list[tuple[list[int], list[int]]]
"""ids, and unshifted labels, of each sequence, in the order of the packs."""
LENGTH = 16
"""Of a pack, as those forms pad to it."""


def arrow_rows(folder: Path) -> list[dict[str, Any]]:
    """As load_from_disk finds them: the files of state.json, in that order."""
    state = json.loads((folder / "state.json").read_text())
    info = json.loads((folder / "dataset_info.json").read_text())
    rows = []
    for file in state["_data_files"]:
        table = pa.ipc.open_stream((folder / file["filename"]).read_bytes()).read_all()
        assert table.column_names and set(table.column_names) == set(info["features"])
        rows += table.to_pylist()
    return rows


def unshifted(labels: list[int]) -> list[int]:
    """Labels of the next token, of one sequence -> labels of each token."""
    assert labels[-1] == -100, "the last token has nobody to foretell"
    return [-100, *labels[:-1]]


def read_unpacked(folder: Path) -> Sequences:
    rows = arrow_rows(folder)
    assert all(row["attention_mask"] == [1] * len(row["input_ids"]) for row in rows)
    return [(row["input_ids"], row["labels"]) for row in rows]


def read_parquet(folder: Path) -> Sequences:
    rows = [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    found = []
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        found += cut(row["input_ids"], row["labels"], row["seq_lengths"])
    return found


def cut(ids: list[int], labels: list[int], lengths: list[int]) -> Sequences:
    found, start = [], 0
    for length in lengths:
        found.append((ids[start : start + length], labels[start : start + length]))
        start += length
    return found


def read_nemo(folder: Path) -> Sequences:
    """Pairs are (tokens[:-1], tokens[1:]) of each segment; the mask goes with the first of a pair."""
    rows = [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    (facts,) = json.loads((folder / "metadata.json").read_text())
    found = []
    for row in rows:
        starts = [*row["seq_start_id"], len(row["input_ids"])]
        assert starts[0] == 0 and all(a < b for a, b in zip(starts, starts[1:], strict=False))
        assert sum(b - a - 1 for a, b in zip(starts, starts[1:], strict=False)) <= facts["pack_size"]
        for begin, end in zip(starts, starts[1:], strict=False):
            ids, mask = row["input_ids"][begin:end], row["loss_mask"][begin:end]
            assert mask[-1] == 0
            found.append((ids, [-100, *(i if m else -100 for i, m in zip(ids[1:], mask, strict=False))]))
    return found


def read_shifted(rows: list[dict[str, Any]], names: tuple[str, str, str], lengths: str) -> Sequences:
    """Rows of one width whose true lengths stand in a column; what comes after them is filling."""
    found = []
    for row in rows:
        ids, labels, positions = (row[name] for name in names)
        assert len(ids) == len(labels) == len(positions) == LENGTH
        used = 0
        for length in row[lengths]:
            assert positions[used : used + length] == list(range(length))
            found.append((ids[used : used + length], unshifted(labels[used : used + length])))
            used += length
        assert set(labels[used:]) <= {-100} and positions[used:] == list(range(LENGTH - used))
    return found


def read_automodel(folder: Path) -> Sequences:
    rows = arrow_rows(folder)
    for row in rows:
        assert sum(row["seq_lens_padded"]) == LENGTH and len(row["seq_lens"]) == len(row["seq_lens_padded"])
        assert row["seq_lens"][:-1] == row["seq_lens_padded"][:-1]
    return read_shifted(rows, ("input_ids", "labels", "position_ids"), "seq_lens")


def read_torchtune(folder: Path) -> Sequences:
    rows = arrow_rows(folder)
    for row in rows:
        assert sum(row["seq_lens"]) == LENGTH
    found = read_shifted(rows, ("tokens", "labels", "input_pos"), "seq_lens")
    return found


def read_torchtitan(folder: Path) -> Sequences:
    rows = arrow_rows(folder)
    for row in rows:
        row["lengths"] = [row["segment_ids"].count(n + 1) for n in range(max(row["segment_ids"]))]
        assert row["segment_ids"] == sorted(row["segment_ids"], key=lambda n: n or 10**9)
    return read_shifted(rows, ("input_ids", "labels", "positions"), "lengths")


def read_llamafactory(folder: Path) -> Sequences:
    found = []
    for row in arrow_rows(folder):
        assert {len(row[name]) for name in row} == {LENGTH}
        lengths = [row["attention_mask"].count(n + 1) for n in range(max(row["attention_mask"]))]
        used = sum(lengths)
        assert set(row["attention_mask"][used:]) <= {0} and set(row["labels"][used:]) <= {-100}
        assert row["position_ids"][:used] == [place for length in lengths for place in range(length)]
        found += cut(row["input_ids"], row["labels"], lengths)
    return found


def read_olmo(folder: Path) -> Sequences:
    found = []
    for file in sorted(folder.glob("token_ids_part_*.npy")):
        ids = np.fromfile(file, dtype="<u2")
        mask = np.fromfile(str(file).replace("token_ids", "labels_mask"), dtype=np.bool_)
        assert len(ids) == len(mask)
        with gzip.open(str(file).replace(".npy", ".csv.gz"), "rt") as lines:
            bounds = [(int(a), int(b)) for a, b in csv.reader(lines)]
        assert bounds[0][0] == 0 and bounds[-1][1] == len(ids)
        for begin, end in bounds:
            labels = np.where(mask[begin:end], ids[begin:end].astype(int), -100)
            found.append((ids[begin:end].tolist(), labels.tolist()))
    return found


def read_megatron(folder: Path) -> Sequences:
    raw = (folder / "packed_text_document.idx").read_bytes()
    magic, version, code, count, documents = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version, documents) == (b"MMIDIDX\x00\x00", 1, count + 1)
    dtype = np.dtype({8: "<u2", 4: "<i4"}[code])
    at = struct.calcsize("<9sQBQQ")
    lengths = np.frombuffer(raw, "<i4", count, at)
    pointers = np.frombuffer(raw, "<i8", count, at + 4 * count)
    assert np.frombuffer(raw, "<i8", documents, at + 12 * count).tolist() == list(range(documents))
    data = (folder / "packed_text_document.bin").read_bytes()
    found = []
    for length, pointer in zip(lengths, pointers, strict=True):
        ids = np.frombuffer(data, dtype, length, pointer).tolist()
        found.append((ids, [-100, *ids[1:]]))
    return found


READERS: dict[str, Callable[[Path], Sequences]] = {
    "unpacked": read_unpacked,
    "axolotl": read_unpacked,
    "parquet": read_parquet,
    "nemo": read_nemo,
    "automodel": read_automodel,
    "torchtune": read_torchtune,
    "torchtitan": read_torchtitan,
    "llamafactory": read_llamafactory,
    "olmo-core": read_olmo,
    "megatron": read_megatron,
}
