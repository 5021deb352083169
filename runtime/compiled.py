"""One compiled call that writes all arrays of a batch; importing it needs numba.

It is given addresses instead of arrays: handing numba an array costs a third of a microsecond each, and
a batch of 2,048 tokens would need a dozen. They are those of mapped record batches, which a reader keeps
for good and has checked; what it may let go again (decompressed batches) is left to numpy.

The machine code is kept in numba's cache, beside this file or, where that cannot be written to, in the
user's cache folder; where neither can, each process compiles anew (some seconds).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils
from numba.extending import intrinsic

from padless.runtime.assemble import BLOCK, MAX_TOKENS
from padless.runtime.batch import PackBatch
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.order import Numbers
from padless.runtime.reader import PackedReader
from padless.runtime.varlen_batch import VarlenBatch

types: Any = numba.types

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")

# What a row of the table holds for a record batch: addresses, and the rows that are checked together.
_COLUMNS = 10
_IDS, _ID_OFFSETS, _LABELS, _LENGTHS, _LENGTH_OFFSETS, _SEQUENCE_IDS = range(6)
_TARGETS, _LONGEST, _CHECKED, _CHECKED_ROWS = range(6, _COLUMNS)


class CompiledGather:
    """`Gather` for a reader of stored packs without further columns."""

    def __init__(self, reader: PackedReader) -> None:
        self._reader = reader
        self._ends = np.array(reader.batch_ends, dtype=np.int64)
        self._table = np.zeros((len(self._ends), _COLUMNS), dtype=np.int64)
        self._is_wide = any(
            column.name == "input_ids" and column.type == "list<int32>" for column in reader.manifest.columns
        )

    def __call__(self, numbers: Numbers) -> VarlenBatch | None:
        """The batch of at least one pack; None where a pack does not lie in a mapped file."""
        while True:
            tokens, sequences, targets, longest = _measure(self._table, self._ends, numbers)
            if tokens >= 0:
                break
            if not self._prepare(int(numbers[-1 - tokens])):
                return None
        if tokens > MAX_TOKENS:
            return None
        size = 3 * tokens + sequences + (tokens + sequences) // 2 + 1
        # [1, size], so that rows of a batch are slices of it.
        block = np.empty((1, -(-size // BLOCK) * BLOCK), dtype=np.int64)
        _fill(self._table, self._ends, numbers, self._is_wide, block, tokens, sequences)
        narrow = block[:, 3 * tokens + sequences :].view(np.int32)
        from_numpy = torch.from_numpy
        boundaries = from_numpy(narrow[0, tokens : tokens + sequences + 1])
        return VarlenBatch(
            input_ids=from_numpy(block[:, :tokens]),
            labels=from_numpy(block[:, tokens : 2 * tokens]),
            position_ids=from_numpy(block[:, 2 * tokens : 3 * tokens]),
            cu_seq_lens_q=boundaries,
            cu_seq_lens_k=boundaries,
            max_length_q=longest,
            max_length_k=longest,
            seq_idx=from_numpy(narrow[:, :tokens]),
            sequence_ids=from_numpy(block[0, 3 * tokens : 3 * tokens + sequences]),
            num_targets=targets,
        )

    def _prepare(self, number: int) -> bool:
        """Let the reader open and check what holds a pack; whether it is mapped. Raises what `place` does."""
        self._reader.place(number)
        which = int(np.searchsorted(self._ends, number, side="right"))
        batch = self._reader.mapped_batch(which)
        if batch is None:
            return False
        self._table[which] = _addresses(batch)
        return True


def _addresses(batch: PackBatch) -> list[int]:
    values, offsets = batch.values, batch.offsets
    own = {
        _IDS: values["input_ids"],
        _ID_OFFSETS: offsets["input_ids"],
        _LENGTHS: values["seq_lengths"],
        _LENGTH_OFFSETS: offsets["seq_lengths"],
        _SEQUENCE_IDS: values["sequence_ids"],
        _TARGETS: values["num_targets"],
        _LONGEST: values["max_seqlen"],
        _CHECKED: np.frombuffer(batch.is_checked, dtype=np.uint8),
    }
    if "labels" in values:
        own[_LABELS] = values["labels"]
    row = [0] * _COLUMNS
    for place, array in own.items():
        row[place] = array.ctypes.data
    row[_CHECKED_ROWS] = batch.block
    return row


def _as_pointer(typing_context: Any, address: Any) -> Any:
    """An address as the pointer that `carray` takes."""

    def to_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), to_pointer


_pointer: Any = intrinsic(_as_pointer)


def measure(table: Any, ends: Any, numbers: Any) -> tuple[int, int, int, int]:
    """Tokens, sequences, targets and the longest sequence of the packs.

    Below 0 where pack -1 - tokens of them is not to be touched yet: not opened or not checked.
    """
    tokens = sequences = targets = longest = 0
    for place in range(len(numbers)):
        which = np.searchsorted(ends, numbers[place], side="right")
        row = numbers[place] - (ends[which - 1] if which > 0 else 0)
        at = table[which]
        if at[_IDS] == 0:
            return -1 - place, 0, 0, 0
        checked = row // at[_CHECKED_ROWS]
        if numba.carray(_pointer(at[_CHECKED]), checked + 1, np.uint8)[checked] == 0:
            return -1 - place, 0, 0, 0
        offsets = numba.carray(_pointer(at[_ID_OFFSETS]), row + 2, np.int32)
        tokens += offsets[row + 1] - offsets[row]
        offsets = numba.carray(_pointer(at[_LENGTH_OFFSETS]), row + 2, np.int32)
        sequences += offsets[row + 1] - offsets[row]
        targets += numba.carray(_pointer(at[_TARGETS]), row + 1, np.int32)[row]
        longest = max(longest, numba.carray(_pointer(at[_LONGEST]), row + 1, np.int32)[row])
    return tokens, sequences, targets, longest


def fill(table: Any, ends: Any, numbers: Any, is_wide: Any, block: Any, tokens: Any, sequences: Any) -> None:
    """Write ids, labels, positions [tokens] and sequence ids [sequences] int64 into a block [1, ...].

    Behind them, as int32, the sequence of each token and the boundaries [sequences + 1].
    """
    flat = block[0]
    ids, labels, positions = flat[:tokens], flat[tokens : 2 * tokens], flat[2 * tokens : 3 * tokens]
    sequence_ids = flat[3 * tokens : 3 * tokens + sequences]
    narrow = flat[3 * tokens + sequences :].view(np.int32)
    sequence_of, boundaries = narrow[:tokens], narrow[tokens:]
    token: Any = 0
    sequence = 0
    boundaries[0] = 0
    for place in range(len(numbers)):
        which = np.searchsorted(ends, numbers[place], side="right")
        row = numbers[place] - (ends[which - 1] if which > 0 else 0)
        at = table[which]
        offsets = numba.carray(_pointer(at[_ID_OFFSETS]), row + 2, np.int32)
        start, count = np.int64(offsets[row]), np.int64(offsets[row + 1] - offsets[row])
        # Loops over slices: an index that might be negative keeps LLVM from using vector instructions.
        own, trained = ids[token : token + count], labels[token : token + count]
        if is_wide:
            wide = numba.carray(_pointer(at[_IDS] + 4 * start), count, np.int32)
            for one in range(count):
                own[one] = wide[one]
        else:
            short = numba.carray(_pointer(at[_IDS] + 2 * start), count, np.uint16)
            for one in range(count):
                own[one] = short[one]
        if at[_LABELS] == 0:
            for one in range(count):
                trained[one] = own[one]
        else:
            stored = numba.carray(_pointer(at[_LABELS] + 4 * start), count, np.int32)
            for one in range(count):
                trained[one] = stored[one]
        offsets = numba.carray(_pointer(at[_LENGTH_OFFSETS]), row + 2, np.int32)
        start, count = np.int64(offsets[row]), np.int64(offsets[row + 1] - offsets[row])
        lengths = numba.carray(_pointer(at[_LENGTHS] + 4 * start), count, np.int32)
        own_ids = numba.carray(_pointer(at[_SEQUENCE_IDS] + 8 * start), count, np.int64)
        for one in range(count):
            labels[token] = IGNORE_INDEX
            length = np.int64(lengths[one])
            counted, numbered = positions[token : token + length], sequence_of[token : token + length]
            for position in range(length):
                counted[position] = position
            for position in range(length):
                numbered[position] = sequence
            token += length
            sequence_ids[sequence] = own_ids[one]
            sequence += 1
            boundaries[sequence] = token


def _compile(function: Callable[..., Any], signature: Any) -> Any:
    try:
        return numba.njit(signature, nogil=True, cache=True)(function)
    except (RuntimeError, OSError):  # there is no folder for the cache, or it is full
        return numba.njit(signature, nogil=True)(function)


_TABLE, _LIST = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")
_SOME = types.Array(types.int64, 1, "A")
_measure = _compile(measure, types.UniTuple(types.int64, 4)(_TABLE, _LIST, _SOME))
_fill = _compile(fill, types.void(_TABLE, _LIST, _SOME, types.boolean, _TABLE, types.int64, types.int64))
