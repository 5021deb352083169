"""From finished chunks to what planning needs: lengths alone, and the account of what became of the records.

Lines stay on disk and pass by, chunk after chunk: here, and, with every sequence's place in the plan, into
the sequence table (`packer/table_writer.py`). In memory are 8 bytes a sequence, 16 where some lines are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.copies import goes_on
from padless.packer.errors import InputError
from padless.packer.extra_columns import Judged
from padless.packer.fragments import Fragments
from padless.packer.gather import WEIGHT
from padless.packer.lines import DROPPED, REASONS, STATUSES
from padless.packer.token_store import ChunkStore
from padless.runtime.format import IMAGES, ColumnInfo

if TYPE_CHECKING:
    pass

MOST_SEQUENCES = 2**31 - 2**20
"""Their numbers have 32 bits while a folder is written; gaps in the store take numbers too."""


@dataclass
class SplitLines:
    """One split's sequences, in the order of their lines, and its account."""

    lengths: NDArray[np.int32]
    elements: NDArray[Any]
    """[sequences]: each one's element of the token store, or its place in packed folders."""
    ids: NDArray[np.int64] | None
    """[sequences]: each one's line; None where every line is a sequence."""
    lines: int
    trained: int
    records_by_source: list[int]
    records: dict[str, int] = field(default_factory=dict)
    dropped_by_reason: dict[str, int] = field(default_factory=dict)
    cut_by_reason: dict[str, int] = field(default_factory=dict)
    empty_replies: int = 0
    by_source: list[dict[str, int]] = field(default_factory=list)
    """Of each source: records, those of them that were dropped, and tokens as packed, copies included."""
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)
    """[sequences] each: the columns of SEQUENCE_COLUMNS that some sequence has a value of."""
    kind: np.dtype[Any] = WEIGHT
    """What the store has beside each token, where it has anything."""
    is_weighted: bool = True
    """Whether weights are among that."""
    token_extras: tuple[ColumnInfo, ...] = ()
    """Columns at token level beyond the weights."""
    continued: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Numbers of the sequences that go on with the record of the one before (`--overflow split`)."""
    sources: NDArray[np.int32] | None = None
    """[sequences]: the argument that each came from, where packs are homogeneous; None: they are mixed."""
    is_pictured: bool = False
    """Whether some sequence has images."""
    times: NDArray[np.int32] | None = None
    """[records]: how often each is packed, 0 where a mix did not draw it; None: once."""
    fragments: Fragments | None = None
    """What the plan's strategy cut; None: nothing. `elements` are then those of what was cut."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def only_starts_masked(self) -> bool:
        return self.trained == self.tokens - len(self.lengths)


class Account:
    """What became of the records, counted over pieces of a table."""

    def __init__(self, sources: int) -> None:
        self.by_source, self.dropped_by_source, self.tokens_by_source = (
            np.zeros(sources, dtype=np.int64) for _ in range(3)
        )
        self.trained = self.empty_replies = 0
        self.status, self.dropped, self.cut = (np.zeros(256, dtype=np.int64) for _ in range(3))

    def add(
        self, lines: NDArray[np.void] | Mapping[str, NDArray[Any]], source: int | NDArray[np.int32]
    ) -> None:
        """Count some lines (of type LINE, or its columns), all of one source or each of its own."""
        self.trained += int(lines["targets"].sum(dtype=np.int64))
        is_first = lines["part"] == 0
        is_every = bool(is_first.all())
        asked = ("status", "reason", "cut", "length", "empty_reply")
        first = {name: lines[name] if is_every else lines[name][is_first] for name in asked}
        gone = first["status"] == DROPPED
        if isinstance(source, np.ndarray) and len(source) and not (source != source[0]).any():
            source = int(source[0])  # nearly always, and counting by it takes as long as all the rest
        if isinstance(source, np.ndarray):
            sources = len(self.by_source)
            of = source if is_every else source[is_first]
            self.by_source += np.bincount(of, minlength=sources)
            self.dropped_by_source += np.bincount(of[gone], minlength=sources)
            tokens = np.bincount(source, weights=lines["length"], minlength=sources)  # exact below 2^53
            self.tokens_by_source += tokens.astype(np.int64)
        else:
            self.by_source[source] += len(gone)
            self.dropped_by_source[source] += np.count_nonzero(gone)
            self.tokens_by_source[source] += lines["length"].sum(dtype=np.int64)
        self.empty_replies += int((first["empty_reply"] & (first["length"] > 0)).sum())
        self.status += np.bincount(first["status"], minlength=256)
        self.dropped += np.bincount(first["reason"][gone], minlength=256)
        self.cut += np.bincount(first["reason"], weights=first["cut"], minlength=256).astype("i8")

    def enter(self, here: SplitLines) -> None:
        """Put the counts into a split's account."""
        whole, truncated, fragments, gone = (int(n) for n in self.status[: len(STATUSES)])
        here.trained, here.empty_replies = self.trained, self.empty_replies
        here.records_by_source = self.by_source.tolist()
        counts = np.stack([self.by_source, self.dropped_by_source, self.tokens_by_source], axis=1)
        here.by_source = [
            dict(zip(("records", "dropped", "tokens"), n, strict=True)) for n in counts.tolist()
        ]
        here.records = {
            "in": whole + truncated + fragments + gone,
            "whole": whole,
            "truncated": truncated,
            "split": fragments,
            "dropped": gone,
        }
        here.dropped_by_reason = _named(self.dropped)
        here.cut_by_reason = _named(self.cut)


def collect(store: ChunkStore, splits: int, sources: int) -> list[SplitLines]:
    """Read all chunks' lines: the sequences and the account of each split.

    Twice, so that arrays have their size from the start: put together from those of all chunks, they would be
    in memory two times, and the small ones would leave holes there that stay.
    """
    element_at, sequences, lines_of = _first_elements(store, splits)
    found = []
    for count, total in zip(sequences.tolist(), lines_of.tolist(), strict=True):
        ids = None if count == total else np.empty(count, dtype=np.int64)
        found.append(SplitLines(np.empty(count, "i4"), np.empty(count, "i4"), ids, 0, 0, [0] * sources))
    continued: list[list[NDArray[np.int64]]] = [[] for _ in range(splits)]
    before = [0] * splits  # sequences in earlier chunks
    judged = [Judged() for _ in range(splits)]
    accounts = [Account(sources) for _ in range(splits)]
    base = 0
    for number in sorted(store.entries):
        entry = store.entries[number]
        lines = store.lines_of(entry)
        kept = lines["length"] > 0
        element = element_at[number] + np.cumsum(kept) - 1
        for split, here in enumerate(found):
            mine = lines["split"] == split if splits > 1 else np.ones(len(lines), dtype=np.bool_)
            about, packed = lines[mine], lines[mine & kept]
            new = slice(before[split], before[split] + len(packed))
            here.lengths[new] = packed["length"]
            here.elements[new] = element[mine & kept]
            if here.ids is not None:
                here.ids[new] = here.lines + np.flatnonzero(kept[mine])
            judged[split].add(packed, base)
            continued[split].append(new.start + np.flatnonzero(goes_on(packed)))
            before[split] = new.stop
            here.lines += len(about)
            here.is_pictured = here.is_pictured or bool(about["images"].any())
            accounts[split].add(about, entry.source)
        base += entry.records
    for split, here in enumerate(found):
        here.continued = np.concatenate([here.continued, *continued[split]])
        here.extras = judged[split].columns()
        if store.is_pictured:
            here.extras[IMAGES] = here.elements.copy()
        accounts[split].enter(here)
    return found


def _named(counts: NDArray[np.int64]) -> dict[str, int]:
    return {name: int(n) for name, n in zip(REASONS, counts, strict=False) if n}


def _first_elements(
    store: ChunkStore, splits: int
) -> tuple[dict[int, int], NDArray[np.int64], NDArray[np.int64]]:
    """chunk -> number of its first sequence's element; [splits] sequences and lines.

    Elements follow the token file, gaps included. Raises InputError where there are more than their type can
    number.
    """
    found: dict[int, int] = {}
    sequences, lines = np.zeros(splits, dtype=np.int64), np.zeros(splits, dtype=np.int64)
    element = position = 0
    is_pictured = store.is_pictured
    for entry in sorted(store.entries.values(), key=lambda e: (e.tokens_at, e.chunk)):
        found[entry.chunk] = element
        about = store.lines_of(entry)
        lines += np.bincount(about["split"], minlength=splits)
        if not entry.tokens:  # it lies where another begins, which may have come before it here
            continue
        if entry.tokens_at > position or is_pictured:
            element += 1  # what an interrupted run left behind, or what is told of images
            found[entry.chunk] = element
        kept = about["length"] > 0
        element += int(kept.sum())
        sequences += np.bincount(about["split"][kept], minlength=splits)
        position = entry.tokens_at + entry.tokens
    if element > MOST_SEQUENCES:
        raise InputError(
            f"these sources give {element:,} sequences, and a folder holds {MOST_SEQUENCES:,}: build several "
            "folders from a part of the sources each"
        )
    return found, sequences, lines
