"""What packing would give, before anything is packed: from the first records of each source.

The records are tokenized as a build would (the same stages, in a folder that is gone afterwards), without a
limit of length; what several lengths and strategies would make of them follows from their lengths. The error
is half of a 95 % interval by resampled lengths (bootstrap, Efron 1979). It stands for chance alone: a
source whose first records are unlike its others is estimated wrongly, and several sources count by what was
taken of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.packer.alternatives import choices_around, try_plans
from padless.packer.config import INT32_MAX, PackConfig
from padless.packer.errors import InputError
from padless.packer.lengths import Lengths
from padless.packer.measure import measure
from padless.packer.pipeline import pack_dataset
from padless.packer.report import BATCH_SIZES, length_facts
from padless.packer.sources.splits import are_several
from padless.runtime.format import Manifest
from padless.runtime.reader import Array, PackedReader

if TYPE_CHECKING:
    from rich.console import Console

RECORDS = 2000
_RESAMPLES = 12
_FOR_PLANS = 10_000
"""Sequences to plan, at least."""


def estimate(config: PackConfig) -> dict[str, Any]:
    """The estimate for `config`, which names the records a source (`limit`) and the pack length wanted.

    Shares are fractions, `error` beside each is half of its 95 % interval and 0 where all records were taken.
    Raises what a build raises for its sources and tokenizer.
    """
    limit = config.limit or RECORDS
    if are_several(config.split):
        raise InputError(f"an estimate is of one split, and --split is {config.split}: name one")
    parts: list[Array] = []
    sources = []
    trained = 0
    for spec in config.sources:
        lengths, facts = _sample(replace(config, sources=(spec,), limit=limit))
        parts.append(lengths)
        trained += facts.pop("trained_tokens")
        sources.append({"source": str(spec), **facts, "is_sample": facts["records"] >= limit})
    lengths = np.concatenate(parts)
    is_sample = any(source["is_sample"] for source in sources)
    generator = np.random.Generator(np.random.PCG64(config.seed))
    again = [generator.choice(lengths, len(lengths)) for _ in range(_RESAMPLES if is_sample else 0)]
    return {
        "records": sum(source["records"] for source in sources),
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "is_sample": is_sample,
        "sources": sources,
        "tokens_per_sequence": _with_error(lambda some: float(some.mean()), lengths, again),
        "trained_share": trained / max(1, int(lengths.sum())),
        "sequence_lengths": length_facts(Lengths.of(lengths)),
        "padding": {str(size): _with_error(_padding_at(size), lengths, again) for size in BATCH_SIZES},
        "plans": _plans(config, lengths, again),
    }


def _sample(config: PackConfig) -> tuple[Array, dict[str, int]]:
    """The lengths of a source's first records, in their order, and what became of the records."""
    with tempfile.TemporaryDirectory(prefix="padless-estimate-") as scratch:
        manifest = pack_dataset(
            replace(
                config,
                output=str(Path(scratch) / "sample"),
                max_length=INT32_MAX,
                align=1,
                strategy="none",
                overflow="drop",
                on_bad_record="drop",
                max_drop_share=1.0,
                force=False,
            )
        )
        assert isinstance(manifest, Manifest), "an estimate asks for one split"
        reader = PackedReader(Path(scratch) / "sample")
        _, lengths = reader.pack_sizes()
        measured = measure(reader)
        return lengths.astype(np.int64), {
            "records": manifest.statistics["records"]["in"],
            "dropped": manifest.statistics["records"]["dropped"],
            "sequences": len(lengths),
            "tokens": measured.lengths.tokens,
            "trained_tokens": manifest.statistics["trained_tokens"],
        }


def _plans(config: PackConfig, lengths: Array, again: list[Array]) -> list[dict[str, Any]]:
    """Several strategies and lengths, each with its errors."""
    choices = choices_around(config.strategy, config.longest, config.align)
    cap, align = config.max_sequences_per_pack, config.align
    found = []
    for choice in choices:
        rows = try_plans(_many(lengths), [choice], max_sequences_per_pack=cap, align=align)
        if not rows:
            continue
        (row,) = rows
        others = [
            other
            for some in again
            for other in try_plans(_many(some), [choice], max_sequences_per_pack=cap, align=align)
        ]
        found.append(
            {
                "strategy": row["strategy"],
                "max_length": row["max_length"],
                "utilization": row["utilization"],
                "utilization_error": _error([other["utilization"] for other in others]),
                "sequences_per_pack": row["sequences_per_pack"],
                "sequences_per_pack_error": _error([other["sequences_per_pack"] for other in others]),
                "too_long": row["too_long"] / len(_many(lengths)),
                "too_long_error": _error([other["too_long"] / len(_many(lengths)) for other in others]),
            }
        )
    return found


def _padding_at(size: int) -> Callable[[Array], float]:
    return lambda lengths: Lengths.of(lengths).padding(size)


def _with_error(of: Callable[[Array], float], lengths: Array, again: list[Array]) -> dict[str, float]:
    return {"value": of(lengths), "error": _error([of(some) for some in again])}


def _error(values: list[float]) -> float:
    """Half of a 95 % interval around values that are normally distributed."""
    return 1.96 * float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _many(lengths: Array) -> Array:
    """The lengths as often as makes a half-filled last pack no matter."""
    return np.tile(lengths, -(-_FOR_PLANS // len(lengths)))


def print_estimate(found: dict[str, Any], console: Console) -> None:
    """Print what `estimate` gave."""
    from rich.markup import escape
    from rich.table import Table

    from padless.packer.inspect import visible
    from padless.packer.report_view import bar

    best = max(found["plans"], key=lambda row: row["utilization"], default=None)
    before = found["padding"]["8"]
    console.print(
        f"[bold]{before['value']:.1%}[/]{_plus_minus(before['error'])} of a batch of 8 would be padding"
    )
    if best is not None:
        console.print(
            f"[bold green]{1 - best['utilization']:.1%}[/] of a pack of {best['max_length']:,} "
            f"({best['strategy']})"
        )
    for source in found["sources"]:
        how = "the first" if source["is_sample"] else "all its"
        line = f"{source['source']}: {how} {source['records']:,} records, {source['dropped']:,} dropped"
        console.print(escape(visible(line)), highlight=False)
    mean, facts = found["tokens_per_sequence"], found["sequence_lengths"]
    console.print(
        f"{found['sequences']:,} sequences of {mean['value']:,.0f}{_plus_minus(mean['error'], ',.0f')} "
        "tokens, "
        f"median {facts['median']:,}, 95 % mark {facts['p95']:,}, longest {facts['max']:,}; "
        f"{found['trained_share']:.1%} of the tokens trained",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("batch size", "padding", ""):
        table.add_column(name, justify="right" if name else "left")
    for size, share in found["padding"].items():
        table.add_row(size, f"{share['value']:.1%}{_plus_minus(share['error'])}", bar(share["value"], 24))
    console.print(table)
    table = Table(box=None, pad_edge=False)
    for name in ("length", "strategy", "full", "sequences a pack", "too long"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in found["plans"]:
        table.add_row(
            f"{row['max_length']:,}",
            row["strategy"],
            f"{row['utilization']:.1%}{_plus_minus(row['utilization_error'])}",
            f"{row['sequences_per_pack']:,.1f}{_plus_minus(row['sequences_per_pack_error'], ',.1f')}",
            f"{row['too_long']:.2%}{_plus_minus(row['too_long_error'], '.2%')}",
        )
    console.print(table)
    if found["is_sample"]:
        console.print("± is half of a 95 % interval for records in random order; --limit takes more of them")


def _plus_minus(error: float, form: str = ".1%") -> str:
    return f" ± {error:{form}}" if error else ""
