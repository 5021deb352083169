"""Batches straight from the columns are those of collated packs, by numpy and compiled."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Folder, count_up, write_folder

from padless.runtime import gather as gather_module
from padless.runtime.collate import VarlenBatch, collate
from padless.runtime.errors import BatchError
from padless.runtime.gather import Gather
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream


@contextmanager
def compiled_after(batches: int) -> Iterator[None]:
    """In here a process takes the compiled way after so many batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_module, "NUMPY_BATCHES", batches)
        patch.setattr(Gather, "_made", 0)
        yield


def assert_same(found: VarlenBatch, wanted: VarlenBatch) -> None:
    """Same keys, kinds and values, in the same order."""
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert found[key].is_contiguous(), key
            assert torch.equal(found[key], value), key
        else:
            assert type(found[key]) is type(value), key
            assert found[key] == value, key


@pytest.mark.parametrize("after", [0, 1 << 30], ids=["compiled", "numpy"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_gathered_columns_give_the_batch_of_collated_packs(
    tmp_path_factory: pytest.TempPathFactory, after: int, data: st.DataObject
) -> None:
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)
    packs = data.draw(st.lists(lengths.filter(lambda some: sum(some) <= 16), min_size=1, max_size=7))
    rewards = {"reward": ("pack", "float32", pa.float32(), [float(n) for n in range(len(packs))])}
    labels = data.draw(st.booleans())
    path = tmp_path_factory.mktemp("gather") / "packed"
    written = [count_up(*pack, first=10 * number + 1) for number, pack in enumerate(packs)]
    if labels:  # otherwise a reader must take the ids
        written[0][0].trained = [False] * len(written[0][0].tokens)
    folder = Folder(
        packs=written,
        labels=labels,
        packs_per_batch=2,
        packs_per_shard=4,
        id_type=data.draw(st.sampled_from(["uint16", "int32"])),
        compression=data.draw(st.sampled_from([None, None, "zstd"])),
        extras=data.draw(st.sampled_from([{}, {}, rewards])),
    )
    write_folder(path, folder)
    reader = PackedReader(path)
    batches = st.lists(st.integers(0, len(packs) - 1), min_size=1, max_size=9)
    with compiled_after(after):
        gather = Gather(reader)
        for numbers in data.draw(st.lists(batches, min_size=1, max_size=3)):
            # Every second number of an array, as ranks take their part of a step.
            strided = np.repeat(np.array(numbers, dtype=np.int64), 2)[::2]
            assert_same(gather(strided), collate([reader[number] for number in numbers]))


def test_a_long_stream_is_compiled_on_its_way_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    write_folder(path, Folder(packs=[count_up(1 + n % 5, 2, first=n) for n in range(20)]))
    stream = PackedStream(path, packs_per_batch=2, rank=1, world_size=2)
    wanted = list(stream)
    stream.set_epoch(0)
    with compiled_after(2):
        found = list(stream)
        again = pickle.loads(pickle.dumps(stream))  # as a spawned worker gets it: without addresses
    again.set_epoch(0)
    assert gather_module._compiled_gather() is not None
    assert len(found) == len(wanted) == 5
    for before, compiled, unpickled in zip(wanted, found, again, strict=True):
        assert_same(compiled, before)
        assert_same(unpickled, before)


def test_without_numba_a_stream_goes_on_with_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "packed"
    write_folder(path, Folder(packs=[count_up(1 + n % 5, first=n) for n in range(6)]))
    wanted = list(PackedStream(path, rank=0, world_size=1))
    monkeypatch.setitem(sys.modules, "padless.runtime.compiled", None)
    gather_module._compiled_gather.cache_clear()
    try:
        with compiled_after(0), caplog.at_level("INFO", logger="padless.runtime.gather"):
            found = list(PackedStream(path, rank=0, world_size=1))
    finally:
        gather_module._compiled_gather.cache_clear()
    for mine, theirs in zip(found, wanted, strict=True):
        assert_same(mine, theirs)
    assert [record.getMessage()[:32] for record in caplog.records] == ["batches are put together by nump"]


def test_the_compiled_way_touches_no_token_that_was_not_checked(tmp_path: Path) -> None:
    # Long enough that the packs of one record batch are looked through apart.
    packs = [count_up(100_000, first=number) for number in (1, 301, 2)]
    write_folder(tmp_path / "packed", Folder(packs=packs, packs_per_shard=3, packs_per_batch=3))
    with compiled_after(0):
        gather = Gather(PackedReader(tmp_path / "packed"))
        assert gather(np.array([0, 2]))["input_ids"].unique().tolist() == [1, 2]
        for _ in range(2):
            with pytest.raises(BatchError, match="reach from 301 to 301"):
                gather(np.array([0, 1]))


RUN = """
import sys
from pathlib import Path
import numpy as np
from padless.runtime.compiled import CompiledGather
from padless.runtime.reader import PackedReader
print(CompiledGather(PackedReader(sys.argv[1]))(np.array([1]))["input_ids"].tolist())
"""


@pytest.mark.parametrize("places", ["ZipCacheLocator", "UserWideCacheLocator"])
def test_a_read_only_installation_compiles_into_the_users_cache_or_anew(tmp_path: Path, places: str) -> None:
    """Locators name where numba may put its cache: beside the file is in neither case among them."""
    write_folder(tmp_path / "packed", Folder(packs=[count_up(2), count_up(3, first=7)]))
    changes: dict[str, Any] = {
        "NUMBA_CACHE_LOCATOR_CLASSES": places,
        "XDG_CACHE_HOME": str(tmp_path / "home"),
    }
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "packed")],
        env=os.environ | changes,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "[[7, 7, 7]]\n", run.stderr
    kept = list((tmp_path / "home").rglob("compiled.fill*.nbc"))
    assert len(kept) == (places == "UserWideCacheLocator")
