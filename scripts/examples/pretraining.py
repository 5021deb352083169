"""Pretraining on documents, half of them with the middle last: python scripts/examples/pretraining.py"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from dpo import ROWS
from tiny import TOKENIZER, packed, tiny_model

from padless.runtime.loss import step_targets
from padless.runtime.stream import PackedStream

FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def with_fim(folder: Path) -> Path:
    """The demo's tokenizer and three tokens more; models for code come with theirs."""
    shutil.copytree(TOKENIZER, folder)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    begin = 1 + max(*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"]))
    plain = {name: False for name in ("single_word", "lstrip", "rstrip", "normalized")}
    for number, name in enumerate(FIM):
        spec["added_tokens"].append({"id": begin + number, "content": name, "special": True, **plain})
    path.write_text(json.dumps(spec))
    return folder


def main() -> None:
    rows = [{"text": f"{row['prompt']}\n{row['chosen']}"} for row in ROWS]
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = str(with_fim(Path(scratch) / "tokenizer"))
        cuts = {"strategy": "wrapped", "overflow": "split", "max_length": 128}
        folder = packed(Path(scratch), rows, tokenizer=tokenizer, fim_rate=0.5, **cuts)
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for epoch in range(4):
            batches = [*PackedStream(folder, packs_per_batch=2, epoch=epoch)]
            targets, total = step_targets(batches), 0.0
            for batch in batches:
                loss = model(**batch.model_inputs(), num_items_in_batch=targets).loss
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch}: loss {total:.4f} over {targets} tokens")


if __name__ == "__main__":
    main()
