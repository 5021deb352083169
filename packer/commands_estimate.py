"""The command of `pack-dataset` that foretells packs: estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from padless.packer.config import PackConfig
from padless.packer.formats import FORMATS
from padless.packer.options import pairs, template_args
from padless.packer.terminal import Json, Quiet, Split, print_json, wrapping


def estimate(
    sources: Annotated[
        list[str], Argument(metavar="SOURCE...", help="Files, globs, folders, URLs, or data sets on the Hub.")
    ],
    tokenizer: Annotated[str, Option(help="Tokenizer folder, or a model on the Hub.")],
    max_length: Annotated[int, Option(help="Tokens per pack; others around it are tried too.")] = 4096,
    limit: Annotated[int, Option(help="Records to draw at random from each source.")] = 2000,
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
    template_arg: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A variable for the chat template.")
    ] = None,
    image_root: Annotated[
        str | None, Option(help="Where relative paths of images begin. Default: where the records lie.")
    ] = None,
    system: Annotated[str | None, Option(help="A system turn for chats without one.")] = None,
    train_on: Annotated[str, Option(help="auto, all, completion, assistant, last.")] = "auto",
    expand_turns: Annotated[
        bool, Option("--expand-turns", help="One sequence for each of the assistant's turns.")
    ] = False,
    bos: Annotated[str, Option(help="Begin token of texts: auto, none or a token.")] = "auto",
    eos: Annotated[str, Option(help="End token of texts: auto, none or a token.")] = "auto",
    allow_special: Annotated[
        bool, Option("--allow-special", help="Special tokens spelled in the data are special tokens.")
    ] = False,
    fim_rate: Annotated[float, Option(help="Share of the texts for filling in the middle.")] = 0.0,
    fim_spm_rate: Annotated[float, Option(help="Share of those with the suffix first.")] = 0.5,
    fim_tokens: Annotated[
        str | None, Option(metavar="PREFIX,SUFFIX,MIDDLE", help="Tokens for it, as for build.")
    ] = None,
    max_sequences_per_pack: Annotated[int, Option(help="Sequences in a pack, at most.")] = 1024,
    align: Annotated[int, Option(help="Count lengths as if padded to a multiple.")] = 1,
    workers: Annotated[int | None, Option(help="Workers that tokenize. Default: the cores.")] = None,
    seed: Annotated[int, Option(help="For the draw, and the resampling behind the errors.")] = 0,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write the estimate as one page that needs nothing else.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """What it would give at several lengths and strategies, from a sample; nothing is written."""
    from dataclasses import replace

    from padless.packer.estimate import estimate as run_estimate
    from padless.packer.estimate_view import print_estimate
    from padless.packer.progress import progress

    config = PackConfig(
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
        template_args=template_args(template_arg),
        image_root=image_root,
        system=system,
        train_on=train_on,
        expand_turns=expand_turns,
        bos=bos,
        eos=eos,
        allow_special=allow_special,
        fim_rate=fim_rate,
        fim_spm_rate=fim_spm_rate,
        fim_tokens=fim_tokens,
        max_sequences_per_pack=max_sequences_per_pack,
        align=align,
        workers=workers,
        seed=seed,
    )
    with progress(quiet=quiet) as report:
        found = run_estimate(replace(config, progress=report))
    if html is not None:
        from padless.packer.estimate_page import estimate_page
        from padless.packer.page import write_page

        write_page(html, estimate_page(found))
    if as_json:
        print_json(found)
    elif html is not None:
        print(f"written to {html}")
    else:
        print_estimate(found, wrapping())
