"""Records of a source drawn at random, each with the same chance, without reading all of a large source.

    |-- block --|-- block --|-- block --|      a record belongs to the block in which it begins
      {...}\n{..}\n{....}\n{..}\n{...}

Lines, texts and JSON arrays: some blocks of bytes, by seeking; taking all records that begin in a block (and
not those that a place hits) gives long and short ones the same chance. Parquet and Arrow: some row groups or
record batches. What can only be read from its start (compressed files, CSV, arrays whose elements begin in
different ways) is passed through once and blocks are kept by reservoir sampling (Vitter 1985), up to half a
gibibyte. Of the records in all blocks as many as are wanted are drawn. A source on the Hub gives its first
records, since a draw would fetch most of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padless.packer.errors import CutError
from padless.packer.progress import Report, part_of
from padless.packer.sources import Chunk, SourceFile, read_chunk, walk
from padless.packer.sources.groups import groups_of, rows_of_group
from padless.packer.sources.sought import SoughtFile, UnseekableError
from padless.runtime.storage import is_url

SEEK_FROM = 32 * 2**20
"""Sources of fewer bytes are passed through: their blocks are all kept."""
BLOCK_BYTES = (64 * 2**10, 512 * 2**10)
"""Of a block; the larger where records are so long that few begin in the smaller ones."""
BLOCKS = 512
PASSED_BYTES = 512 * 2**20
"""Decompressed; a pass ends there."""
_GROUP_FILES, _GROUPS, _GROUP_BYTES = 64, 8, 256 * 2**20
"""Of so many files: at least so many row groups, more up to so many bytes."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Records drawn from one source, and what they stand for."""

    rows: list[Any]
    """As the source's reader gives them, in the order of the source."""
    block_of: list[int]
    """For each row the block it was drawn from: 0, 1, ... of `blocks`."""
    folder_of: list[str]
    """For each row the folder or URL in which its file lies."""
    blocks: int
    is_stratified: bool
    """Whether every block of the source was drawn from, so that only the records are a matter of chance."""
    records: float
    """Records in the source, about; exact where all are here."""
    how: str
    """all, random, part (random, from what a pass has read) or first."""


def draw(
    files: Sequence[SourceFile],
    wanted: int,
    generator: np.random.Generator,
    *,
    text_by: str = "line",
    progress: Report | None = None,
) -> Sample:
    """`wanted` records of a source's `files`, all where it has no more.

    Raises what reading the source raises; of a large one only what was read is checked.
    """
    files = list(files)
    if any(is_url(file.path) for file in files):
        return _first(files, wanted, text_by)
    if sum(file.size for file in files) >= SEEK_FROM:
        try:
            if all(file.kind == "parquet" for file in files):
                return _by_groups(files, wanted, generator)
            if all(file.kind in ("json", "text") and not file.compression for file in files):
                return _by_seeking(files, wanted, generator, text_by)
        except (UnseekableError, CutError):
            pass
    return _by_pass(files, wanted, generator, text_by, progress)


def _some(
    blocks: list[list[Any]],
    paths: list[str],
    wanted: int,
    generator: np.random.Generator,
    of_blocks: int,
    how: str = "random",
) -> Sample:
    """`wanted` of the rows of `blocks`, which are that many of `of_blocks`; `paths`: the blocks' files."""
    rows = [row for block in blocks for row in block]
    block_of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    is_whole = len(blocks) == of_blocks and how == "random"
    chosen = np.arange(len(rows))
    if len(rows) > wanted:
        chosen = np.sort(generator.choice(len(rows), wanted, replace=False))
    block_of = block_of[chosen]
    folders = [os.path.dirname(path) for path in paths]
    return Sample(
        rows=[rows[at] for at in chosen.tolist()],
        block_of=block_of.tolist(),
        folder_of=[folders[block] for block in block_of.tolist()],
        blocks=len(blocks),
        is_stratified=len(blocks) == of_blocks,
        records=len(rows) * of_blocks / max(1, len(blocks)),
        how="all" if is_whole and len(chosen) == len(rows) else how,
    )


def _by_pass(
    files: list[SourceFile],
    wanted: int,
    generator: np.random.Generator,
    text_by: str,
    progress: Report | None,
) -> Sample:
    size = sum(file.size for file in files)
    if size > PASSED_BYTES:  # so that what is passed through is no head of the list
        files = [files[at] for at in generator.permutation(len(files)).tolist()]
    is_compressed = any(file.compression for file in files)
    read = part_of(progress, "sample", PASSED_BYTES if is_compressed else min(size, PASSED_BYTES))
    kept: list[Chunk] = []
    seen = passed = 0
    for chunk in walk(files, chunk_bytes=BLOCK_BYTES[0], text_by=text_by):
        seen += 1
        if len(kept) < BLOCKS:
            kept.append(chunk)
        elif (at := int(generator.integers(seen))) < BLOCKS:
            kept[at] = chunk
        passed += _bytes_of(chunk)
        read(_bytes_of(chunk))
        if passed > PASSED_BYTES:
            break
    kept.sort(key=lambda chunk: chunk.index)
    blocks = [read_chunk(chunk).rows for chunk in kept]
    paths = [chunk.path for chunk in kept]
    if passed <= PASSED_BYTES:
        return _some(blocks, paths, wanted, generator, seen)
    # Of a compressed file more lies behind than its bytes tell; nobody knows before it is read.
    whole = round(seen * max(1.0, size / passed))
    return _some(blocks, paths, wanted, generator, whole, "part")


def _first(files: list[SourceFile], wanted: int, text_by: str) -> Sample:
    rows: list[Any] = []
    folders: list[str] = []
    passed, ended = 0, True
    for chunk in walk(files, chunk_bytes=BLOCK_BYTES[0], text_by=text_by):
        rows += read_chunk(chunk).rows
        folders += [os.path.dirname(chunk.path)] * (len(rows) - len(folders))
        passed += _bytes_of(chunk)
        if len(rows) > wanted:
            ended = False
            break
    more = 1.0 if ended else max(1.0, sum(file.size for file in files) / max(1, passed))
    rows = rows[:wanted]
    return Sample(
        rows=rows,
        block_of=[0] * len(rows),
        folder_of=folders[:wanted],
        blocks=1,
        is_stratified=True,
        records=len(rows) * more,
        how="all" if ended else "first",
    )


def _bytes_of(chunk: Chunk) -> int:
    return len(chunk.payload) if chunk.payload is not None else chunk.stop - chunk.start


def _by_groups(files: list[SourceFile], wanted: int, generator: np.random.Generator) -> Sample:
    """Row groups and record batches; within each the records that are wanted."""
    taken = files
    if len(files) > _GROUP_FILES:
        chosen = np.sort(generator.choice(len(files), _GROUP_FILES, replace=False))
        taken = [files[at] for at in chosen.tolist()]
    groups = [group for file in taken for group in groups_of(file.path)]
    of_groups = round(len(groups) * len(files) / len(taken))
    of_rows = sum(group.rows for group in groups) * len(files) / len(taken)
    picked: list[int] = []
    size = 0
    for at in generator.permutation(len(groups)).tolist():
        if len(picked) >= _GROUPS and size + groups[at].bytes > _GROUP_BYTES:
            break
        picked.append(at)
        size += groups[at].bytes
    groups = [groups[at] for at in sorted(picked)]
    count = sum(group.rows for group in groups)
    places = np.arange(count)
    if count > wanted:
        places = np.sort(generator.choice(count, wanted, replace=False))
    ends = np.cumsum([group.rows for group in groups])
    blocks = [
        rows_of_group(group, mine - (end - group.rows))
        for group, end in zip(groups, ends.tolist(), strict=True)
        for mine in [places[(places >= end - group.rows) & (places < end)]]
    ]
    found = _some(blocks, [group.path for group in groups], 2**62, generator, of_groups)
    if not found.rows:
        raise UnseekableError
    # A row may hold several records, as NeMo's do.
    records = of_rows * len(found.rows) / len(places)
    how = "all" if len(places) == of_rows else "random"
    return replace(found, records=records, how=how)


def _by_seeking(files: list[SourceFile], wanted: int, generator: np.random.Generator, text_by: str) -> Sample:
    if text_by == "file" and any(file.kind == "text" for file in files):
        raise UnseekableError
    for size in BLOCK_BYTES:
        counts = np.array([-(-file.size // size) for file in files])
        ends = np.cumsum(counts)
        of_blocks = int(ends[-1])
        numbers = np.sort(generator.choice(of_blocks, min(BLOCKS, of_blocks), replace=False))
        of_file = np.searchsorted(ends, numbers, side="right")
        blocks: list[list[Any]] = []
        paths = [files[number].path for number in of_file.tolist()]
        for number in np.unique(of_file).tolist():
            mine = numbers[of_file == number] - (ends[number] - counts[number])
            with SoughtFile(files[number], text_by) as source:
                blocks += [source.records(at * size, (at + 1) * size) for at in mine.tolist()]
        if sum(map(len, blocks)) >= wanted or len(blocks) == of_blocks:
            break
    if not any(blocks):
        raise UnseekableError
    return _some(blocks, paths, wanted, generator, of_blocks)
