"""The commands of `pack-dataset`; their choices come from the same dicts as everything else."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from padless.packer.config import PackConfig, byte_size
from padless.packer.errors import InputError, OptionError
from padless.packer.exports import EXPORTS, target_of
from padless.packer.formats import FORMATS
from padless.packer.options import from_file, numbers, option_of, pairs, scalar, switch, with_options
from padless.packer.strategies import STRATEGIES
from padless.packer.template import BUILT_IN, CLASSIC
from padless.runtime.format import PadlessError

if TYPE_CHECKING:
    from rich.console import Console

    from padless.packer.pipeline import BuildResult

app = typer.Typer(
    name="pack-dataset",
    help="Tokenize and pack a data set once, offline; train without padding ever after.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130
Json = Annotated[bool, Option("--json", help="Print the result as one JSON object.")]
Plan = Annotated[str | None, Option(metavar="NAME", help="Go by plans/NAME.parquet.")]
Split = Annotated[str | None, Option(help="The split to take, in a folder of splits.")]


def run() -> int:
    """Run the command line; its exit code. Every mistake of a user ends in one line, never a traceback."""
    try:
        found: Any = app(standalone_mode=False)
    except OptionError as error:
        _tell_error(with_options(str(error)))
        return 2
    except PadlessError as error:
        _tell_error(str(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _tell_interrupted()
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        return 0
    except OSError as error:
        _tell_error(f"{error.filename or ''} {error.strerror or error}".strip())
        return 2
    except typer.Exit as done:
        return done.exit_code
    except Exception as error:  # typer's own, which differ between its versions
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    code = found if isinstance(found, int) else 0
    if code == INTERRUPTED:  # what typer makes of Ctrl-C
        _tell_interrupted()
    return code


def _console(*, stderr: bool = False) -> Console:
    # Here and not above: a quiet build needs no rich, and a small one is as fast as its imports.
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True, highlight=False)


def _wrapping() -> Console:
    """A console that breaks lines at the terminal's width."""
    from rich.console import Console

    return Console()


def _tell_error(message: str) -> None:
    errors = _console(stderr=True)
    errors.print("error:", style="bold red", end=" ")
    errors.print(message, markup=False)


def _tell_interrupted() -> None:
    print("interrupted; the same command goes on from what was finished", file=sys.stderr)


def _tell(result: BuildResult, *, profile: bool, as_json: bool, quiet: bool) -> None:
    """What a build or a repack gave, in the way that was asked for."""
    from padless.packer.summary import build_json, print_profile, print_summary

    if profile:
        print_profile(result, _console(stderr=True))
    if as_json:
        _print_json(build_json(result))
    elif not quiet:
        print_summary(result, _console())


def _print_version(asked: bool) -> None:
    if asked:
        from padless.packer.identity import version_of

        print(f"padless {version_of('padless')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tokenize and pack a data set once, offline; train without padding ever after."""


@app.command()
def build(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        Argument(metavar="SOURCE...", help="Files, globs, folders, or data sets on the Hub (ORG/NAME)."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(help="Tokenizer folder (with tokenizer.json), or a model on the Hub. Required."),
    ] = None,
    max_length: Annotated[int | None, Option(help="Tokens per pack. Required.")] = None,
    output: Annotated[str | None, Option(help="Folder to write. Required.")] = None,
    format: Annotated[str, Option(help=f"auto, {', '.join(FORMATS)}.")] = "auto",
    column: Annotated[
        list[str] | None,
        Option(metavar="ROLE=NAME", help="A column's name, where it is not the usual one."),
    ] = None,
    split: Annotated[
        str | None,
        Option(
            help="Of sources with splits (Hub, save_to_disk). Several (train,test) or all make a folder of "
            "each. Default: train."
        ),
    ] = None,
    subset: Annotated[str | None, Option(help="Of a data set on the Hub. Default: its own.")] = None,
    revision: Annotated[
        str | None, Option(help="Branch, tag or commit of a data set on the Hub. Default: the newest.")
    ] = None,
    text_by: Annotated[
        str, Option(help="Text files: line, blank (paragraphs), file, or a regular expression.")
    ] = "line",
    limit: Annotated[int | None, Option(help="Take only the first records.", show_default=False)] = None,
    weight: Annotated[
        list[str] | None,
        Option(metavar="SOURCE=W", help="A source's share of the mix, against 1 for those not named."),
    ] = None,
    max_records: Annotated[
        list[str] | None, Option(metavar="SOURCE=N", help="Draw from at most so many records of a source.")
    ] = None,
    max_tokens: Annotated[
        list[str] | None, Option(metavar="SOURCE=N", help="Draw from at most so many tokens of a source.")
    ] = None,
    mix_by: Annotated[
        str, Option(help="What weights and --mix-target count: records, tokens or trained (tokens).")
    ] = "tokens",
    mix_target: Annotated[
        int | None, Option(help="Size of the mix. Default: the largest that the weights allow.")
    ] = None,
    max_repeats: Annotated[int, Option(help="How often the mix may pack a record.")] = 1,
    template: Annotated[
        str | None,
        Option(
            help=f"Chat template: a file, {', '.join(BUILT_IN)}, or {CLASSIC} (the classic prompts). "
            "Default: the tokenizer's."
        ),
    ] = None,
    template_arg: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A variable for the chat template.")
    ] = None,
    system: Annotated[str | None, Option(help="A system turn for chats without one.")] = None,
    train_on: Annotated[
        str,
        Option(
            help="auto (assistant's turns, completions, all of a text), all, completion, assistant, last."
        ),
    ] = "auto",
    expand_turns: Annotated[
        bool, Option("--expand-turns", help="One sequence for each of the assistant's turns.")
    ] = False,
    bos: Annotated[str, Option(help="Begin token of texts: auto, none or a token.")] = "auto",
    eos: Annotated[str, Option(help="End token of texts: auto, none or a token.")] = "auto",
    allow_special: Annotated[
        bool,
        Option("--allow-special", help="Special tokens spelled in the data are special tokens."),
    ] = False,
    strategy: Annotated[str, Option(help=f"{', '.join(STRATEGIES)}.")] = "bfd",
    overflow: Annotated[
        str, Option(help="Records over the length: error, drop, truncate, or split (texts).")
    ] = "error",
    max_sequences_per_pack: Annotated[int, Option(help="Sequences in a pack, at most.")] = 1024,
    align: Annotated[
        int, Option(help="Count lengths as if padded to a multiple (2 x context-parallel ranks).")
    ] = 1,
    packs_multiple: Annotated[
        int, Option(help="Make the packs a multiple of this, by splitting some; no sequence is dropped.")
    ] = 1,
    plan_window: Annotated[
        int | None,
        Option(help="Fill a pack from so many neighbouring sequences. Default: all (ordered: 256)."),
    ] = None,
    homogeneous: Annotated[
        bool, Option("--homogeneous", help="Packs of one source each. Default: of all together.")
    ] = False,
    on_bad_record: Annotated[str, Option(help="Malformed records: error or drop.")] = "error",
    on_empty_reply: Annotated[str, Option(help="Records whose reply is empty: keep or drop.")] = "keep",
    max_drop_share: Annotated[float, Option(help="Share of the records that may be lost to faults.")] = 0.05,
    eval_fraction: Annotated[
        float, Option(help="Share of the records for a validation split, chosen by their content.")
    ] = 0.0,
    eval_source: Annotated[
        list[str] | None, Option(metavar="SOURCE", help="Files for a validation split.")
    ] = None,
    eval_strategy: Annotated[str, Option(help="Strategy of splits for evaluation.")] = "none",
    labels: Annotated[str, Option(help="auto leaves the column out where it says nothing; always.")] = "auto",
    shard_size: Annotated[
        int, Option(parser=byte_size, metavar="BYTES", help="Of a shard, at most: 512MiB, 1GB, or a number.")
    ] = 512 * 2**20,
    compression: Annotated[str, Option(help="Of the shards: none, zstd, lz4.")] = "none",
    workers: Annotated[int | None, Option(help="Workers that tokenize. Default: the cores.")] = None,
    seed: Annotated[int, Option(help="For the order of packs and the choice of the validation split.")] = 0,
    config: Annotated[
        Path | None,
        Option(metavar="FILE.yaml", help="Options from a file; the command line goes first."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace a data set of another build.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress and no summary.")] = False,
    profile: Annotated[bool, Option("--profile", help="Print where the time went.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize and pack SOURCE... into the folder --output."""
    from padless.packer.pipeline import build as run_build
    from padless.packer.summary import progress

    given: dict[str, Any] = dict(
        sources=tuple(sources or ()),
        tokenizer=tokenizer,
        max_length=max_length,
        output=output,
        format=format,
        columns=pairs(column, "--column", "ROLE=NAME"),
        split=split,
        subset=subset,
        revision=revision,
        text_by=text_by,
        limit=limit,
        weights=numbers(weight, "--weight"),
        max_records=numbers(max_records, "--max-records"),
        max_tokens=numbers(max_tokens, "--max-tokens"),
        mix_by=mix_by,
        mix_target=mix_target,
        max_repeats=max_repeats,
        template=template,
        template_args={
            name: scalar(value) for name, value in pairs(template_arg, "--template-arg", "NAME=VALUE").items()
        },
        system=system,
        train_on=train_on,
        expand_turns=expand_turns,
        bos=bos,
        eos=eos,
        allow_special=allow_special,
        strategy=strategy,
        overflow=overflow,
        max_sequences_per_pack=max_sequences_per_pack,
        align=align,
        packs_multiple=packs_multiple,
        plan_window=plan_window,
        homogeneous=homogeneous,
        on_bad_record=on_bad_record,
        on_empty_reply=on_empty_reply,
        max_drop_share=max_drop_share,
        eval_fraction=eval_fraction,
        eval_sources=tuple(eval_source or ()),
        eval_strategy=eval_strategy,
        labels=labels,
        shard_size=shard_size,
        compression=compression,
        workers=workers,
        seed=seed,
        force=force,
        quiet=quiet,
        profile=profile,
        json=as_json,
    )
    given = {**given, **from_file(config, context, given)}
    quiet, profile, as_json = (switch(name, given.pop(name)) for name in ("quiet", "profile", "json"))
    missing = [
        name
        for name in ("sources", "tokenizer", "max_length", "output")
        if not given[name] and given[name] != 0
    ]
    if missing:
        raise InputError(f"missing: {', '.join(map(option_of, missing))}; see pack-dataset build --help")
    with progress(_console if not quiet and sys.stderr.isatty() else None) as report:
        result = run_build(PackConfig(**given, progress=report))
    _tell(result, profile=profile, as_json=as_json, quiet=quiet)


@app.command()
def repack(
    folders: Annotated[list[str], Argument(metavar="DIR...", help="Packed folders, or folders of splits.")],
    output: Annotated[str | None, Option(help="Folder to write.")] = None,
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
    max_length: Annotated[int | None, Option(help="Tokens per pack.")] = None,
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

    from padless.packer.repack import repack as run_repack
    from padless.packer.repack_config import RepackConfig
    from padless.packer.repack_plan import plan_only as run_plan_only
    from padless.packer.summary import progress

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
            _print_json({"plans": paths})
        elif not quiet:
            print("\n".join(f"written to {path}" for path in paths))
        return
    with progress(_console if not quiet and sys.stderr.isatty() else None) as report:
        result = run_repack(replace(config, progress=report))
    _tell(result, profile=profile, as_json=as_json, quiet=quiet)


@app.command()
def report(
    folders: Annotated[
        list[Path] | None,
        Argument(metavar="DIR [DIR2]", help="A packed folder; with a second one, both compared."),
    ] = None,
    split: Split = None,
    plan: Plan = None,
    model: Annotated[
        Path | None, Option(metavar="CONFIG", help="A model's config.json: weighs padding by its FLOPs.")
    ] = None,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write the report as one page that needs nothing else.")
    ] = None,
    card: Annotated[
        bool, Option("--card", help="Write DIR/README.md: a data set card, by which the Hub loads the packs.")
    ] = False,
    batches: Annotated[
        Path | None,
        Option(metavar="FILE", help="Instead of DIR: lengths of a trainer's batches, JSONL or CSV."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Padding utilization: the packs against naive batching and the bound."""
    from padless.packer.cost import read_cost
    from padless.packer.report import build_report
    from padless.packer.report_view import print_comparison, print_report

    if batches is not None:
        from padless.packer.batch_log import print_batches, report_batches

        if folders or html is not None or model is not None or card:
            raise InputError("--batches FILE stands alone: leave DIR, --html, --card and --model out")
        log = report_batches(batches)
        if as_json:
            _print_json(log)
        else:
            print_batches(log, _wrapping())
        return
    if not folders:
        raise InputError("missing: DIR. Usage: pack-dataset report DIR [DIR2], or report --batches FILE")
    if len(folders) > 2:
        raise InputError(f"report compares two folders, {len(folders)} were given")
    if card:
        from padless.packer.card import write_card

        if len(folders) > 1:
            raise InputError("--card writes into one folder, and two were given")
        print(f"written to {write_card(folders[0])}")
        return
    cost = read_cost(model) if model is not None else None
    found = [build_report(folder, split=split, plan=plan, model=cost) for folder in folders]
    if html is not None:
        from padless.packer.page import write_page
        from padless.packer.report_page import comparison_page, report_page

        write_page(html, report_page(found[0]) if len(found) == 1 else comparison_page(found))
    if as_json:
        _print_json(found[0] if len(found) == 1 else {"reports": found})
    elif html is not None:
        print(f"written to {html}")
    elif len(found) == 1:
        print_report(found[0], _wrapping())
    else:
        print_comparison(found, _wrapping())


@app.command()
def inspect(
    folder: Annotated[Path, Argument(metavar="DIR", help="A packed folder.")],
    pack: Annotated[
        list[int] | None, Option(help="Number of the pack; may be given several times. Default: 0.")
    ] = None,
    sequence: Annotated[int | None, Option(help="Instead: the pack with this sequence.")] = None,
    row: Annotated[int | None, Option(help="Instead: the pack with this row of a source, from 0.")] = None,
    source: Annotated[str | None, Option(help="For --row: the source, by the end of its path.")] = None,
    text: Annotated[
        str | None, Option(help="Instead: the first pack with these words, from --pack on.")
    ] = None,
    browse: Annotated[
        bool, Option("--browse", help="Go on with n (next), p (previous), a number, or q (quit).")
    ] = False,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write the packs as one page that needs nothing else.")
    ] = None,
    split: Split = None,
    plan: Plan = None,
    as_json: Json = False,
) -> None:
    """One pack decoded: boundaries, what is trained, where each sequence came from."""
    from padless.packer.find import find_pack
    from padless.packer.inspect import browse_packs, describe_pack, print_pack

    numbers = list(dict.fromkeys(pack or [0]))
    if sequence is not None or row is not None or text is not None:
        where: dict[str, Any] = dict(sequence=sequence, row=row, source=source, text=text)
        numbers = [find_pack(folder, **where, first=numbers[0], split=split, plan=plan)]
    found = [describe_pack(folder, number, split=split, plan=plan) for number in numbers]
    if html is not None:
        from padless.packer.inspect_page import inspect_page
        from padless.packer.page import write_page

        write_page(html, inspect_page(found))
    if as_json:
        _print_json(found[0] if len(found) == 1 else {"packs": found})
    elif html is not None:
        print(f"written to {html}")
    else:
        console = _wrapping()
        for one in found:
            print_pack(one, console)
        if browse:
            browse_packs(folder, found[-1], console, split=split, plan=plan)


@app.command()
def verify(
    folder: Annotated[Path, Argument(metavar="DIR", help="A packed folder, or a folder of splits.")],
    split: Split = None,
    plan: Plan = None,
    model: Annotated[
        Path | None,
        Option(
            metavar="CONFIG|FOLDER",
            help="A model's config.json or its folder: do the data fit it, and does it keep sequences apart? "
            "(Needs torch and transformers; weights are not read.)",
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        Option(
            metavar="trl|hf",
            help="Also run packs through that trainer's own loader and a tiny model: boundaries, positions, "
            "labels, losses. (Has to be installed.)",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check every file, pack and line of a packed folder; exit 1 where one is not as the manifest says."""
    from padless.packer.verify import verify as run_verify

    found = run_verify(folder, split=split, plan=plan, model=model, trainer=trainer)
    if as_json:
        _print_json(found.to_json())
    else:
        console = _console()
        for check in found.checks:
            console.print("ok  " if check.ok else "FAIL", style="green" if check.ok else "bold red", end=" ")
            console.print(f"{check.name}: {check.detail}" if check.detail else check.name, markup=False)
        for warning in found.warnings:
            console.print("warning:", style="yellow", end=" ")
            console.print(warning, markup=False)
    return 0 if found.ok else 1


@app.command()
def export(
    folder: Annotated[str, Argument(metavar="DIR", help="A packed folder, or a folder of splits.")],
    to: Annotated[str, Option(help=f"{', '.join(EXPORTS)}.")],
    output: Annotated[str, Option(help="Folder to write.")],
    split: Split = None,
    plan: Plan = None,
    shard_size: Annotated[
        int, Option(parser=byte_size, metavar="BYTES", show_default="512MiB", help="Of a file, about.")
    ] = 512 * 2**20,
    force: Annotated[bool, Option("--force", help="Replace an export of other data.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress and no summary.")] = False,
    as_json: Json = False,
) -> None:
    """Write a packed folder in another trainer's form, with a README.md that says how to point it there."""
    from dataclasses import asdict

    from padless.packer.export import ExportConfig
    from padless.packer.export import export as run_export

    config = ExportConfig(
        folder=folder, to=to, output=output, split=split, plan=plan, shard_size=shard_size, force=force
    )
    if quiet or as_json or not sys.stderr.isatty():
        found = run_export(config)
    else:
        from rich.progress import MofNCompleteColumn, Progress

        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
            task = bar.add_task("packs")
            run = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
            found = run_export(config, progress=run)
    if as_json:
        _print_json(asdict(found))
    elif not quiet:
        said = "is there already" if found.was_there else f"written in {found.seconds:.1f} s"
        print(
            f"{found.output} ({found.target}) {said}: {found.packs:,} packs, {found.sequences:,} sequences, "
            f"{found.tokens:,} tokens, {found.bytes / 1e6:,.1f} MB in {found.files} files"
        )
        for note in found.notes:
            print(f"note: {note}")
        print(f"{found.output}/README.md says how to point {target_of(to).reader} at it")


@app.command()
def estimate(
    sources: Annotated[
        list[str], Argument(metavar="SOURCE...", help="Files, globs, folders, or data sets on the Hub.")
    ],
    tokenizer: Annotated[str, Option(help="Tokenizer folder, or a model on the Hub.")],
    max_length: Annotated[int, Option(help="Tokens per pack; others around it are tried too.")] = 4096,
    limit: Annotated[int, Option(help="Take the first records of each source.")] = 2000,
    format: Annotated[str, Option(help=f"auto, {', '.join(FORMATS)}.")] = "auto",
    column: Annotated[
        list[str] | None, Option(metavar="ROLE=NAME", help="The column that plays a role.")
    ] = None,
    split: Split = None,
    subset: Annotated[str | None, Option(help="Of a data set on the Hub.")] = None,
    revision: Annotated[str | None, Option(help="Of a data set on the Hub.")] = None,
    text_by: Annotated[
        str, Option(help="Text files: line, blank (paragraphs), file, or a regular expression.")
    ] = "line",
    template: Annotated[str | None, Option(help="Chat template, as for build.")] = None,
    system: Annotated[str | None, Option(help="A system turn for chats without one.")] = None,
    train_on: Annotated[str, Option(help="auto, all, completion, assistant, last.")] = "auto",
    expand_turns: Annotated[
        bool, Option("--expand-turns", help="One sequence for each of the assistant's turns.")
    ] = False,
    max_sequences_per_pack: Annotated[int, Option(help="Sequences in a pack, at most.")] = 1024,
    align: Annotated[int, Option(help="Count lengths as if padded to a multiple.")] = 1,
    workers: Annotated[int | None, Option(help="Workers that tokenize. Default: the cores.")] = None,
    seed: Annotated[int, Option(help="For the resampling behind the errors.")] = 0,
    as_json: Json = False,
) -> None:
    """What it would give at several lengths and strategies, from a sample; nothing is written."""
    from padless.packer.estimate import estimate as run_estimate
    from padless.packer.estimate import print_estimate

    found = run_estimate(
        PackConfig(
            sources=tuple(sources),
            tokenizer=tokenizer,
            max_length=max_length,
            output="",
            limit=limit,
            format=format,
            columns=pairs(column, "--column", "ROLE=NAME"),
            split=split,
            subset=subset,
            revision=revision,
            text_by=text_by,
            template=template,
            system=system,
            train_on=train_on,
            expand_turns=expand_turns,
            max_sequences_per_pack=max_sequences_per_pack,
            align=align,
            workers=workers,
            seed=seed,
        )
    )
    if as_json:
        _print_json(found)
    else:
        print_estimate(found, _wrapping())


@app.command()
def push(
    folder: Annotated[Path, Argument(metavar="DIR", help="A packed folder, or a folder of splits.")],
    repository: Annotated[str, Argument(metavar="ORG/NAME", help="A data set on the Hub; made where new.")],
    private: Annotated[bool, Option("--private", help="Make a new one private.")] = False,
    revision: Annotated[str | None, Option(help="The branch to commit to; made where new.")] = None,
    as_json: Json = False,
) -> None:
    """Upload a packed folder to the Hub in one commit, checked before, with a data set card."""
    from padless.packer.push import push as run_push

    address = run_push(folder, repository, private=private, revision=revision)
    if as_json:
        _print_json({"commit": address})
    else:
        print(address)


@app.command()
def demo(
    output: Annotated[Path | None, Option(help="Folder to write.", show_default="./packed-demo")] = None,
    as_json: Json = False,
) -> None:
    """The whole way on a small data set and tokenizer that ship with padless; no network."""
    from padless.packer.demo import run_demo

    if as_json:
        from rich.console import Console

        _print_json(run_demo(output, Console(file=io.StringIO())))
    else:
        run_demo(output, _wrapping())


def _print_json(content: Any) -> None:
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(content, ensure_ascii=not is_utf8) + "\n")
