"""Texts again and again, each copy of another length: the long tail of a few documents, as of many.

    python scripts/vary_texts.py c4_demo.jsonl wiki_demo.txt python_stdlib.jsonl --output long.jsonl

How long ranks wait for one another hangs on how packs differ, and packs of a few dozen documents differ as a
matter of luck. Copies that are alike would make pairs of like packs where there are none, so each begins
somewhere in the first fifth of its text. A text is a line of a .txt file or the "text" of a record.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path


def texts(path: Path) -> Iterator[str]:
    """The texts of a file, in its order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield line.strip() if path.suffix == ".txt" else json.loads(line)["text"]


def main() -> None:
    """Write the copies as records, those of one text apart from each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    once = [text for path in options.files for text in texts(path)]
    with options.output.open("w", encoding="utf-8") as out:
        for _ in range(options.copies):
            for text in once:
                begin = draw.randrange(len(text) // 5 + 1)
                out.write(json.dumps({"text": text[begin:]}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
