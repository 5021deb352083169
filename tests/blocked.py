"""Folders of a few packs with hundreds of blocks, so that each byte of them can be tried.

`small_blocks` is a fixture for the modules that import it.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from building import DEMO, build
from packed import Folder, count_up

from padless.runtime import blocks as blocks_module
from padless.runtime import manifest as manifest_module
from padless.runtime.format import read_manifest

SMALL = 64
"""Bytes of a block in these tests: a folder of a few packs then has hundreds."""
PACKS = [count_up(30, 7, 21, first=10 * number) for number in range(1, 9)]
FLOAT_2 = pa.list_(pa.list_(pa.float32(), 2))
EXTRAS = {
    "topk": (
        *("token", "list<fixed_size_list<float32, 2>>", FLOAT_2),
        [[[n, t] for t in range(58)] for n in range(8)],
    ),
    "half": ("token", "list<float16>", pa.list_(pa.float16()), [[n / 2] * 58 for n in range(8)]),
    "reward": ("sequence", "list<float64>", pa.list_(pa.float64()), [[n, n + 0.5, 2] for n in range(8)]),
    "images": (
        "sequence",
        "list<string>",
        pa.list_(pa.string()),
        [["", f"picture {n}", "x"] for n in range(8)],
    ),
    "good": ("sequence", "list<bool>", pa.list_(pa.bool_()), [[n % 2 == 0, True, False] for n in range(8)]),
    "lane": ("pack", "int8", pa.int8(), list(range(8))),
}
FOLDERS = {
    "mapped": Folder(packs=PACKS, max_length=64, packs_per_shard=4, packs_per_batch=2, block_bytes=SMALL),
    "wide": Folder(packs=PACKS, max_length=64, id_type="int32", labels=False, block_bytes=SMALL),
    "extras": Folder(
        packs=PACKS, max_length=64, packs_per_shard=8, packs_per_batch=4, extras=EXTRAS, block_bytes=SMALL
    ),
    "zstd": Folder(
        packs=PACKS,
        max_length=64,
        packs_per_shard=8,
        packs_per_batch=3,
        compression="zstd",
        block_bytes=SMALL,
    ),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks_module, manifest_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", SMALL)
    # So that packs of one record batch are looked through apart.
    monkeypatch.setattr("padless.runtime.batch._CHECKED_TOKENS", 50)


def build_in_blocks(output: Path) -> Path:
    """By `pack-dataset build`, with blocks as these tests have them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks_module, manifest_module):
            patch.setattr(module, "BLOCK_BYTES", SMALL)
        assert build(DEMO, output, "--limit", 60, "--shard-size", 12_000, "--workers", 1).code == 0
    return output


def shard(path: Path, number: int = 0) -> Path:
    return path / read_manifest(path).shards[number].file


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Change a bit, in a new file: the old one may be mapped still."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.unlink()
    path.write_bytes(data)
