"""The numbers of a report, computed anew from the shards' rows and the table's lines, in plain Python.

The shards are read with pyarrow alone and everything is a loop over lists, so a mistake in the report's
counting cannot hide in here too.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]


def rows_of(folder: Path) -> Rows:
    """The packs, in their order."""
    found: Rows = []
    for shard in json.loads((folder / "manifest.json").read_bytes())["shards"]:
        with pa.ipc.open_stream(folder / shard["file"]) as reader:
            found += reader.read_all().to_pylist()
    return found


def lines_of(folder: Path) -> Rows:
    """The sequence table's lines."""
    found: Rows = pq.read_table(folder / "sequences.parquet").to_pylist()
    return found


def labels_of(pack: dict[str, Any]) -> list[int]:
    """A pack's labels, which may be left out."""
    if "labels" in pack:
        return list(pack["labels"])
    starts = set(itertools.accumulate([0, *pack["seq_lengths"]]))
    return [-100 if place in starts else token for place, token in enumerate(pack["input_ids"])]


def lengths_of(packs: Rows) -> list[int]:
    return [length for pack in packs for length in pack["seq_lengths"]]


def mean_padded(lengths: list[int], batch_size: int, power: int = 1) -> float:
    """The mean of padded tokens (or squares of padded lengths) an epoch, over every order: small N only."""
    orders = list(itertools.permutations(lengths))
    return fmean(
        sum(
            max(order[at : at + batch_size]) ** power * len(order[at : at + batch_size])
            for at in range(0, len(order), batch_size)
        )
        for order in orders
    )


def nearest(values: list[int], share: float) -> int:
    """The value nearest to a share of the way through the sorted ones (halves to the even place)."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def rank(values: list[int], share: float) -> int:
    """The smallest value that at least a share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered) - 1e-9)) - 1]


def before_cutting(lines: Rows) -> list[int]:
    """Lengths as tokenized: fragments joined, cut tokens put back."""
    found: list[int] = []
    for line in lines:
        tokens = line["length"] + line["cut"]
        if line["status"] == "fragment" and line["part"] > 0:
            found[-1] += tokens
        else:
            found.append(tokens)
    return [length for length in found if length]


def repeated(packs: Rows) -> Counter[tuple[int, ...]]:
    """How often each sequence of tokens is there."""
    found: Counter[tuple[int, ...]] = Counter()
    for pack in packs:
        at = 0
        for length in pack["seq_lengths"]:
            found[tuple(pack["input_ids"][at : at + length])] += 1
            at += length
    return found


def tokens_by_id(packs: Rows) -> dict[int, tuple[int, ...]]:
    """Each sequence's tokens by its number."""
    found: dict[int, tuple[int, ...]] = {}
    for pack in packs:
        at = 0
        for number, length in zip(pack["sequence_ids"], pack["seq_lengths"], strict=True):
            found[number] = tuple(pack["input_ids"][at : at + length])
            at += length
    return found
