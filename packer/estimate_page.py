"""An estimate as a page of one file: what batches would waste, what packs would hold, how sure that is."""

from __future__ import annotations

from typing import Any

from padless.packer.charts import brief, histogram, lines, strip
from padless.packer.estimate_view import HOW, best_plan, plus_minus
from padless.packer.meanings import MEANINGS
from padless.packer.page import name, page, section, table, text

_SOURCES = 40


def estimate_page(found: dict[str, Any]) -> str:
    """The page of what `estimate` gave."""
    before, best = found["padding"]["8"], best_plan(found)
    title = f"{before['value']:.1%}{plus_minus(before['error'])} of a batch of 8 would be padding"
    headline = f"<strong>{before['value']:.1%}</strong>{plus_minus(before['error'])} of a batch of 8 would be"
    then = (
        ""
        if best is None
        else f"<p>{1 - best['utilization']:.1%}{plus_minus(best['utilization_error'])} of a pack of "
        f"{best['max_length']:,} tokens ({text(best['strategy'])}) would be empty.</p>"
    )
    body = [
        f'<header><p class="quiet">An estimate, before anything is packed</p><h1>{headline} padding</h1>'
        f"{then}</header>",
        f'<div class="pair">{_padding(found)}{_lengths(found)}</div>',
        _plans(found),
        _sources(found),
    ]
    footer = '<p class="quiet">Made by pack-dataset estimate; ± is half of a 95 % interval.</p>'
    return page(title, body, footer)


def _padding(found: dict[str, Any]) -> str:
    shares = found["padding"]
    chart = lines(
        "Share of padding by batch size",
        "rows in a batch",
        list(shares),
        [("random", "was", [share["value"] for share in shares.values()])],
    )
    rows = [(size, f"{share['value']:.1%}{plus_minus(share['error'])}") for size, share in shares.items()]
    numbers = table("Padding by batch size", ("rows", "padding"), rows, words=())
    meaning = "Share of padding in random batches of that size, each padded to its longest sequence."
    return section("padding", MEANINGS["padding"][0], meaning, chart, numbers)


def _lengths(found: dict[str, Any]) -> str:
    facts, mean = found["sequence_lengths"], found["tokens_per_sequence"]
    edges = facts["histogram"]["edges"]
    chart = histogram(
        "Sequences of the sample by their length in tokens",
        "tokens, logarithmic",
        [brief(edge) for edge in edges],
        facts["histogram"]["sequences"],
        every=max(1, -(-len(edges) // 7)),
    )
    names = {"p5": "5 %", "median": "median", "p95": "95 %", "p99": "99 %", "max": "longest seen"}
    rows = [("mean", f"{mean['value']:,.0f}{plus_minus(mean['error'], ',.0f')}")]
    rows += [(word, f"{facts[name]:,}") for name, word in names.items()]
    numbers = table("Lengths in tokens", ("tokens", "of a sequence"), rows)
    meaning = "Tokens of a sequence, on a logarithmic scale, before anything is cut."
    return section("lengths", MEANINGS["lengths"][0], meaning, chart, numbers)


def _plans(found: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['max_length']:,}",
            text(row["strategy"]),
            f"{row['utilization']:.1%}{plus_minus(row['utilization_error'])}",
            strip([("now", row["utilization"])], f"{row['utilization']:.1%} full"),
            f"{brief(row['packs'])}{plus_minus(row['packs_error'], None)}",
            f"{row['sequences_per_pack']:,.1f}{plus_minus(row['sequences_per_pack_error'], ',.1f')}",
            f"{row['too_long']:.2%}{plus_minus(row['too_long_error'], '.2%')}",
        )
        for row in found["plans"]
    ]
    columns = ("length", "strategy", "full", "(as a bar)", "packs", "sequences a pack", "too long")
    meaning = "All records packed, as the sample says. Sequences over the length are left out, and counted."
    return section(
        "plans", "Strategies and lengths", meaning, table("Plans", columns, rows, words=(1, 3), wide=(3, 5))
    )


def _sources(found: dict[str, Any]) -> str:
    tokens = found["of_tokens"]
    rows = [
        (
            name(source["source"]),
            text(HOW[source["how"]].format(**source)),
            f"{source['dropped']:,}",
            f"{source['tokens']:,}",
        )
        for source in found["sources"][:_SOURCES]
    ]
    more = len(found["sources"]) - _SOURCES
    columns = ("source", "taken", "dropped", "tokens of these")
    meaning = (
        f"{brief(tokens['value'])}{plus_minus(tokens['error'], None)} tokens in all, "
        f"{found['trained_share']:.1%} of them trained. Each source counts by the records it has."
    )
    return section(
        "sources",
        "What was looked at",
        meaning,
        table("Sources", columns, rows, words=(0, 1), wide=(2,), long=(0, 1)),
        f'<p class="quiet">… and {more:,} more sources.</p>' if more > 0 else "",
    )
