"""`repack --plan-only`: another plan over the sequences of a folder, as a file beside them.

A plan joins nothing and loses nothing: it holds every stored sequence once, whole or, with `--strategy
wrapped` and `--overflow split`, in fragments. So it costs a few bytes a sequence; what it cannot do
(join fragments again, drop or shorten records) is for `--output`, which writes the tokens anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from padless.packer.bounds import facts_of_buckets
from padless.packer.errors import InputError
from padless.packer.extra_columns import groups_of
from padless.packer.meanings import counted
from padless.packer.plan import PackPlan
from padless.packer.plan_file import check_name, write_plan
from padless.packer.planning import plan_split, strategy_of
from padless.packer.repack import Repack
from padless.packer.repack_config import NOT_PLANNED, RepackConfig
from padless.packer.repack_tables import sequence_columns
from padless.packer.strategies import CUTS
from padless.runtime.reader import PackedReader


def plan_only(config: RepackConfig, name: str) -> list[Path]:
    """Write `plans/NAME.parquet` into each split of the one folder; the files.

    Raises InputError for wrong use, for a sequence over the length that is not to be cut or has a mask, and
    for a plan that is there unless `force` is set.
    """
    if len(config.folders) != 1 or config.exclude or config.output:
        raise InputError("--plan-only takes one packed folder, and neither --output nor --exclude")
    unused = [option for option in NOT_PLANNED if getattr(config, option) is not None]
    if unused:
        raise InputError(
            f"--plan-only takes the sequences as they are: leave --{unused[0].replace('_', '-')} out, or "
            "write the packs anew with --output"
        )
    if config.overflow in ("drop", "truncate"):
        raise InputError(
            f"--overflow {config.overflow} loses tokens, and a plan holds all that are there: choose "
            "--overflow split, which cuts texts into fragments, or write the packs anew with --output"
        )
    folder = config.folders[0]
    check_name(name)
    work = Repack(replace(config, output=folder))
    readers = [PackedReader(Path(folder) / split) for split in work.splits]
    paths = [reader.path / "plans" / f"{name}.parquet" for reader in readers]
    there = next((path for path in paths if path.exists()), None)
    if there is not None and not config.force:
        raise InputError(f"{there} is there already: give another name, or --force to replace it")
    made = [_planned(work, reader, split) for reader, split in zip(readers, work.splits, strict=True)]
    for reader, path, split, (lines, lengths, groups, plan) in zip(
        readers, paths, work.splits, made, strict=True
    ):
        facts = work.constraints(split)
        buckets = facts_of_buckets(
            plan,
            lengths,
            max_length=facts["max_length"],
            cap=facts["max_sequences_per_pack"],
            align=facts["align"],
            strategy=facts["strategy"],
            groups=groups,
        )
        if plan.buckets is not None:
            facts["buckets"] = buckets
        facts["bound_packs"] = sum(bucket["bound_packs"] for bucket in buckets)
        write_plan(path, plan, lines, reader.manifest, facts)
    return paths


def _planned(
    work: Repack, reader: PackedReader, split: str
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64] | None, PackPlan]:
    """Of one split the lines that have a sequence, their lengths and groups, and the plan over them."""
    table = reader.sequence_columns("length", "num_targets", "source")
    lines = np.flatnonzero(table["length"])
    lengths, targets = table["length"][lines], table["num_targets"][lines]
    columns = sequence_columns(reader, work.extras, len(table["length"]), 0)
    groups = groups_of({column: values[lines] for column, values in columns.items()}, len(lines))
    sources = None
    if work.config.homogeneous:
        arguments = np.array(work.identity_of_repack.source_arguments, dtype=np.int32)
        sources = arguments[table["source"][lines]]
    masked = targets != lengths - 1
    strategy = strategy_of(work.config, split)
    if strategy in CUTS:
        _refuse_masked(reader, masked, f"--strategy {strategy} cuts where packs end")
        plan = plan_split(work.config, split, lengths, groups, sources)
        is_whole = plan.lengths is None or np.array_equal(plan.lengths, lengths[plan.order])
        return lines, lengths, groups, replace(plan, starts=None, lengths=None) if is_whole else plan
    limit = work.config.longest
    over = lengths > limit
    if over.any() and work.config.overflow != "split":
        raise InputError(
            f"{reader.path} has {counted(int(over.sum()), 'sequence')} longer than --max-length {limit:,} "
            f"(the longest has {int(lengths.max()):,} tokens): raise it, let --overflow split cut them "
            "(texts only), or write the packs anew with --output and --overflow drop or truncate"
        )
    if not over.any():
        return lines, lengths, groups, plan_split(work.config, split, lengths, groups, sources)
    _refuse_masked(reader, masked & over, f"--overflow split cuts what is longer than {limit:,} tokens")
    parts = -(-lengths.astype(np.int64) // limit)
    of = np.repeat(np.arange(len(lengths)), parts)
    starts = limit * (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts))
    taken = np.minimum(lengths[of] - starts, limit)
    plan = plan_split(
        work.config,
        split,
        taken,
        None if groups is None else groups[of],
        None if sources is None else sources[of],
    )
    cut = replace(plan, order=of[plan.order], starts=starts[plan.order], lengths=taken[plan.order])
    return lines, lengths, groups, cut


def _refuse_masked(reader: PackedReader, masked: NDArray[np.bool_], what: str) -> None:
    """See that no sequence to be cut has a mask: a fragment has lost what its masked tokens led up to."""
    if masked.any():
        raise InputError(
            f"{what}, and {int(masked.sum()):,} such sequences of {reader.path} have a loss mask: a fragment "
            "would begin in its middle; choose a length and a strategy that cut nothing"
        )
