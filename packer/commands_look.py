"""The commands of `pack-dataset` for packed folders that are there: to look at, to check, to hand on."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from padless.packer.config import byte_size
from padless.packer.errors import InputError
from padless.packer.exports import EXPORTS, target_of
from padless.packer.terminal import TABLE_WIDTH, Json, Plan, Quiet, Split, console, print_json, wrapping
from padless.runtime.storage import is_url

if TYPE_CHECKING:
    from rich.console import Console

    from padless.packer.verify import VerifyReport


def report(
    folders: Annotated[
        list[str] | None,
        Argument(metavar="DIR [DIR2]", help="A packed folder, or its URL; with a second one, both compared."),
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
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Padding utilization: the packs against naive batching and the bound."""
    from padless.packer.cost import read_cost
    from padless.packer.progress import progress
    from padless.packer.report import build_report
    from padless.packer.report_view import print_comparison, print_report

    if batches is not None:
        from padless.packer.batch_log import print_batches, report_batches

        if folders or card or any(given is not None for given in (html, model, split, plan)):
            raise InputError(
                "--batches FILE stands alone: leave DIR, --html, --card, --model, --split and --plan out"
            )
        log = report_batches(batches)
        if as_json:
            print_json(log)
        else:
            print_batches(log, wrapping(TABLE_WIDTH))
        return
    if not folders:
        raise InputError("missing: DIR. Usage: pack-dataset report DIR [DIR2], or report --batches FILE")
    if len(folders) > 2:
        raise InputError(f"report compares two folders, {len(folders)} were given")
    if card:
        from padless.packer.card import write_card

        if len(folders) > 1:
            raise InputError("--card writes into one folder, and two were given")
        if is_url(folders[0]):
            raise InputError(f"--card writes into a folder, and {folders[0]} is a URL")
        if any(given is not None for given in (html, model, split, plan)):
            raise InputError(
                "--card is of the folder as it is, all its splits: leave --html, --model, --split and --plan "
                "out"
            )
        written = write_card(folders[0])
        if as_json:
            print_json({"card": str(written)})
        else:
            print(f"written to {written}")
        return
    cost = read_cost(model) if model is not None else None
    with progress(quiet=quiet) as tell:
        found = [
            build_report(folder, split=split, plan=plan, model=cost, progress=tell) for folder in folders
        ]
    if html is not None:
        from padless.packer.page import write_page
        from padless.packer.report_page import comparison_page, report_page

        write_page(html, report_page(found[0]) if len(found) == 1 else comparison_page(found))
    if as_json:
        print_json(found[0] if len(found) == 1 else {"reports": found})
    elif html is not None:
        print(f"written to {html}")
    elif len(found) == 1:
        print_report(found[0], wrapping(TABLE_WIDTH))
    else:
        print_comparison(found, wrapping(TABLE_WIDTH))


def inspect(
    folder: Annotated[str, Argument(metavar="DIR", help="A packed folder, or its URL.")],
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
        bool, Option("--browse", help="Go on by keys: n (next), p (previous), a number, /words, q.")
    ] = False,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write the packs as one page that needs nothing else.")
    ] = None,
    split: Split = None,
    plan: Plan = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """One pack decoded: boundaries, what is trained, where each sequence came from."""
    from padless.packer.find import find_pack
    from padless.packer.inspect import describe_pack, print_pack
    from padless.packer.progress import progress

    if browse and (html is not None or as_json):
        raise InputError("--browse asks where to go from pack to pack: leave --html and --json out")
    if source is not None and row is None:
        raise InputError(f"--source {source} says whose row is meant: give --row too")
    if pack is not None and (sequence is not None or row is not None):
        raise InputError("--sequence and --row find their pack: leave --pack out")
    if text is not None and pack is not None and len(pack) > 1:
        raise InputError("--text is looked for from one --pack on, and several were given")
    numbers = list(dict.fromkeys(pack or [0]))
    if sequence is not None or row is not None or text is not None:
        where: dict[str, Any] = dict(sequence=sequence, row=row, source=source, text=text)
        with progress(quiet=quiet) as tell:
            numbers = [find_pack(folder, **where, first=numbers[0], split=split, plan=plan, progress=tell)]
    found = [describe_pack(folder, number, split=split, plan=plan) for number in numbers]
    if html is not None:
        from padless.packer.inspect_page import inspect_page
        from padless.packer.page import write_page

        write_page(html, inspect_page(found))
    if as_json:
        print_json(found[0] if len(found) == 1 else {"packs": found})
    elif html is not None:
        print(f"written to {html}")
    else:
        console = wrapping()
        for one in found:
            print_pack(one, console)
        if browse:
            from padless.packer.browse import browse_packs

            browse_packs(folder, found[-1], console, split=split, plan=plan)


def verify(
    folder: Annotated[str, Argument(metavar="DIR", help="A packed folder, or one of splits, or its URL.")],
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
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Check every file, pack and line of a packed folder; exit 1 where one is not as the manifest says."""
    from padless.packer.progress import progress
    from padless.packer.verify import verify as run_verify

    with progress(quiet=quiet) as tell:
        found = run_verify(folder, split=split, plan=plan, model=model, trainer=trainer, progress=tell)
    with suppress(BrokenPipeError):  # of whoever reads no further; the exit code still tells
        if as_json:
            print_json(found.to_json())
        else:
            print_checks(found, console())
    return 0 if found.ok else 1


def print_checks(found: VerifyReport, out: Console) -> None:
    """A line a check, then what is worth a look."""
    for check in found.checks:
        out.print("ok  " if check.ok else "FAIL", style="green" if check.ok else "bold red", end=" ")
        out.print(f"{check.name}: {check.detail}" if check.detail else check.name, markup=False)
    for warning in found.warnings:
        out.print("warning:", style="yellow", end=" ")
        out.print(warning, markup=False)


def export(
    folder: Annotated[str, Argument(metavar="DIR", help="A packed folder, or a folder of splits.")],
    to: Annotated[str, Option(help=f"{', '.join(EXPORTS)}.")],
    output: Annotated[str, Option(help="Folder to write, or its URL.")],
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
    from padless.packer.progress import progress

    config = ExportConfig(
        folder=folder, to=to, output=output, split=split, plan=plan, shard_size=shard_size, force=force
    )
    with progress(quiet=quiet) as tell:
        found = run_export(config, progress=tell)
    if as_json:
        print_json(asdict(found))
    elif not quiet:
        said = "is there already" if found.was_there else f"written in {found.seconds:.1f} s"
        print(
            f"{found.output} ({found.target}) {said}: {found.packs:,} packs, {found.sequences:,} sequences, "
            f"{found.tokens:,} tokens, {found.bytes / 1e6:,.1f} MB in {found.files} files"
        )
        for note in found.notes:
            print(f"note: {note}")
        print(f"{found.output}/README.md says how to point {target_of(to).reader} at it")


def push(
    folder: Annotated[str, Argument(metavar="DIR", help="A packed folder, or a folder of splits.")],
    repository: Annotated[str, Argument(metavar="ORG/NAME", help="A data set on the Hub; made where new.")],
    private: Annotated[bool, Option("--private", help="Make a new one private.")] = False,
    revision: Annotated[str | None, Option(help="The branch to commit to; made where new.")] = None,
    as_json: Json = False,
) -> None:
    """Upload a packed folder to the Hub in one commit, checked before, with a data set card."""
    from padless.packer.push import push as run_push

    address = run_push(folder, repository, private=private, revision=revision)
    if as_json:
        print_json({"commit": address})
    else:
        print(address)


def demo(
    output: Annotated[Path | None, Option(help="Folder to write.", show_default="./packed-demo")] = None,
    as_json: Json = False,
) -> None:
    """The whole way on a small data set and tokenizer that ship with padless; no network."""
    from padless.packer.demo import run_demo

    if as_json:
        from rich.console import Console

        print_json(run_demo(output, Console(file=io.StringIO())))
    else:
        run_demo(output, wrapping())
