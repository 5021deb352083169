"""Whether packs keep what the manifest says they were planned under: sequences a pack, groups, one source.

Lengths are looked at where the packs are (packer/verify.py). What a manifest does not name binds nothing.
"""

from __future__ import annotations

import numpy as np

from padless.runtime.format import FormatError
from padless.runtime.reader import Array, PackedReader


def keeps_constraints(
    reader: PackedReader,
    table: dict[str, Array],
    pack: Array,
    *,
    cap: int | None = None,
    lines: Array | None = None,
) -> str:
    """What holds, in words; `pack` [lines of the table]: each sequence's, -1 where it is in none.

    `cap` and `lines`: of a plan, whose `pack` is [entries] and which may have a line twice.
    Raises FormatError for what does not hold.
    """
    options = reader.manifest.options
    kept: list[str] = []
    packed = np.flatnonzero(pack >= 0)
    pack = pack[packed]
    packed = packed if lines is None else lines[packed]
    most = int(np.bincount(pack).max(initial=0)) if len(packed) else 0
    cap = cap or options.get("max_sequences_per_pack")
    if cap is not None:
        if not isinstance(cap, int):
            raise FormatError(f"max_sequences_per_pack is {cap!r}, which is no number")
        if most > cap:
            raise FormatError(f"a pack holds {most:,} sequences, max_sequences_per_pack is {cap:,}")
        kept.append(f"at most {most:,} sequences a pack")
    name = options.get("grouped_by")
    if name is not None:
        numbered = [
            c.name for c in reader.manifest.columns if c.level == "sequence" and c.type == "list<int64>"
        ]
        if name not in numbered:
            raise FormatError(f"packs are grouped by {name!r}, and there is no such column of numbers")
        group = np.full(len(table["pack"]), -1, dtype=np.int64)
        for batch in reader.batches():
            group[batch.flat("sequence_ids")] = batch.flat(name)
        bound = group[packed] >= 0
        groups = _pairs(group[packed[bound]], pack[bound])
        torn = len(groups) - len(np.unique(groups[:, 0]))
        if torn:
            raise FormatError(f"sequences of one {name} are in different packs ({torn:,} such)")
        kept.append(f"{len(groups):,} groups by {name} share packs")
    if options.get("homogeneous"):
        arguments = options.get("source_arguments")
        sources = len(reader.manifest.sources)
        if not (
            isinstance(arguments, list)
            and len(arguments) == sources
            and all(isinstance(number, int) and 0 <= number < sources for number in arguments)
        ):
            raise FormatError(
                f"source_arguments are {arguments!r}, not a number for each of {sources} sources"
            )
        source = np.asarray(arguments, dtype=np.int64)[table["source"][packed]]
        found = _pairs(pack, source)
        several = len(found) - len(np.unique(found[:, 0]))
        if several:
            raise FormatError(
                f"{several:,} packs hold more than one source, and the manifest says homogeneous"
            )
        kept.append("one source a pack")
    return "; ".join(kept) or "none"


def _pairs(first: Array, second: Array) -> Array:
    """The different pairs, [pairs, 2]."""
    found: Array = np.unique(np.stack([first, second], axis=1).astype(np.int64), axis=0)
    return found
