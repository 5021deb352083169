"""From finished chunks to what planning needs (lengths alone), and to the sequence table.

Lines stay on disk and pass by twice, chunk after chunk: once for lengths and counts, once, with every
sequence's place in the plan, into Parquet. In memory are some 20 bytes a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padless.packer.copies import goes_on
from padless.packer.durable import DurableFile
from padless.packer.errors import InputError
from padless.packer.extra_columns import Judged
from padless.packer.fragments import Fragments, lines_of_split
from padless.packer.gather import WEIGHT, StoreGather
from padless.packer.lines import DROPPED, REASONS, STATUSES, WHOLE
from padless.packer.plan import PackPlan, blocks, pack_tokens
from padless.packer.token_store import ChunkStore
from padless.runtime.format import IMAGES, ColumnInfo, TableInfo, sequence_table_schema

if TYPE_CHECKING:
    import pyarrow as pa

LINES_PER_FILE = 50_000_000
LINES_PER_GROUP = 2**16
MOST_SEQUENCES = 2**31 - 2**20
"""Their numbers have 32 bits while a folder is written; gaps in the store take numbers too."""
_ENCODING: dict[str, Any] = {
    "use_dictionary": ["source", "part", "status", "reason", "start", "cut"],
    "column_encoding": {
        name: "DELTA_BINARY_PACKED" for name in ("record", "row", "length", "num_targets", "pack", "offset")
    },
}
"""Numbers that hardly repeat go as differences: a third of the size, written in half of the time."""


class Piece(NamedTuple):
    """Some lines of a sequence table, in its order; all arrays are as long."""

    record: NDArray[np.int64]
    row: NDArray[np.int64]
    source: NDArray[np.int32]
    lines: NDArray[np.void]
    """Of type LINE; its own `record` is not looked at."""


@dataclass
class SplitLines:
    """One split's sequences, in the order of their lines, and its account."""

    lengths: NDArray[np.int32]
    elements: NDArray[np.int32]
    """[sequences]: each one's element of the token store."""
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

    def add(self, lines: NDArray[np.void], source: int | NDArray[np.int32]) -> None:
        """Count some lines (of type LINE), all of one source or each of its own."""
        self.trained += int(lines["targets"].sum(dtype=np.int64))
        is_first = lines["part"] == 0
        first = lines[is_first]
        of = source[is_first] if isinstance(source, np.ndarray) else np.full(len(first), source)
        sources = len(self.by_source)
        self.by_source += np.bincount(of, minlength=sources)
        if isinstance(source, np.ndarray):
            tokens = np.bincount(source, weights=lines["length"], minlength=sources)  # exact below 2^53
            self.tokens_by_source += tokens.astype(np.int64)
        else:
            self.tokens_by_source[source] += lines["length"].sum(dtype=np.int64)
        self.empty_replies += int((first["empty_reply"] & (first["length"] > 0)).sum())
        gone = first["status"] == DROPPED
        self.dropped_by_source += np.bincount(of[gone], minlength=sources)
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
    """Read all chunks' lines once: the sequences and the account of each split."""
    element_at = _first_elements(store)
    lengths: list[list[NDArray[np.int32]]] = [[] for _ in range(splits)]
    elements: list[list[NDArray[np.int32]]] = [[] for _ in range(splits)]
    ids: list[list[NDArray[np.int64]]] = [[] for _ in range(splits)]
    continued: list[list[NDArray[np.int64]]] = [[] for _ in range(splits)]
    before = [0] * splits  # sequences in earlier chunks
    found = [
        SplitLines(np.zeros(0, "i4"), np.zeros(0, "i4"), None, 0, 0, [0] * sources) for _ in range(splits)
    ]
    judged = [Judged() for _ in range(splits)]
    accounts = [Account(sources) for _ in range(splits)]
    base = 0
    for number in sorted(store.entries):
        entry = store.entries[number]
        lines = store.lines_of(entry)
        kept = lines["length"] > 0
        element = element_at[number] + np.cumsum(kept) - 1
        for split in range(splits):
            mine = lines["split"] == split if splits > 1 else np.ones(len(lines), dtype=np.bool_)
            about, here = lines[mine], found[split]
            sequences = mine & kept
            lengths[split].append(lines["length"][sequences])
            judged[split].add(lines[sequences], base)
            elements[split].append(element[sequences].astype(np.int32))
            continued[split].append(before[split] + np.flatnonzero(goes_on(lines[sequences])))
            before[split] += len(lengths[split][-1])
            if len(lines) and not kept[mine].all() or ids[split]:
                if not ids[split]:  # until here every line was a sequence
                    ids[split].append(np.arange(here.lines))
                ids[split].append(here.lines + np.flatnonzero(kept[mine]))
            here.lines += len(about)
            here.is_pictured = here.is_pictured or bool(about["images"].any())
            accounts[split].add(about, entry.source)
        base += entry.records
    for split, here in enumerate(found):
        here.lengths = np.concatenate([here.lengths, *lengths[split]])
        lengths[split].clear()
        here.elements = np.concatenate([here.elements, *elements[split]])
        elements[split].clear()
        if ids[split]:
            here.ids = np.concatenate(ids[split])
        here.continued = np.concatenate([here.continued, *continued[split]])
        here.extras = judged[split].columns()
        if store.is_pictured:
            here.extras[IMAGES] = here.elements.copy()
        accounts[split].enter(here)
    return found


def _named(counts: NDArray[np.int64]) -> dict[str, int]:
    return {name: int(n) for name, n in zip(REASONS, counts, strict=False) if n}


def _first_elements(store: ChunkStore) -> dict[int, int]:
    """chunk -> number of its first sequence's element; elements follow the token file, gaps included.

    Raises InputError where there are more than their type can number.
    """
    found: dict[int, int] = {}
    element = position = 0
    is_pictured = store.is_pictured
    for entry in sorted(store.entries.values(), key=lambda e: (e.tokens_at, e.chunk)):
        if entry.tokens and (entry.tokens_at > position or is_pictured):
            element += 1  # what an interrupted run left behind, or what is told of images
        found[entry.chunk] = element
        element += int((store.lines_of(entry)["length"] > 0).sum())
        position = entry.tokens_at + entry.tokens
    if element > MOST_SEQUENCES:
        raise InputError(
            f"these sources give {element:,} sequences, and a folder holds {MOST_SEQUENCES:,}: build several "
            "folders from a part of the sources each"
        )
    return found


def lay_elements(store: ChunkStore) -> tuple[pa.Array, pa.Array | None]:
    """The token file, and that of the weights where there is one, as binary arrays, an element a sequence."""
    import pyarrow as pa

    # Of each chunk at most a gap before it and its sequences: filled in place, it is the largest array here.
    offsets = np.zeros(1 + sum(1 + entry.lines for entry in store.entries.values()), dtype=np.int64)
    position, filled, is_pictured = 0, 1, store.is_pictured
    for entry in sorted(store.entries.values(), key=lambda e: (e.tokens_at, e.chunk)):
        if not entry.tokens:
            continue
        if entry.tokens_at > position or is_pictured:
            offsets[filled] = entry.tokens_at * 4
            filled += 1
        lengths = store.lines_of(entry)["length"]
        lengths = lengths[lengths > 0]
        ends = offsets[filled : filled + len(lengths)]
        np.cumsum(lengths, out=ends)
        ends += entry.tokens_at
        ends *= 4
        filled += len(lengths)
        position = entry.tokens_at + entry.tokens
    offsets = offsets[:filled]
    mapped = store.map_tokens()
    data = pa.py_buffer(mapped) if mapped is not None else pa.py_buffer(b"")

    def laid(data: pa.Buffer, size: int) -> pa.Array:
        ends = pa.py_buffer(offsets if size == 4 else offsets // 4 * size)
        return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, ends, data])

    beside = laid(pa.py_buffer(store.map_weights()), store.weight_bytes) if store.is_weighted else None
    return laid(data, 4), beside


def lay_images(store: ChunkStore) -> pa.Array | None:
    """What is told of the images of each sequence, in elements like those of the tokens; None: of none."""
    import pyarrow as pa

    mapped = store.map_tokens()
    if mapped is None or not store.is_pictured:
        return None
    pieces: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    for entry in sorted(store.entries.values(), key=lambda e: (e.tokens_at, e.chunk)):
        if entry.tokens:
            lines = store.lines_of(entry)
            sizes = lines["images"][lines["length"] > 0]
            pieces.append((entry.tokens_at + entry.tokens) * 4 + np.cumsum([0, *sizes], dtype=np.int64))
    offsets = np.concatenate(pieces)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(mapped)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def gather_of(
    binary: pa.Array,
    weights: pa.Array | None,
    lines: SplitLines,
    let_go: Callable[[], None] = lambda: None,
    images: pa.Array | None = None,
) -> StoreGather:
    """A split's sequences over what `lay_elements` gave; `let_go` and `images` as of `StoreGather`."""
    if lines.fragments is None:
        return StoreGather(
            binary,
            lines.elements,
            lines.lengths,
            lines.ids,
            weights,
            lines.extras,
            kind=lines.kind,
            images=images,
            let_go=let_go,
        )
    import pyarrow as pa

    _, offsets, data = binary.buffers()
    begins = np.frombuffer(offsets, dtype=np.int64)[lines.elements] + 4 * lines.fragments.starts.astype("i8")
    ends = begins + 4 * lines.lengths.astype(np.int64)
    if lines.times is None:
        edges = np.union1d(begins, ends)
        elements = np.searchsorted(edges, begins).astype(np.int32)
    else:  # copies are cut at different tokens, so each fragment has its own two edges
        edges = np.append(np.stack([begins, ends], axis=1).reshape(-1), ends.max())
        elements = np.arange(0, 2 * len(begins), 2, dtype=np.int32)
    fragments = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), data])
    if weights is not None:  # laid like the tokens, in a file of their own
        buffers = [None, pa.py_buffer(edges // 4 * lines.kind.itemsize), weights.buffers()[2]]
        weights = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
    return StoreGather(
        fragments, elements, lines.lengths, lines.ids, weights, kind=lines.kind, cut=True, let_go=let_go
    )


class Places:
    """Where each sequence stands: its pack, and its first token within the pack."""

    def __init__(self, plan: PackPlan, lengths: NDArray[np.int32]) -> None:
        self.pack = np.empty(len(lengths), dtype=np.int32)
        # Below the longest pack: two bytes do for most lengths of packs.
        is_short = int(pack_tokens(plan, lengths).max(initial=0)) <= 2**16
        self.offset = np.empty(len(lengths), dtype=np.uint16 if is_short else np.int32)
        for here, entries in blocks(plan.offsets):
            offsets = plan.offsets[here.start : here.stop + 1]
            sequences = plan.order[entries]
            per_pack = np.diff(offsets)
            packs = np.arange(here.start, here.stop, dtype=np.int32)
            self.pack[sequences] = np.repeat(packs, per_pack)
            taken = lengths[sequences]
            starts = np.cumsum(taken, dtype=np.int64) - taken
            self.offset[sequences] = starts - np.repeat(starts[offsets[:-1] - offsets[0]], per_pack)


def write_table(folder: str, pieces: Iterator[Piece], total: int, places: Places) -> tuple[TableInfo, ...]:
    """Write the sequence table of a split, `total` lines in pieces of any size.

    One file, or several above 50 M lines.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = sequence_table_schema()
    columns = _columns(pieces, places)
    infos: list[TableInfo] = []
    files = -(-total // LINES_PER_FILE)
    for number in range(max(files, 1)):
        name = "sequences.parquet" if files <= 1 else f"sequences-{number:05d}.parquet"
        left = min(LINES_PER_FILE, total - number * LINES_PER_FILE)
        lines = left
        with DurableFile(folder, name) as file:
            with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema, **_ENCODING) as writer:
                while left > 0:
                    piece = next(columns)
                    writer.write_batch(pa.RecordBatch.from_arrays(piece, schema=schema))
                    left -= len(piece[0])
            info = file.commit(lambda checksum, name=name: name)  # type: ignore[misc]
        infos.append(TableInfo(file=info.file, lines=lines, bytes=info.bytes, checksum=info.checksum))
    return tuple(infos)


def _columns(pieces: Iterator[Piece], places: Places) -> Iterator[list[pa.Array]]:
    """The table's columns, a group of lines at a time; groups never cross LINES_PER_FILE."""
    statuses, reasons = strings(STATUSES), strings(REASONS)
    held: list[NDArray[np.void]] = []
    facts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]] = []
    sequence = written = 0

    def emit() -> list[pa.Array]:
        nonlocal sequence, written
        lines = np.concatenate(held)
        record, row, source = (np.concatenate(column) for column in zip(*facts, strict=True))
        held.clear()
        facts.clear()
        kept = lines["length"] > 0
        count = int(kept.sum())
        pack = np.zeros(len(lines), dtype=np.int64)
        offset = np.zeros(len(lines), dtype=np.int32)
        pack[kept] = places.pack[sequence : sequence + count]
        offset[kept] = places.offset[sequence : sequence + count]
        sequence += count
        written += len(lines)
        return [
            _array(record),
            _array(source),
            _array(row),
            _array(lines["part"]),
            statuses.take(_array(lines["status"])),
            reasons.take(_array(lines["reason"], lines["status"] != WHOLE)),
            _array(lines["start"]),
            _array(lines["length"]),
            _array(lines["targets"]),
            _array(lines["cut"]),
            _array(pack, kept),
            _array(offset, kept),
        ]

    waiting = 0
    for whole in pieces:
        start = 0
        while start < len(whole.lines):
            room = min(LINES_PER_GROUP, LINES_PER_FILE - written % LINES_PER_FILE) - waiting
            part = slice(start, start + room)
            piece = whole.lines[part]
            start += len(piece)
            waiting += len(piece)
            held.append(piece)
            facts.append((whole.record[part], whole.row[part], whole.source[part]))
            if waiting == min(LINES_PER_GROUP, LINES_PER_FILE - written % LINES_PER_FILE):
                yield emit()
                waiting = 0
    if held:
        yield emit()


def pieces_of(store: ChunkStore, split: int, splits: int, about: SplitLines) -> Iterator[Piece]:
    """The lines of split number `split` of `splits` as they are packed, chunk after chunk."""
    base = 0
    bases: dict[int, int] = {}
    for entry, lines in lines_of_split(store, split, splits, about.times, about.fragments):
        row = bases.get(entry.source, 0)
        records = lines["record"].astype(np.int64)
        yield Piece(base + records, row + records, np.full(len(lines), entry.source, dtype=np.int32), lines)
        base += entry.records
        bases[entry.source] = row + entry.records


def _array(values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    mask = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [mask, pa.py_buffer(values)])


def strings(words: tuple[str, ...]) -> pa.Array:
    """Words as an Arrow array (`pa.array` would import pandas where that is installed)."""
    import pyarrow as pa

    ends = np.cumsum([0, *(len(word) for word in words)], dtype=np.int32)
    data = "".join(words).encode("ascii")
    return pa.StringArray.from_buffers(len(words), pa.py_buffer(ends), pa.py_buffer(data))
