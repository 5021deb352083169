"""litdata streams what `export --to parquet` wrote, over files and in its own order, into our collate."""

from __future__ import annotations

from pathlib import Path

import pytest

litdata = pytest.importorskip("litdata", reason="run by scripts/test-trainers litdata")

from litdata.streaming.item_loader import ParquetLoader  # noqa: E402
from trainer_proofs import Given, after, assert_same_loss, exported, packs_of_demo  # noqa: E402

from padless.runtime.collate import collate  # noqa: E402
from padless.runtime.reader import PackedReader  # noqa: E402


def test_its_loader_and_our_collate_train_what_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITDATA_CACHE_DIR", str(tmp_path / "cache"))
    packed = packs_of_demo(tmp_path)
    out = str(exported(packed, "parquet"))
    litdata.index_parquet_dataset(out)
    data = litdata.StreamingDataset(out, item_loader=ParquetLoader(), shuffle=True, drop_last=False)
    assert len(data) == len(PackedReader(packed))
    rows = []
    for batch in litdata.StreamingDataLoader(data, batch_size=3, collate_fn=collate):
        rows.append(
            Given(
                input_ids=batch["input_ids"][0],
                next_labels=after(batch["labels"][0]),
                position_ids=batch["position_ids"][0],
            )
        )
    assert len(rows) > 1
    assert_same_loss("litdata", "`--to parquet`, its `StreamingDataset` in its loader", packed, rows)
