"""Further plans over the sequences of a folder: other packs, gathered as they are asked for.

A plan file names sequences; where their tokens lie says the sequence table. A pack is put together from
slices of stored packs, so it costs a copy, and reads from as many places as it has sequences. Nothing but
the plan and 12 bytes a sequence is held. A plan is read from its file, or made anew for an epoch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from padless.runtime.arrays import Array, column_to_numpy, to_numpy
from padless.runtime.batch import Pack
from padless.runtime.buckets import Bucket, buckets_of
from padless.runtime.errors import MissingFileError, PlanError
from padless.runtime.format import IGNORE_INDEX, Manifest, checksum_bytes
from padless.runtime.storage import Storage

LOSS_WEIGHT = "loss_weight"
"""The extra column that says 0 where no token is trained, as labels do."""
_SHARES_PACKS = {"pair_id": "pairs", "group_id": "groups of rollouts"}
"""Columns whose sequences of one value share a pack."""
PLAN_METADATA = b"padless"
"""The key of a plan file's own metadata: a JSON object."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Pack p holds `sequences[offsets[p]:offsets[p + 1]]` in that order, whole or in parts."""

    name: str
    sequences: Array
    """[entries] int64, lines of the sequence table."""
    offsets: Array
    """[packs + 1] int64."""
    facts: dict[str, Any]
    """max_length, strategy, constraints, seed, epoch, sequence_table and plan_hash."""
    starts: Array | None = None
    """[entries] int32, the first token of each within its sequence; None: all are whole."""
    lengths: Array | None = None
    """[entries] int32, tokens of each; None exactly where `starts` is."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The packs of each length, as they stand: the shortest first; one bucket where all are of one."""
        return buckets_of(self.facts, len(self))


def tables_hash(manifest: Manifest) -> str:
    """Names the folder's sequence table: a checksum over those of its parts."""
    return checksum_bytes("\n".join(table.checksum for table in manifest.sequence_tables).encode())


def plan_names(folder: Path) -> list[str]:
    """The plans that lie in a folder."""
    return sorted(path.stem for path in folder.glob("plans/*.parquet"))


def columns_hash(
    sequences: Array, offsets: Array, starts: Array | None = None, lengths: Array | None = None
) -> str:
    """Names which sequences, or which parts of them, are in which pack, in which order."""
    columns = [column for column in (sequences, offsets, starts, lengths) if column is not None]
    return checksum_bytes(b"".join(column.astype("<i8").tobytes() for column in columns))


def read_plan(folder: Path, manifest: Manifest, name: str) -> Plan:
    """The plan of that name, checked against the folder.

    Raises PlanError where there is none, it belongs to other sequences, or it is damaged.
    """
    path = folder / "plans" / f"{name}.parquet"
    if name not in plan_names(folder):
        raise PlanError(no_plan(str(folder), name, ", ".join(plan_names(folder)) or "none"))
    way_out = f"make it again: pack-dataset repack {folder} --plan-only {name} --force"
    return _checked(path, str(path), manifest, name, way_out)


def remote_plan(storage: Storage, manifest: Manifest, name: str) -> Plan:
    """The plan of that name below a URL, whole in memory; raises as `read_plan` does, and RemoteError."""
    file = f"plans/{name}.parquet"
    try:
        if "/" in name:
            raise MissingFileError(name)
        data = storage.read(file)
    except MissingFileError:
        raise PlanError(no_plan(storage.url, name, "see plans/ below it")) from None
    way_out = f"copy the folder here, make it again (pack-dataset repack DIR --plan-only {name} --force), "
    way_out += "and put it there"
    return _checked(pa.BufferReader(data), storage.where(file), manifest, name, way_out)


def no_plan(folder: str, name: str, there: str) -> str:
    """What to say where there is no plan of that name."""
    return (
        f"{folder} has no plan {name!r} (plans there: {there}); leave "
        "plan out for the order the packs are stored in"
    )


def _checked(file: Any, path: str, manifest: Manifest, name: str, way_out: str) -> Plan:
    """The plan in a file, checked; raises PlanError, which calls the file by its `path`."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
        facts = json.loads((table.schema.metadata or {})[PLAN_METADATA])
        table.validate(full=True)
        sequences, offsets = _lists(table, "sequences")
        starts = lengths = None
        if any(table.column(key).null_count < len(table) for key in ("starts", "lengths")):
            (starts, ends), (lengths, others) = _lists(table, "starts"), _lists(table, "lengths")
            if not (np.array_equal(offsets, ends) and np.array_equal(offsets, others)):
                raise ValueError("starts or lengths are not one for each sequence")
            if len(starts) and (int(starts.min()) < 0 or int(lengths.min()) < 1):
                raise ValueError("a part begins before its sequence, or is empty")
    except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError) as problem:
        raise PlanError(f"{path} is no plan ({problem}); {way_out}") from None
    if facts.get("sequence_table") != tables_hash(manifest):
        raise PlanError(f"{path} was made over other sequences than this folder's; {way_out}")
    lines = sum(info.lines for info in manifest.sequence_tables)
    known = not len(sequences) or 0 <= int(sequences.min()) <= int(sequences.max()) < lines
    if (
        not known
        or (np.diff(offsets) < 1).any()
        or facts.get("plan_hash") != columns_hash(sequences, offsets, starts, lengths)
    ):
        raise PlanError(f"{path} is damaged: it is not what its hash says; {way_out}")
    plan = Plan(name=name, sequences=sequences, offsets=offsets, facts=facts, starts=starts, lengths=lengths)
    try:
        _ = plan.buckets
    except (ValueError, KeyError, TypeError) as problem:
        raise PlanError(f"{path} is damaged: its buckets are not its packs' ({problem}); {way_out}") from None
    return plan


def _lists(table: pa.Table, name: str) -> tuple[Array, Array]:
    """A list column's values and where each row begins among them, and the end; ValueError for nulls."""
    lists = table.column(name).combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks)
    if lists.null_count or lists.values.null_count:
        raise ValueError(f"{name} has nulls")
    offsets = to_numpy(lists.offsets).astype(np.int64)
    return to_numpy(lists.values)[offsets[0] : offsets[-1]], offsets - offsets[0]


def fresh_plan(manifest: Manifest, lengths: Array, strategy: str, *, seed: int, epoch: int) -> Plan:
    """The plan of an epoch: the folder's sequences packed anew, by a strategy's name, from (seed, epoch).

    `lengths` [lines of the sequence table], 0 where dropped. The folder's own length and constraints hold.
    Raises PlanError for a strategy that there is not or that cuts sequences, and where groups share packs.
    """
    # Planning belongs to the packer; only who replans needs it.
    from padless.packer.strategies import CUTS, STRATEGIES  # noqa: TID251
    from padless.packer.strategies.by_length import plan_lengths  # noqa: TID251

    names = [name for name in STRATEGIES if name not in CUTS]
    if strategy not in names:
        raise PlanError(f"replan is {strategy!r}; it is None or one of {', '.join(names)}")
    for grouped, what in _SHARES_PACKS.items():
        if any(column.name == grouped for column in manifest.columns):
            raise PlanError(
                f"replan would part the {what} of this folder (it has {grouped}): leave replan out"
            )
    lines = np.flatnonzero(lengths)
    options = manifest.options
    if options.get("homogeneous"):
        raise PlanError("replan would mix the sources of this folder (homogeneous): leave replan out")
    drawn = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    plan = plan_lengths(
        STRATEGIES[strategy],
        lengths[lines],
        [bucket.max_length for bucket in manifest.buckets],
        max_sequences_per_pack=options.get("max_sequences_per_pack"),
        align=options.get("align") or 1,
        packs_multiple=options.get("packs_multiple") or 1,
        plan_window=options.get("plan_window"),
        seed=int(drawn[0]),
    )
    sequences = lines[plan.order].astype(np.int64)
    facts = {"max_length": manifest.statistics["max_length"], "strategy": strategy, "seed": seed}
    facts |= {"epoch": epoch, "plan_hash": columns_hash(sequences, plan.offsets)}
    if plan.buckets is not None:
        facts["buckets"] = [{"max_length": length, "packs": packs} for length, packs in plan.buckets]
    return Plan(name=f"{strategy} of epoch {epoch}", sequences=sequences, offsets=plan.offsets, facts=facts)


class PlannedPacks:
    """The packs of a plan, out of stored ones."""

    def __init__(self, plan: Plan, table: pa.Table, stored: Callable[[int], Pack]) -> None:
        self.plan = plan
        self._pack = column_to_numpy(table.column("pack"))
        self._offset = column_to_numpy(table.column("offset")).astype(np.int32)
        self._stored = stored
        whole = column_to_numpy(table.column("length"))[plan.sequences]
        self.lengths: Array = whole if plan.lengths is None else plan.lengths
        """[entries] int32, tokens of each."""
        if plan.starts is not None and (plan.starts.astype(np.int64) + self.lengths > whole).any():
            raise PlanError(f"plan {plan.name!r} takes tokens beyond a sequence's end: make it again")
        if len(plan.sequences) and int(self._pack[plan.sequences].min()) < 0:
            raise PlanError(f"plan {plan.name!r} names a sequence that was dropped: make it again")

    def __getitem__(self, number: int) -> Pack:
        """Pack `number`, from 0; pack-level extras belong to stored packs and are left out."""
        entries = slice(int(self.plan.offsets[number]), int(self.plan.offsets[number + 1]))
        mine = self.plan.sequences[entries]
        stored = [self._stored(int(pack)) for pack in self._pack[mine]]
        begins = self._offset[mine]
        # Nothing predicts the first token of a later part.
        untrained = np.zeros(0, np.int64)
        lengths = self.lengths[entries]
        if self.plan.starts is not None:
            starts = self.plan.starts[entries]
            begins = begins + starts
            untrained = (np.cumsum(lengths) - lengths)[starts > 0]
        places = begins.tolist()
        ends = [start + length for start, length in zip(places, lengths.tolist(), strict=True)]
        for pack, start, end in zip(stored, places, ends, strict=True):
            if not 0 <= start < end <= pack.num_tokens:
                raise PlanError(
                    f"the sequence table has a sequence at tokens {start} to {end} of a pack of "
                    f"{pack.num_tokens}: it is damaged; copy the folder again"
                )
        slices = [slice(*place) for place in zip(places, ends, strict=True)]
        labels = np.concatenate([pack.labels[part] for pack, part in zip(stored, slices, strict=True)])
        labels[untrained] = IGNORE_INDEX
        labels.flags.writeable = False
        levels = {name: level for name, level in stored[0].extra_levels.items() if level != "pack"}
        extras: dict[str, Any] = {}
        for name, level in levels.items():
            if level == "token":
                pieces = [pack.extras[name][part] for pack, part in zip(stored, slices, strict=True)]
            else:
                rows = [
                    int(np.flatnonzero(p.sequence_ids == n)[0]) for p, n in zip(stored, mine, strict=True)
                ]
                pieces = [pack.extras[name][row : row + 1] for pack, row in zip(stored, rows, strict=True)]
            extras[name] = np.concatenate(pieces)
            if name == LOSS_WEIGHT:
                extras[name][untrained] = 0
            extras[name].flags.writeable = False
        return Pack(
            input_ids=_together([pack.input_ids[part] for pack, part in zip(stored, slices, strict=True)]),
            labels=labels,
            seq_lengths=lengths,
            sequence_ids=mine,
            num_tokens=int(lengths.sum()),
            num_targets=int((labels != IGNORE_INDEX).sum()),
            max_seqlen=int(lengths.max()),
            attention_cost=int((lengths.astype(np.int64) ** 2).sum()),
            extras=extras,
            extra_levels=levels,
        )


def _together(pieces: list[Array]) -> Array:
    found = np.concatenate(pieces)
    found.flags.writeable = False
    return found
