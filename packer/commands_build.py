"""`pack-dataset build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from padless.packer.config import PackConfig, byte_size
from padless.packer.errors import InputError
from padless.packer.formats import FORMATS
from padless.packer.options import from_file, numbers, option_of, pack_lengths, pairs, switch, template_args
from padless.packer.strategies import STRATEGIES
from padless.packer.template import BUILT_IN, CLASSIC
from padless.packer.terminal import Json, tell_result


def build(
    context: Context,
    sources: Annotated[
        list[str] | None,
        Argument(
            metavar="SOURCE...",
            help="Files, globs, folders, URLs of them, or data sets on the Hub (ORG/NAME).",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(help="Tokenizer folder (with tokenizer.json), or a model on the Hub. Required."),
    ] = None,
    max_length: Annotated[
        Any,
        Option(
            parser=pack_lengths,
            metavar="TOKENS",
            help="Tokens per pack. Required. Several (2048,8192): sequences in the shortest that hold them.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        Option(help="Folder or URL (s3://...) to write; a URL's is made in PADLESS_CACHE first. Required."),
    ] = None,
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
    image_root: Annotated[
        str | None, Option(help="Where relative paths of images begin. Default: where the records lie.")
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
    fim_rate: Annotated[
        float, Option(help="Share of the texts rearranged for filling in the middle, drawn by their content.")
    ] = 0.0,
    fim_spm_rate: Annotated[
        float,
        Option(help="Share of those in the order suffix, prefix, middle; others: prefix first."),
    ] = 0.5,
    fim_tokens: Annotated[
        str | None,
        Option(metavar="PREFIX,SUFFIX,MIDDLE", help="Tokens for it. Default: the tokenizer's own."),
    ] = None,
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
    engine: Annotated[
        str, Option(help="Who works: local (this machine), or ray (tasks of a Ray cluster; padless[ray]).")
    ] = "local",
    ray_address: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT",
            help="Head of the Ray cluster. Default: RAY_ADDRESS, else a cluster of this machine.",
        ),
    ] = None,
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
    from padless.packer.progress import progress

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
        engine=engine,
        ray_address=ray_address,
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
    with progress(quiet=quiet) as report:
        result = run_build(PackConfig(**given, progress=report))
    tell_result(result, profile=profile, as_json=as_json, quiet=quiet)
