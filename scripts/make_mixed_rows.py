"""Rows of two lengths, as tokens: a fifth of 2,048 and the rest of 50, in drawn order, as JSONL.

    python scripts/make_mixed_rows.py OUT.jsonl [--rows N] [--seed S] [--documents]
    pack-dataset build OUT.jsonl --format tokenized --tokenizer packer/demo_data/tokenizer \\
        --max-length 16384 --output mix

Long rows among many short ones are where padding costs most: a batch is as wide as its longest row. With
--documents lengths are those of a long context instead: lognormal about 4,096, up to 16,384. The ids
are drawn too, from those that the demo's tokenizer has; what a step costs hangs on lengths alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

LONG, SHORT, LONG_SHARE = 2_048, 50, 0.2
MEDIAN, LONGEST = 4_096, 16_384
VOCABULARY = (3, 2_048)
"""Ids from, and below: those of the demo's tokenizer without its special tokens."""


def mixed_lengths(rows: int, seed: int) -> np.ndarray:
    """[rows] int64: exactly a fifth of them long, in drawn order."""
    lengths = np.full(rows, SHORT)
    lengths[: round(rows * LONG_SHARE)] = LONG
    return np.random.default_rng(seed).permutation(lengths)


def document_lengths(rows: int, seed: int) -> np.ndarray:
    """[rows] int64: half of them above 4,096, a twelfth at the limit."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), 1.0, size=rows)
    return np.clip(drawn.astype(np.int64), 1, LONGEST)


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=2_700, help="about 450 tokens each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", action="store_true", help="of long documents, about 5,500 tokens each")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed + 1)
    with options.out.open("w", encoding="utf-8") as out:
        lengths = (document_lengths if options.documents else mixed_lengths)(options.rows, options.seed)
        for length in lengths.tolist():
            out.write(json.dumps({"input_ids": rng.integers(*VOCABULARY, size=length).tolist()}) + "\n")


if __name__ == "__main__":
    main()
