"""Whether the sequence table adds up to what the manifest says: every record, token and length of packs.

Everything in numpy over the table's columns, some 60 bytes a line.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.runtime.format import FormatError, Manifest
from padless.runtime.reader import Array, PackedReader

_TABLE_COLUMNS = (
    *("record", "source", "part", "status", "reason"),
    *("length", "num_targets", "cut", "pack", "offset"),
)


def records_of(reader: PackedReader, table: dict[str, Array]) -> str:
    """Read the table into `table`; its lines are records in order, with their parts in order."""
    table.update(reader.sequence_columns(*_TABLE_COLUMNS))
    sources = reader.manifest.sources
    record, part, source = table["record"], table["part"], table["source"]
    first = np.append(True, record[1:] != record[:-1])[: len(record)]
    require(bool((np.diff(record) >= 0).all()), "the table's records are out of order")
    expected = np.where(first, 0, np.append(0, part[:-1] + 1)[: len(part)])
    require(np.array_equal(part, expected), "a record's parts are not numbered 0, 1, ...")
    unplaced = (table["length"] == 0) & (table["num_targets"] == 0) & (table["offset"] < 0)
    dropped = table["status"] == "dropped"
    same = np.array_equal(dropped, table["pack"] < 0) and bool(unplaced[dropped].all())
    require(same, "a sequence is dropped and has a place or a length, or the reverse")
    require(bool((table["cut"][~first] == 0).all()), "cut is not on its record's first line")
    explained = np.array_equal(table["status"] != "whole", table["reason"] != np.array(None))
    require(explained, "a line has no reason though it is not whole, or the reverse")
    counts = np.bincount(source[first], minlength=len(sources)).tolist()
    listed = [info.records for info in sources]
    require(counts == listed, f"records per source are {counts}, the manifest says {listed}")
    return f"{len(record):,} lines for {sum(counts):,} records of {len(counts)} sources"


def account_of(manifest: Manifest, table: dict[str, Array]) -> str:
    """Every record whole, truncated, split or dropped; tokens in = trained + masked + cut."""
    fates, dropped_by_reason = record_fates(table)
    tokens, trained = int(table["length"].sum()), int(table["num_targets"].sum())
    found: dict[str, Any] = {
        "records": fates,
        "dropped_by_reason": dropped_by_reason,
        "sequences": int((table["pack"] >= 0).sum()),
        "tokens": tokens,
        "trained_tokens": trained,
        "masked_tokens": tokens - trained,
        "cut_tokens": int(table["cut"].sum()),
    }
    for name, value in found.items():
        said = manifest.statistics[name]
        if isinstance(said, dict):
            # A fate or reason that met no record may be listed with 0 or left out.
            said = {key: count for key, count in said.items() if count}
            value = {key: count for key, count in value.items() if count}
        require(said == value, f"{name} is {value} in the table, {said} in the manifest")
    if "by_source" in manifest.statistics:  # since padless counts them
        counted = np.bincount(table["source"], weights=table["length"], minlength=len(manifest.sources))
        said = manifest.statistics["by_source"]
        require(isinstance(said, list), f"by_source is {said!r} in the manifest")
        listed = [here.get("tokens") if isinstance(here, dict) else here for here in said]
        require(counted.tolist() == listed, f"tokens by source are {counted}, the manifest says {listed}")
    by_reason = sum(manifest.statistics["cut_by_reason"].values())
    require(by_reason == found["cut_tokens"], f"cut_by_reason sums to {by_reason}")
    _buckets(manifest, table)
    bound = manifest.statistics["bound_packs"]
    require(bound <= manifest.num_packs, f"bound_packs is {bound}, there are fewer packs")
    return f"{tokens:,} tokens = {trained:,} trained + {tokens - trained:,} masked"


def _buckets(manifest: Manifest, table: dict[str, Array]) -> None:
    """Sequences and tokens of each length of packs are those that the manifest lists."""
    listed = manifest.statistics.get("buckets", [])
    ends = np.cumsum([bucket.packs for bucket in manifest.buckets])
    of_pack = np.searchsorted(ends, table["pack"], side="right")
    for number, said in enumerate(listed):
        mine = (table["pack"] >= 0) & (of_pack == number)
        found = {"sequences": int(mine.sum()), "tokens": int(table["length"][mine].sum())}
        same = all(said.get(name) == value for name, value in found.items())
        require(same, f"packs of {said['max_length']} hold {found} by the table, {said} in the manifest")


def record_fates(table: dict[str, Array]) -> tuple[dict[str, int], dict[str, int]]:
    """From the table's record, status and reason: records by fate, dropped records by reason."""
    fates = ("whole", "dropped", "truncated", "split")
    ranks = np.zeros(len(table["record"]), dtype=np.int8)
    for rank, status in enumerate(("dropped", "truncated", "fragment"), 1):
        ranks[table["status"] == status] = rank
    numbers, starts, sizes = np.unique(table["record"], return_index=True, return_counts=True)
    # A record's worst part decides; reduceat has no answer for an empty table.
    worst = np.maximum.reduceat(ranks, starts) if len(starts) else ranks
    counts = np.bincount(worst, minlength=len(fates)).tolist()
    lines = np.flatnonzero((ranks == 1) & (np.repeat(worst, sizes) == 1))
    lines = lines[np.unique(table["record"][lines], return_index=True)[1]]
    reasons, times = np.unique(table["reason"][lines].astype(str), return_counts=True)
    by_reason = dict(zip(reasons.tolist(), times.tolist(), strict=True))
    return {"in": len(numbers), **dict(zip(fates, counts, strict=True))}, by_reason


def require(holds: bool, problem: str) -> None:
    """Raise FormatError with the problem unless it holds."""
    if not holds:
        raise FormatError(problem)
