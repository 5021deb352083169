"""`repack --plan-only`: another plan over the sequences of a folder, as a file beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from padless.packer.bounds import facts_of_buckets
from padless.packer.errors import InputError
from padless.packer.extra_columns import groups_of
from padless.packer.plan_file import check_name, write_plan
from padless.packer.repack import Repack
from padless.packer.repack_config import NOT_PLANNED, RepackConfig
from padless.packer.repack_tables import sequence_columns
from padless.packer.strategies import CUTS
from padless.runtime.reader import PackedReader


def plan_only(config: RepackConfig, name: str) -> list[Path]:
    """Write `plans/NAME.parquet` into each split of the one folder; the files.

    A plan holds the sequences as they are: none is joined, cut or left out. Raises InputError for wrong
    use, for a sequence over the length, and for a plan that is there unless `force` is set.
    """
    if len(config.folders) != 1 or config.exclude or config.output:
        raise InputError("--plan-only takes one packed folder, and neither --output nor --exclude")
    unused = [option for option in NOT_PLANNED if getattr(config, option) is not None]
    if unused:
        raise InputError(
            f"--plan-only takes the sequences as they are: leave --{unused[0].replace('_', '-')} out, or "
            "write the packs anew with --output"
        )
    folder = config.folders[0]
    check_name(name)
    work = Repack(replace(config, output=folder))
    for strategy in sorted(CUTS & {work.config.strategy, work.config.eval_strategy}):
        raise InputError(
            f"--strategy {strategy} cuts where packs end, and a plan takes the sequences as they are: choose "
            "bfd, spread or another that cuts nothing, or write the packs anew with --output"
        )
    readers = [PackedReader(Path(folder) / split) for split in work.splits]
    paths = [reader.path / "plans" / f"{name}.parquet" for reader in readers]
    there = next((path for path in paths if path.exists()), None)
    if there is not None and not config.force:
        raise InputError(f"{there} is there already: give another name, or --force to replace it")
    tables = [reader.sequence_columns("length", "source") for reader in readers]
    lengths = [table["length"] for table in tables]
    kept = [np.flatnonzero(column) for column in lengths]
    extras = [
        {
            name: column[lines]
            for name, column in sequence_columns(reader, work.extras, len(length), 0).items()
        }
        for reader, length, lines in zip(readers, lengths, kept, strict=True)
    ]
    plans = work.plans_of(
        [column[lines] for column, lines in zip(lengths, kept, strict=True)],
        extras,
        [table["source"][lines] for table, lines in zip(tables, kept, strict=True)],
    )
    for number, (reader, path, plan) in enumerate(zip(readers, paths, plans, strict=True)):
        facts = work.constraints(work.splits[number])
        lines = kept[number]
        buckets = facts_of_buckets(
            plan,
            lengths[number][lines],
            max_length=facts["max_length"],
            cap=facts["max_sequences_per_pack"],
            align=facts["align"],
            strategy=facts["strategy"],
            groups=groups_of(extras[number], len(lines)),
        )
        if plan.buckets is not None:
            facts["buckets"] = buckets
        facts["bound_packs"] = sum(bucket["bound_packs"] for bucket in buckets)
        write_plan(path, plan, lines, reader.manifest, facts)
    return paths
