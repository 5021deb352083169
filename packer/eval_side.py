"""Which records are held back for evaluation: by their content and the seed, never by their place.

So duplicates stay on one side, and new records move no old one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.sources import BadRecord


def eval_records(rows: list[Any], seed: int, fraction: float) -> NDArray[np.bool_]:
    """[rows] True for about `fraction` of them."""
    import orjson
    import xxhash

    limit = int(fraction * 2**64)
    chosen = np.zeros(len(rows), dtype=np.bool_)
    for number, row in enumerate(rows):
        if type(row) is BadRecord:
            continue
        row = _without_nulls(row)
        try:
            content = orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # an integer of more than 64 bits
            content = repr(row).encode("utf-8")
        chosen[number] = xxhash.xxh3_64_intdigest(content, seed=seed) < limit
    return chosen


def _without_nulls(value: Any) -> Any:
    """A record's content as every file format gives it: a key without a value is one that is missing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
