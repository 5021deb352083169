"""Sequences that stand in no folder as they are asked for: joined, cut, or stored otherwise.

They go into one file of the work folder, which is mapped like the shards once they are written, so the writer
of shards sees no difference. The price is their bytes on the disk, twice, for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError, disk_full
from padless.packer.folder_tokens import WEIGHT, Elements, Segment
from padless.packer.lines import DROPPED, TRUNCATED
from padless.packer.recut import Recut
from padless.packer.recut_policy import Records
from padless.runtime.format import IGNORE_INDEX

BLOCK_TOKENS = 2**22
"""Tokens that are made anew at a time."""


class MadeAnew:
    """A file of sequences; mapped once it is complete."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "wb+")
        self._parts: list[tuple[int, Segment]] = []
        self._size = 0

    def add(self, segment: Segment) -> None:
        """Append sequences; DiskFullError where there is no room."""
        kinds = {name: values[:0] for name, values in segment.columns.items()}
        self._parts.append((self._size, segment._replace(columns=kinds)))
        for values in segment.columns.values():
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
            padding = b"\0" * (-len(data) % 8)
            try:
                self._file.write(data)
                self._file.write(padding)
                self._file.flush()
            except OSError as error:
                raise disk_full(error, self.path, len(data)) from error
            self._size += len(data) + len(padding)

    def segments(self) -> Iterator[Segment]:
        """What was added since the last call, mapped."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        whole = np.memmap(self.path, dtype=np.uint8, mode="r")
        for at, segment in parts:
            tokens = int(segment.lengths.sum(dtype=np.int64))
            columns: dict[str, NDArray[Any]] = {}
            for name, kind in segment.columns.items():
                shape = (tokens, *kind.shape[1:])
                size = int(np.prod(shape)) * kind.itemsize
                columns[name] = whole[at : at + size].view(kind.dtype).reshape(shape)
                at += size + -size % 8
            yield segment._replace(columns=columns)

    def close(self) -> None:
        self._file.close()


def make_anew(
    made: MadeAnew,
    old: Elements,
    old_lines: NDArray[np.void],
    records: Records,
    cut: Recut,
) -> None:
    """Write the sequences of `cut.renewed` records, from `old`, whose sequences are the old lines.

    Their numbers are the new lines, whose `targets` are filled in; a line without any is dropped. Raises
    InputError where fragments whose tokens have weights would be joined: the first of each has lost its own.
    """
    lines = cut.piece.lines
    new_first = np.append(np.flatnonzero(lines["part"] == 0), len(lines))
    ends = np.cumsum(records.have[cut.renewed])
    start = 0
    while start < len(cut.renewed):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK_TOKENS, "right")))
        block = cut.renewed[start:stop]
        start = stop
        sources = _ranges(records.first[block], records.first[block + 1])
        lengths = old_lines["length"][sources]
        joints = (np.cumsum(lengths, dtype=np.int64) - lengths)[old_lines["part"][sources] > 0]
        columns = _joined(old, sources, joints)
        new = _ranges(new_first[block], new_first[block + 1])
        taken = lines["length"][new].astype(np.int64)
        per_record = new_first[block + 1] - new_first[block]
        begins = (
            np.repeat(np.cumsum(records.have[block]) - records.have[block], per_record) + lines["start"][new]
        )
        places = _ranges(begins, begins + taken)
        columns = {name: values[places] for name, values in columns.items()}
        firsts = np.cumsum(taken) - taken
        columns["labels"][firsts] = IGNORE_INDEX
        if WEIGHT in columns:
            columns[WEIGHT][firsts] = 0
        lines["targets"][new] = np.add.reduceat(columns["labels"] != IGNORE_INDEX, firsts, dtype=np.int64)
        asked = {name: columns[name] for name in old.columns}
        made.add(Segment(asked, taken.astype(np.int32), new))
        idle = new[(lines["targets"][new] == 0) & (lines["status"][new] == TRUNCATED)]
        lines["status"][idle] = DROPPED
        lines["cut"][idle] += lines["length"][idle]
        lines["length"][idle] = 0


def _joined(
    old: Elements, sources: NDArray[np.int64], joints: NDArray[np.int64]
) -> Mapping[str, NDArray[Any]]:
    """All columns and the labels of old sequences one after the other, the joints trained again.

    Only what is trained throughout was ever split, so a later part's first token is, too.
    """
    columns = {name: old.take(name, sources) for name in old.columns}
    if WEIGHT in columns and len(joints):
        raise InputError(
            f"{len(joints):,} fragments of records with a {WEIGHT} would be joined, and the weight of each "
            "one's first token is in no folder: build again from the sources"
        )
    if "labels" in columns:
        labels = columns["labels"].copy()
        labels[joints] = columns["input_ids"][joints]
    else:
        labels = columns["input_ids"].astype(np.int32)
    return {**columns, "labels": labels}


def _ranges(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2 5], [4 6] -> [2 3 5]."""
    sizes = stops - starts
    first = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    found: NDArray[np.int64] = np.arange(len(first)) + first
    return found
