"""One record batch of packs as numpy arrays, checked before an element of it is handed out.

Arrow keeps a list column as one flat array of values and an array of offsets, so a pack is a slice:

    seq_lengths   values [3 1 2 | 4]   offsets [0 3 4]     pack 0: [3 1 2], pack 1: [4]

The arrays are views of the memory-mapped file. What must hold between columns is checked when the
batch is opened; ids and labels are looked through when a pack near them is first asked for, so that a
first pack out of 32 MiB of tokens does not wait until all are read from the disk. After that a pack
costs a few slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from padless.runtime.arrays import Array, has_nulls, to_numpy
from padless.runtime.blocks import MappedShard
from padless.runtime.format import IGNORE_INDEX, OWN_COLUMNS, BatchError, ColumnInfo


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Sequences that share a row; T tokens, N sequences. The arrays are read-only views."""

    input_ids: Array
    """[T] uint16 or int32."""
    labels: Array
    """[T] int32, unshifted, -100 where not trained and at every sequence start."""
    seq_lengths: Array
    """[N] int32, sums to T."""
    sequence_ids: Array
    """[N] int64, lines of the sequence table."""
    num_tokens: int
    num_targets: int
    max_seqlen: int
    attention_cost: int
    extras: dict[str, Any]
    """Further columns: [T], [T, K] or [N] arrays, at pack level the value."""
    extra_levels: Mapping[str, str] = field(default_factory=dict)
    """token, sequence or pack for each of them: a length alone would not tell."""


# Tokens that are looked through together: few calls for small packs, and a tenth of a millisecond.
_CHECKED_TOKENS = 1 << 17
_ALL = slice(None)


class PackBatch:
    """The packs of one record batch. Its rows are handed out once `check` has let them pass."""

    def __init__(
        self,
        batch: pa.RecordBatch,
        columns: Sequence[ColumnInfo],
        *,
        largest_id: int,
        file: MappedShard,
        late: Mapping[str, pa.Buffer],
    ) -> None:
        self.values: dict[str, Array] = {}
        self.offsets: dict[str, Array] = {}
        self.columns = columns
        self.largest_id = largest_id
        self.num_packs = batch.num_rows
        self.extra_levels = {
            column.name: column.level for column in columns if column.name not in OWN_COLUMNS
        }
        for column in columns:
            array = batch.column(column.name)
            if column.level == "pack":
                self.values[column.name] = to_numpy(array)
                continue
            # Counted from the batch's first value, so that columns of one level have the same offsets.
            offsets = to_numpy(array.offsets)
            self.values[column.name] = to_numpy(array.values)[offsets[0] :]
            self.offsets[column.name] = offsets - offsets[0] if offsets[0] else offsets
        self._file = file
        self._late = [
            (
                file.place(buffer) + self.values[name].strides[0] * batch.column(name).offsets[0].as_py(),
                self.values[name].strides[0],
                self.offsets[name],
            )
            for name, buffer in late.items()
        ]
        """Where in the file a column's values begin, the bytes of one, and where each row's begin."""
        self._own = [
            (column.name, self.values[column.name], self.offsets.get(column.name))
            for column in columns
            if column.name in OWN_COLUMNS
        ]
        tokens = int(self.offsets["input_ids"][-1]) or 1
        self.block = max(1, self.num_packs * _CHECKED_TOKENS // tokens)
        """Rows that are checked together: row // block numbers them in `is_checked`."""
        self.is_checked = bytearray(-(-self.num_packs // self.block))

    def check(self, row: int) -> None:
        """Look through the tokens of a row, and of those beside it; raises BatchError or ChecksumError."""
        block = row // self.block
        last = min((block + 1) * self.block, self.num_packs)
        for place, width, ends in self._late:
            self._file.compare(place + width * ends.item(block * self.block), place + width * ends.item(last))
        offsets = self.offsets["input_ids"]
        start = offsets.item(block * self.block)
        end = offsets.item(last)
        ids = self.values["input_ids"][start:end]
        # A negative id is a large one without its sign: one look instead of two.
        if ids.view(f"u{ids.itemsize}").max() > self.largest_id:
            raise BatchError(f"input_ids reach from {ids.min()} to {ids.max()}, not 0 to {self.largest_id}")
        if "labels" in self.values:
            labels = self.values["labels"][start:end]
            if labels.min() < IGNORE_INDEX or labels.max() > self.largest_id:
                raise BatchError(
                    f"labels reach from {labels.min()} to {labels.max()}, not -100 to {self.largest_id}"
                )
        self.is_checked[block] = True

    def check_all(self) -> None:
        """Look through all tokens that were not yet; raises BatchError."""
        for block, is_checked in enumerate(self.is_checked):
            if not is_checked:
                self.check(block * self.block)

    def blocks(self) -> Iterator[slice]:
        """Rows that are checked together, each just after it was; raises BatchError."""
        for start in range(0, self.num_packs, self.block):
            if not self.is_checked[start // self.block]:
                self.check(start)
            yield slice(start, min(start + self.block, self.num_packs))

    def __getitem__(self, row: int) -> Pack:
        fields: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        for name, values, offsets in self._own:
            # `item` gives a Python number at once; an element of an array is an object of its own.
            if offsets is None:
                fields[name] = values.item(row)
            else:
                fields[name] = values[offsets.item(row) : offsets.item(row + 1)]
        for name in self.extra_levels:
            extras[name] = self._cell(name, row)
        if "labels" not in fields:
            fields["labels"] = derived_labels(fields["input_ids"], fields["seq_lengths"])
        return Pack(**fields, extras=extras, extra_levels=self.extra_levels)

    def lengths(self, name: str, rows: slice = _ALL) -> Array:
        """How long a list column's lists are, of all packs or some: [packs] int64."""
        start, stop, _ = rows.indices(self.num_packs)
        return np.diff(self.offsets[name][start : stop + 1].astype(np.int64))

    def flat(self, name: str, rows: slice = _ALL) -> Array:
        """The values of all the batch's packs, or of some that follow each other, in one array."""
        if name not in self.offsets:
            return self.values[name][rows]
        start, stop, _ = rows.indices(self.num_packs)
        return self.values[name][self.offsets[name][start] : self.offsets[name][stop]]

    def flat_labels(self, rows: slice = _ALL) -> Array:
        """Their labels likewise, derived where the column is left out."""
        if "labels" in self.values:
            return self.flat("labels", rows)
        return derived_labels(self.flat("input_ids", rows), self.flat("seq_lengths", rows))

    def _cell(self, name: str, row: int) -> Any:
        """One pack's part of a column: a view, or at pack level the value."""
        offsets = self.offsets.get(name)
        if offsets is None:
            return self.values[name][row]
        return self.values[name][offsets.item(row) : offsets.item(row + 1)]


def late_values(
    batch: pa.RecordBatch, columns: Sequence[ColumnInfo], file: MappedShard
) -> dict[str, pa.Buffer]:
    """The values that nobody reads before `check` does, by column: numbers that are views of the file.

    The lengths of sequences, strings and what becomes an array of its own are looked at in opening.
    """
    found: dict[str, pa.Buffer] = {}
    for column in columns:
        if column.level == "pack" or column.name == "seq_lengths":
            continue
        values = batch.column(column.name).values
        while pa.types.is_fixed_size_list(values.type):
            values = values.values
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            buffer = values.buffers()[1]
            if buffer is not None and file.holds(buffer):
                found[column.name] = buffer
    return found


def open_batch(
    batch: pa.RecordBatch,
    columns: Sequence[ColumnInfo],
    *,
    num_packs: int,
    largest_id: int,
    file: MappedShard,
    place: tuple[int, int],
) -> PackBatch:
    """The batch, once its columns have been seen to fit each other; its tokens are left to `check`.

    `place` are the first byte of its message in the file, and the end. Raises BatchError with the reason
    (pyarrow's own complaints become one as well), and ChecksumError for bytes that are not as written.
    """
    late = late_values(batch, columns, file)
    file.compare_but(*place, late.values())
    try:
        # Before anything else: bad offsets make pyarrow and numpy read outside the buffers.
        batch.validate(full=True)
    except pa.ArrowException as problem:
        raise BatchError(f"Arrow finds it damaged: {problem}") from None
    if batch.num_rows != num_packs:
        raise BatchError(f"it holds {batch.num_rows} packs, the manifest says {num_packs}")
    for column in columns:
        if has_nulls(batch.column(column.name)):
            raise BatchError(f"{column.name} has nulls")
    opened = PackBatch(batch, columns, largest_id=largest_id, file=file, late=late)
    if problem_found := _problem(opened):
        raise BatchError(problem_found)
    return opened


def derived_labels(input_ids: Array, seq_lengths: Array) -> Array:
    """The labels where only sequence starts are masked: [T] ids, [N] lengths -> [T] int32."""
    labels = input_ids.astype(np.int32)
    labels[np.cumsum(seq_lengths, dtype=np.int64) - seq_lengths] = IGNORE_INDEX
    labels.flags.writeable = False
    return labels


def _problem(batch: PackBatch) -> str | None:
    """What contradicts itself in a batch whose buffers are sound."""
    tokens, sequences = batch.lengths("input_ids"), batch.lengths("seq_lengths")
    for column in batch.columns:
        if column.level == "pack":
            continue
        wanted, words = (
            (tokens, "input_ids")
            if column.level == "token"
            else (
                sequences,
                "seq_lengths",
            )
        )
        if not np.array_equal(batch.lengths(column.name), wanted):
            return f"{column.name} is not as long as {words} in every pack"
    if sequences.min() < 1:
        return "a pack holds no sequence"
    lengths = batch.flat("seq_lengths").astype(np.int64)
    if lengths.min() < 1:
        return f"seq_lengths holds {lengths.min()}, a sequence has at least 1 token"
    firsts = np.cumsum(sequences) - sequences
    if not np.array_equal(np.add.reduceat(lengths, firsts), tokens):
        return "seq_lengths do not sum to the tokens of their pack"
    targets = batch.values["num_targets"]
    summaries = {
        "num_tokens": tokens,
        "max_seqlen": np.maximum.reduceat(lengths, firsts),
        "attention_cost": np.add.reduceat(lengths * lengths, firsts),
        # Counting the targets is left to verify: it is a second pass over the labels.
        "num_targets": np.clip(targets, 0, tokens - sequences),
    }
    for name, wanted in summaries.items():
        if not np.array_equal(batch.values[name], wanted):
            return f"{name} is not what the pack's sequences give"
    return None
