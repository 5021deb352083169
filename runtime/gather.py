"""Batches straight from a reader's columns, without a Pack in between: what a stream yields.

The reader has checked its record batches, so a pack costs some slices here and nothing is checked
again. A stream that goes on for long gets one compiled call a batch instead of a dozen numpy calls
(`compiled`, with numba, where it is installed): half a second at once, a third to a half of the time after.
Further columns and packs of a plan take the way of `collate`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from padless.runtime.arrays import Array
from padless.runtime.assemble import MAX_TOKENS, assemble, join
from padless.runtime.collate import collate
from padless.runtime.order import Numbers
from padless.runtime.reader import PackedReader
from padless.runtime.varlen_batch import VarlenBatch

NUMPY_BATCHES = 1000
"""Batches of a process after which numba is worth its start: evaluations and first batches do without."""
_LOG = logging.getLogger(__name__)


class Gather:
    """`collate([reader[number] for number in numbers])`, faster."""

    _made: ClassVar[int] = 0
    """Batches of this process, over all streams."""

    def __init__(self, reader: PackedReader) -> None:
        self.reader = reader
        self._is_plain = reader.plan is None and not reader.manifest.extras
        self._compiled: Callable[[Numbers], VarlenBatch | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Gather, (self.reader,)

    def __call__(self, numbers: Numbers) -> VarlenBatch:
        """The batch of at least one pack, numbers [packs] int64."""
        if self._compiled is not None:
            batch = self._compiled(numbers)
            if batch is not None:
                return batch
        elif self._is_plain and self.reader.remote is None:
            Gather._made += 1
            if Gather._made > NUMPY_BATCHES and (compiled := _compiled_gather()) is not None:
                self._compiled = compiled(self.reader)
                return self(numbers)
        return self._by_numpy(numbers.tolist())

    def _by_numpy(self, numbers: list[int]) -> VarlenBatch:
        if not self._is_plain:
            return collate([self.reader[number] for number in numbers])
        ids: list[Array] = []
        labels: list[Array] = []
        lengths: list[Array] = []
        sequence_ids: list[Array] = []
        num_targets = longest = tokens = 0
        for number in numbers:
            batch, row = self.reader.place(number)
            values, offsets = batch.values, batch.offsets["input_ids"]
            # `item` gives a Python number at once; an element of an array is an object of its own.
            start, end = offsets.item(row), offsets.item(row + 1)
            ids.append(values["input_ids"][start:end])
            if "labels" in values:
                labels.append(values["labels"][start:end])
            tokens += end - start
            offsets = batch.offsets["seq_lengths"]
            start, end = offsets.item(row), offsets.item(row + 1)
            lengths.append(values["seq_lengths"][start:end])
            sequence_ids.append(values["sequence_ids"][start:end])
            num_targets += values["num_targets"].item(row)
            longest = max(longest, values["max_seqlen"].item(row))
        if tokens > MAX_TOKENS:
            return collate([self.reader[number] for number in numbers])
        return assemble(
            ids=ids,
            labels=labels,
            lengths=join(lengths),
            sequence_ids=sequence_ids,
            longest=longest,
            num_targets=num_targets,
        )


@cache
def _compiled_gather() -> Callable[[PackedReader], Callable[[Numbers], VarlenBatch | None]] | None:
    """The compiled way, compiled or read from numba's cache once a process; None where it cannot be had."""
    try:
        from padless.runtime.compiled import CompiledGather
    except ImportError as problem:
        _LOG.info("batches are put together by numpy, numba is not to be had: %s", problem)
        return None
    return CompiledGather
