"""Which pack holds something: a sequence by its id, a row of a source, or words.

Ids and rows stand in the sequence table. Words are looked for in the decoded sequences, pack after pack until
one has them, which for words that are nowhere decodes everything (some million tokens a second).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from padless.packer.errors import InputError
from padless.packer.inspect import folder_tokenizer
from padless.packer.progress import Report, part_of
from padless.runtime.reader import PackedReader


def find_pack(
    path: str | Path,
    *,
    sequence: int | None = None,
    row: int | None = None,
    source: str | None = None,
    text: str | None = None,
    first: int = 0,
    split: str | None = None,
    plan: str | None = None,
    progress: Report | None = None,
) -> int:
    """The number of the pack with that sequence, that row (from 0) of `source`, or those words.

    `source` may be the end of a source's path and is needed where there are several; words are looked for
    from pack `first` (negative: from the end) on. Raises InputError where there is nothing of the kind, or
    it is in no pack.
    """
    reader = PackedReader(path, split=split, plan=plan)
    if sum(given is not None for given in (sequence, row, text)) != 1:
        raise InputError("give one of --sequence, --row and --text")
    if text is not None:
        if first < -len(reader):
            raise InputError(f"there is no pack {first}: {reader.location} has {len(reader)} of them")
        first += len(reader) if first < 0 else 0
        return _with_words(reader, text, first, part_of(progress, "packs", len(reader) - first))
    if row is not None:
        sequence = _sequence_of(reader, row, source)
    assert sequence is not None
    lines = sum(info.lines for info in reader.manifest.sequence_tables)
    if not 0 <= sequence < lines:
        raise InputError(f"there is no sequence {sequence}: {reader.location} has 0 to {lines - 1}")
    if reader.plan is not None:
        place = np.flatnonzero(reader.plan.sequences == sequence)
        found = int(np.searchsorted(reader.plan.offsets, place[0], side="right")) - 1 if len(place) else -1
    else:
        found = int(reader.sequence_columns("pack")["pack"][sequence])
    if found < 0:
        line = {
            name: column[sequence] for name, column in reader.sequence_columns("status", "reason").items()
        }
        raise InputError(
            f"sequence {sequence} is in no pack: its record was {line['status']} ({line['reason']})"
        )
    return found


def _sequence_of(reader: PackedReader, row: int, source: str | None) -> int:
    """The first sequence of a row."""
    names = [info.path for info in reader.manifest.sources]
    numbers = [number for number, name in enumerate(names) if source is None or name.endswith(source)]
    if len(numbers) != 1:
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        if source is None:
            which = f"there are {len(numbers)} sources with a row {row}:"
        else:
            which = f"{len(numbers) or 'no'} sources end in {source!r}:"
        raise InputError(f"{which} give --source with the end of one of: {listed}")
    table = reader.sequence_columns("source", "row")
    found = np.flatnonzero((table["source"] == numbers[0]) & (table["row"] == row))
    if not len(found):
        last = int(table["row"][table["source"] == numbers[0]].max(initial=-1))
        raise InputError(f"{names[numbers[0]]} has no row {row} here: rows count from 0, to {last}")
    return int(found[0])


def _with_words(reader: PackedReader, words: str, first: int, searched: Callable[[float], None]) -> int:
    tokenizer = folder_tokenizer(reader)
    if tokenizer is None:
        raise InputError(
            f"{reader.location} has no tokenizer, so its packs have no text; give --sequence or --row"
        )
    if not words:
        raise InputError("--text is empty; give the words to look for")
    for number in range(first, len(reader)):
        pack = reader[number]
        ends = np.cumsum(pack.seq_lengths).tolist()
        ids = pack.input_ids.tolist()
        sequences = [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        if any(words in decoded for decoded in tokenizer.decode_batch(sequences, skip_special_tokens=False)):
            return number
        searched(1)
    since = f" from {first} on" if first else ""
    raise InputError(
        f"{words!r} is in no pack{since}: words are looked for as they are written, within a sequence"
    )
