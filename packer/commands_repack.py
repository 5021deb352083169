"""`pack-dataset repack`: a module of its own, as it needs nothing of what reads and tokenizes sources."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from padless.packer.config import byte_size
from padless.packer.errors import InputError
from padless.packer.options import pack_lengths
from padless.packer.strategies import STRATEGIES
from padless.packer.terminal import Json, print_json, tell_result


def repack(
    folders: Annotated[list[str], Argument(metavar="DIR...", help="Packed folders, or folders of splits.")],
    output: Annotated[str | None, Option(help="Folder or URL to write.")] = None,
    plan_only: Annotated[
        str | None, Option(metavar="NAME", help="Write plans/NAME.parquet into DIR instead of a folder.")
    ] = None,
    exclude: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Record numbers to leave out, over all DIRs: one a line, or Parquet with a column record.",
        ),
    ] = None,
    max_length: Annotated[
        Any, Option(parser=pack_lengths, metavar="TOKENS", help="Tokens per pack, or several lengths.")
    ] = None,
    strategy: Annotated[str | None, Option(help=f"{', '.join(STRATEGIES)}.")] = None,
    eval_strategy: Annotated[str | None, Option(help="Strategy of the validation split.")] = None,
    overflow: Annotated[
        str | None, Option(help="Records over the length: error, drop, truncate or split (texts).")
    ] = None,
    max_sequences_per_pack: Annotated[int | None, Option(help="Sequences in a pack, at most.")] = None,
    align: Annotated[int | None, Option(help="Count lengths as if padded to a multiple.")] = None,
    packs_multiple: Annotated[int | None, Option(help="Make the packs a multiple of this.")] = None,
    plan_window: Annotated[int | None, Option(help="Fill a pack from so many neighbours.")] = None,
    labels: Annotated[str | None, Option(help="auto or always.")] = None,
    shard_size: Annotated[
        int | None, Option(parser=byte_size, metavar="BYTES", help="Of a shard, at most: 512MiB, 1GB, ...")
    ] = None,
    compression: Annotated[str | None, Option(help="Of the shards: none, zstd, lz4.")] = None,
    workers: Annotated[int | None, Option(help="Shards written at a time. Default: the cores.")] = None,
    seed: Annotated[int | None, Option(help="For the order of packs.")] = None,
    force: Annotated[bool, Option("--force", help="Replace a data set of another build.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress and no summary.")] = False,
    profile: Annotated[bool, Option("--profile", help="Print where the time went.")] = False,
    as_json: Json = False,
) -> None:
    """Pack the tokens of DIR... again: what a build with these options would give, without tokenizing.

    Options that are not given stay as the folder was built.
    """
    from dataclasses import replace

    from padless.packer.fresh_memory import keep_freed_memory

    keep_freed_memory()
    from padless.packer.progress import progress
    from padless.packer.repack import repack as run_repack
    from padless.packer.repack_config import RepackConfig
    from padless.packer.repack_plan import plan_only as run_plan_only

    if output is None and plan_only is None:
        raise InputError("missing: --output or --plan-only; see pack-dataset repack --help")
    config = RepackConfig(
        folders=tuple(folders),
        output=output or "",
        exclude=exclude,
        max_length=max_length,
        strategy=strategy,
        eval_strategy=eval_strategy,
        overflow=overflow,
        max_sequences_per_pack=max_sequences_per_pack,
        align=align,
        packs_multiple=packs_multiple,
        plan_window=plan_window,
        labels=labels,
        shard_size=shard_size,
        compression=compression,
        seed=seed,
        workers=workers,
        force=force,
    )
    if plan_only is not None:
        paths = [str(path) for path in run_plan_only(config, plan_only)]
        if as_json:
            print_json({"plans": paths})
        elif not quiet:
            print("\n".join(f"written to {path}" for path in paths))
        return
    with progress(quiet=quiet) as report:
        result = run_repack(replace(config, progress=report))
    tell_result(result, profile=profile, as_json=as_json, quiet=quiet)
