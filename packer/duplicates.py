"""Sequences that are token for token the same as another one.

A sequence's hash is the sum of its tokens, each times a random 64-bit number that goes with its place
(multilinear hashing, Lemire and Kaser 2014): two different ones meet with a chance of some 2^-48. One pass
over the tokens, some 10 ns each, and 16 bytes a sequence; so it is left out for large data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.runtime.reader import PackedReader

MOST_TOKENS = 50_000_000
_SHOWN = 5
_SEED = 0


def find_duplicates(reader: PackedReader) -> dict[str, Any] | None:
    """Of the stored packs: `sequences` and `tokens` that repeat an earlier one, and the largest `groups`.

    A group has its number of `copies`, its `length` and some `rows`, [source, row] each. None above
    MOST_TOKENS. Raises what reading a batch raises.
    """
    if sum(shard.tokens for shard in reader.manifest.shards) > MOST_TOKENS:
        return None
    hashes, ids, lengths = _hashes(reader)
    order = np.lexsort((ids, hashes))
    hashes, ids, lengths = hashes[order], ids[order], lengths[order]
    begins = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]) != 0)
    copies = np.diff(begins, append=len(hashes))
    again = copies > 1
    found: dict[str, Any] = {
        "sequences": int((copies - 1)[again].sum()),
        "tokens": int(((copies - 1) * lengths[begins])[again].sum()),
        "groups": [],
    }
    if not found["sequences"]:
        return found
    table = reader.sequence_columns("source", "row")
    largest = np.lexsort((ids[begins], -copies))[:_SHOWN]
    for group in largest[copies[largest] > 1].tolist():
        members = ids[begins[group] : begins[group] + min(int(copies[group]), _SHOWN)]
        rows = [[int(table["source"][at]), int(table["row"][at])] for at in members]
        found["groups"].append(
            {"copies": int(copies[group]), "length": int(lengths[begins[group]]), "rows": rows}
        )
    return found


def _hashes(reader: PackedReader) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], Any, Any]:
    """Hash, id and length of every stored sequence."""
    longest = 0
    factors = np.zeros(0, np.uint64)
    found: list[tuple[Any, Any, Any]] = []
    for batch in reader.batches():
        lengths = batch.flat("seq_lengths").astype(np.int64)
        if int(lengths.max(initial=0)) > longest:
            longest = int(lengths.max())
            factors = np.random.PCG64(_SEED).random_raw(longest)
        begins = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
        terms = factors[places]
        terms *= batch.flat("input_ids").astype(np.uint64) + np.uint64(1)
        found.append((np.add.reduceat(terms, begins), batch.flat("sequence_ids"), lengths))
    if not found:
        nothing = np.zeros(0, np.int64)
        return np.zeros(0, np.uint64), nothing, nothing
    hashes, ids, all_lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    return hashes, ids, all_lengths
