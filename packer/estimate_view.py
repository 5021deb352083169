"""An estimate for a terminal of 80 columns: what it would give, and how sure that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from padless.packer.charts import brief
from padless.packer.inspect import visible
from padless.packer.report_view import bar

if TYPE_CHECKING:
    from rich.console import Console

HOW = {
    "all": "all {records:,} of its records",
    "random": "{records:,} of about {of_records:,} records, drawn at random",
    "part": "{records:,} records drawn at random from its first part (it is read from its start)",
    "first": "the first {records:,} records",
}


def print_estimate(found: dict[str, Any], console: Console) -> None:
    """Print what `estimate` gave."""
    from rich.markup import escape
    from rich.table import Table

    best = best_plan(found)
    before = found["padding"]["8"]
    console.print(
        f"[bold]{before['value']:.1%}[/]{plus_minus(before['error'])} of a batch of 8 would be padding"
    )
    if best is not None:
        console.print(
            f"[bold green]{1 - best['utilization']:.1%}[/]{plus_minus(best['utilization_error'])} of a pack "
            f"of {best['max_length']:,} ({best['strategy']})"
        )
    for source in found["sources"]:
        how = HOW[source["how"]].format(**source)
        line = f"{source['source']}: {how}, {source['dropped']:,} dropped"
        console.print(escape(visible(line)), highlight=False)
    mean, facts, tokens = found["tokens_per_sequence"], found["sequence_lengths"], found["of_tokens"]
    console.print(
        f"{brief(tokens['value'])}{plus_minus(tokens['error'], None)} tokens in all, sequences of "
        f"{mean['value']:,.0f}{plus_minus(mean['error'], ',.0f')}: median {facts['median']:,}, 95 % mark "
        f"{facts['p95']:,}, longest {facts['max']:,}; {found['trained_share']:.1%} of the tokens trained",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("batch size", "padding", ""):
        table.add_column(name, justify="right" if name else "left")
    for size, share in found["padding"].items():
        table.add_row(size, f"{share['value']:.1%}{plus_minus(share['error'])}", bar(share["value"], 24))
    console.print(table)
    table = Table(box=None, pad_edge=False)
    for name in ("length", "strategy", "full", "packs", "sequences a pack", "too long"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for row in found["plans"]:
        table.add_row(
            f"{row['max_length']:,}",
            row["strategy"],
            f"{row['utilization']:.1%}{plus_minus(row['utilization_error'])}",
            f"{brief(row['packs'])}{plus_minus(row['packs_error'], None)}",
            f"{row['sequences_per_pack']:,.1f}{plus_minus(row['sequences_per_pack_error'], ',.1f')}",
            f"{row['too_long']:.2%}{plus_minus(row['too_long_error'], '.2%')}",
        )
    console.print(table)
    if found["is_sample"]:
        part = any(source["how"] in ("first", "part") for source in found["sources"])
        so_far = ", and says nothing of what was not read" if part else ""
        console.print(f"± is half of a 95 % interval{so_far}; --limit draws more records")


def best_plan(found: dict[str, Any]) -> dict[str, Any] | None:
    """The fullest of the plans at the length that was asked for: the first that is tried."""
    here = [row for row in found["plans"] if row["max_length"] == found["max_length"]]
    return max(here or found["plans"], key=lambda row: row["utilization"], default=None)


def plus_minus(error: float, form: str | None = ".1%") -> str:
    """The error behind a value; nothing where there is none."""
    if not error:
        return ""
    return f" ± {brief(error) if form is None else format(error, form)}"
