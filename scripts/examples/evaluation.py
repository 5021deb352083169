"""Perplexity of a packed set, and its hardest records: python scripts/examples/evaluation.py"""

import tempfile
from pathlib import Path

from dpo import ROWS
from tiny import packed, tiny_model

from padless.runtime.evaluate import evaluate


def main() -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]
    with tempfile.TemporaryDirectory() as folder:
        found = evaluate(tiny_model(), packed(Path(folder), rows))
        print(f"perplexity {found.perplexity:.1f} over {found.targets} tokens")
        for one in found.worst(3):
            print(f"record {one['record']}: loss {one['loss'] / one['targets']:.3f}")


if __name__ == "__main__":
    main()
