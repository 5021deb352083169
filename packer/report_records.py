"""The sections of the report's page about records and where they came from; names and rows are bounded."""

from __future__ import annotations

from typing import Any

from padless.packer.charts import key, strip
from padless.packer.meanings import MEANINGS, NOTABLE, counted
from padless.packer.mixture import UNITS
from padless.packer.page import name, section, table, text
from padless.packer.report_view import argument_name, asked

_SOURCES, _REASONS, _ROWS = 40, 100, 3


def fates(report: dict[str, Any]) -> str:
    """What became of the tokens of each source, and why."""
    counts = report["tokens_by_fate"]
    whole = max(1, sum(counts.values()))
    shares = [
        ("now", counts["trained"] / whole),
        ("third", counts["masked"] / whole),
        ("was", counts["cut"] / whole),
    ]
    legend = key(
        [
            ("now", f"trained {counts['trained']:,}"),
            ("third", f"masked {counts['masked']:,}"),
            ("was", f"cut {counts['cut']:,}"),
        ]
    )
    sources = sorted(report["by_source"], key=lambda source: (-source["tokens"], source["source"]))
    rows, reasons = [], []
    for source in sources[:_SOURCES]:
        mine = max(1, source["tokens"] + source["cut_tokens"])
        rows.append(
            (
                name(source["source"]),
                f"{source['records']:,}",
                f"{source['dropped']:,}",
                f"{source['tokens']:,}",
                f"{source['share']:.1%}",
                strip(
                    [
                        ("now", source["trained_tokens"] / mine),
                        ("third", source["masked_tokens"] / mine),
                        ("was", source["cut_tokens"] / mine),
                    ],
                    f"{source['trained_tokens']:,} trained, {source['masked_tokens']:,} masked, "
                    f"{source['cut_tokens']:,} cut",
                ),
            )
        )
    for source in sources:
        for reason, examples in list(source["examples"].items())[:10]:
            reasons.append(
                (
                    name(source["source"]),
                    text(reason),
                    f"{source['dropped_by_reason'].get(reason, 0):,}",
                    f"{source['cut_by_reason'].get(reason, 0):,}",
                    text(", ".join(map(str, examples))),
                )
            )
    more = len(sources) - _SOURCES
    body = [
        legend,
        strip(shares, "all tokens: trained, masked, cut"),
        table(
            "Tokens by source",
            ("source", "records", "dropped", "tokens", "share of tokens", "trained, masked, cut"),
            rows,
            words=(0, 5),
            wide=(1, 2, 4),
            long=(0,),
        ),
        f'<p class="quiet">… and {more:,} more sources.</p>' if more > 0 else "",
    ]
    if reasons:
        columns = ("source", "reason", "records dropped", "tokens cut", "first rows")
        body.append(table("Reasons", columns, reasons[:_REASONS], words=(0, 1, 4), wide=(2,), long=(0,)))
    return section("fates", *MEANINGS["fates"], *body)


def mix(report: dict[str, Any]) -> str:
    """What the arguments of a mix were asked to give, and gave; nothing where nothing was mixed."""
    if report["mix"] is None:
        return ""
    given = report["mix"]["arguments"]
    rows = [
        (
            name(argument_name(one)),
            *asked(one),
            f"{one['share']:.1%}",
            strip([("now", one["share"])], f"{one['share']:.1%} given"),
            f"{one['amount']:,}",
        )
        for one in given[:_SOURCES]
    ]
    columns = ("source", "weight", "asked", "given", "(as a bar)", UNITS[report["mix"]["by"]])
    more = len(given) - _SOURCES
    return section(
        "mix",
        *MEANINGS["mix"],
        table("Shares of the mix", columns, rows, words=(0, 4), wide=(1, 4), long=(0,)),
        f'<p class="quiet">… and {more:,} more.</p>' if more > 0 else "",
    )


def notable(report: dict[str, Any]) -> str:
    """The ends of the scale, and what is there more than once."""
    rows = [
        (
            text(word.split(" (")[0]),
            f"{line['length'] + line['cut']:,}",
            f"{line['num_targets']:,}",
            f"{line['cut']:,}",
            name(line["source"]),
            f"{line['row']:,}",
            "none" if line["pack"] < 0 else f"{line['pack']:,}",
        )
        for kind, word in NOTABLE.items()
        for line in report["notable"].get(kind, [])[:_ROWS]
    ]
    columns = ("what", "tokens", "trained", "cut", "source", "row", "pack")
    return section(
        "notable",
        *MEANINGS["notable"],
        table("Longest and oddest", columns, rows, words=(0, 4), wide=(2, 3, 6), long=(4,)),
        _groups(report),
    )


def _groups(report: dict[str, Any]) -> str:
    repeated = report["duplicates"]
    if not repeated or not repeated["groups"]:
        return ""
    rows = [
        (
            f"{group['copies']:,}",
            f"{group['length']:,}",
            "; ".join(
                f"{name(report['by_source'][source]['source'])} row {row}" for source, row in group["rows"]
            ),
        )
        for group in repeated["groups"]
    ]
    title, meaning = MEANINGS["duplicates"]
    copied = f"{counted(repeated['sequences'], 'sequence')}, {counted(repeated['tokens'], 'token')}"
    return (
        f'<h2 class="next">{title}</h2><p class="meaning">{meaning} {copied}; the most copied:</p>'
        + table("Duplicates", ("copies", "tokens", "where"), rows, words=(2,), long=(2,))
    )
