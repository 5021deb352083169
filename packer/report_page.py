"""A report as a page to be looked at, sent around and printed: one file, nothing beside it.

The headline comes first, then what is wrong, then one question a section. A page stays small whatever the
data: sources beyond a few dozen are counted, names are cut, nothing grows with the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from padless.packer.charts import brief, histogram, key, lines, strip
from padless.packer.meanings import MEANINGS, PER_PACK, counted, gain_sentence
from padless.packer.page import page, prose, section, table, text
from padless.packer.report_records import fates, mix, notable
from padless.packer.report_view import comparison, fullness, is_here, lengths_of, no_fewer, notes_on_plans


def report_page(report: dict[str, Any]) -> str:
    """The page of what `build_report` gave."""
    name = PurePath(report["path"]).name or report["path"]
    body = [_header(report, name), _facts(report), _notes(report["warnings"])]
    if report["packs"]:
        body += [
            f'<div class="pair">{_padding(report)}{_utilization(report)}</div>',
            f'<div class="pair">{_lengths(report)}{_per_pack(report)}</div>',
            _alternatives(report),
            f'<div class="pair">{_steps(report)}{_idle(report)}</div>',
        ]
    body += [fates(report), mix(report)]
    if report["packs"]:
        body.append(notable(report))
    return page(f"{name}: {report['utilization']:.1%} tokens", body, _footer())


def comparison_page(reports: Sequence[dict[str, Any]]) -> str:
    """Two reports side by side."""
    names = [PurePath(report["path"]).name for report in reports]
    rows = [
        (
            text(word),
            f"{first:{form}}",
            f"{second:{form}}",
            f"{second - first:+{form}}" if second != first else "",
        )
        for word, (first, second), form in comparison(reports)
    ]
    shares = [report["utilization"] for report in reports]
    body = [
        f'<header><p class="quiet">{text(names[0])} and {text(names[1])}</p>'
        f"<h1><strong>{shares[0]:.1%}</strong> and <strong>{shares[1]:.1%}</strong> of a batch is "
        "tokens</h1></header>",
        _bars([(f"{letter}", "now", share) for letter, share in zip("AB", shares, strict=True)]),
        section(
            "numbers",
            "Side by side",
            f"A is {reports[0]['path']}, B is {reports[1]['path']}. {MEANINGS['useful'][1]}",
            table("Both folders", ("(number)", "A", "B", "B - A"), rows, long=(0,)),
        ),
    ]
    for letter, report in zip("AB", reports, strict=True):
        body.append(_notes([f"{letter}: {warning}" for warning in report["warnings"]]))
    return page(f"{names[0]} and {names[1]}", body, _footer())


def _header(report: dict[str, Any], name: str) -> str:
    used = report["utilization"]
    plan = f", plan {text(report['plan'])}" if report["plan"] else ""
    if not report["sequences"]:
        return (
            f'<header><p class="quiet">{text(name)}{plan}</p><h1>There is nothing in these packs</h1>'
            f"<p>{report['records']['dropped']:,} of {report['records']['in']:,} records were "
            "dropped.</p></header>"
        )
    naive = report["padding"]["random"]
    size = "8" if "8" in naive else max(naive, key=int)
    before = 1 - naive[size]
    return (
        f'<header><p class="quiet">{text(name)}{plan}: {counted(report["sequences"], "sequence")} in '
        f"{counted(report['packs'], 'pack')} of {lengths_of(report)} tokens</p>"
        f"<h1><strong>{used:.1%}</strong> of a batch is tokens, where it was {before:.1%}</h1>"
        + _bars([("before", "was", before), ("packed", "now", used)])
        + f"<p>{prose(gain_sentence(report['speed_up'], report['model']))}</p>"
        f"<details><summary>What these numbers mean</summary><p>Before: batches of {size} in random order, "
        f"each padded to its longest sequence. {prose(MEANINGS['useful'][1])}</p>"
        f"<p>{prose(MEANINGS['speed_up'][1])}</p></details></header>"
    )


def _bars(rows: Sequence[tuple[str, str, float]]) -> str:
    return "".join(
        f'<div class="{kind}-bar"><span>{text(word)}</span>'
        f"{strip([(kind, share)], f'{word}: {share:.1%} tokens')}<b>{share:.1%}</b></div>"
        for word, kind, share in rows
    )


def _facts(report: dict[str, Any]) -> str:
    fates, tokens = report["tokens_by_fate"], report["tokens"]
    trained = fates["trained"] / tokens if tokens else 0.0
    rows = [
        ("Packs", f"{report['packs']:,}", f"{no_fewer(report)} {report['bound_packs']:,}"),
        ("Tokens", brief(tokens), f"{tokens:,} in all packs"),
        ("Trained", f"{trained:.1%}", f"{fates['trained']:,} tokens with a label"),
        ("Records", brief(report["records"]["in"]), f"{report['records']['dropped']:,} of them dropped"),
        ("Cut", brief(fates["cut"]), "tokens in no pack"),
    ]
    if report["duplicates"] is not None:
        repeated = report["duplicates"]
        rows.append(("Duplicates", brief(repeated["sequences"]), "sequences that repeat an earlier one"))
    return '<dl class="facts">{}</dl>'.format(
        "".join(
            f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(meaning)}</small></dd></div>"
            for name, value, meaning in rows
        )
    )


def _notes(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    items = "".join(f"<li>{prose(warning)}</li>" for warning in warnings[:50])
    return f'<ul class="notes" aria-label="Worth a look">{items}</ul>'


def _section(name: str, *body: str) -> str:
    return section(name, *MEANINGS[name], *body)


def _padding(report: dict[str, Any]) -> str:
    random, grouped = report["padding"]["random"], report["padding"]["grouped"]
    packed = 1 - report["utilization"]
    chart = lines(
        "Share of padding by batch size",
        "rows in a batch",
        list(random),
        [
            ("random", "was", list(random.values())),
            ("grouped", "third", list(grouped.values())),
            ("packed", "now", [packed] * len(random)),
        ],
    )
    numbers = table(
        "Padding by batch size",
        ("rows", "random", "grouped", "packed"),
        [(size, f"{random[size]:.1%}", f"{grouped[size]:.1%}", f"{packed:.1%}") for size in random],
        words=(),
    )
    return _section("padding", chart, _details(numbers))


def _details(numbers: str) -> str:
    return f"<details><summary>The numbers</summary>{numbers}</details>"


def _utilization(report: dict[str, Any]) -> str:
    found = report["pack_utilization"]
    edges = [f"{edge:.0%}" for edge in found["edges"]]
    chart = histogram(
        "Packs by how full they are", "tokens of the pack length", edges, found["packs"], every=5
    )
    return _section("pack_utilization", chart, f'<p class="quiet">{fullness(report)}.</p>', _buckets(report))


def _buckets(report: dict[str, Any]) -> str:
    if len(report["buckets"]) == 1:
        return ""
    rows = [
        (
            f"{bucket['max_length']:,}",
            f"{bucket['packs']:,}",
            f"{bucket['sequences']:,}",
            f"{bucket['utilization']:.2%}",
        )
        for bucket in report["buckets"]
    ]
    return table("Packs by their length", ("pack length", "packs", "sequences", "full"), rows, words=())


def _lengths(report: dict[str, Any]) -> str:
    before, after = report["record_lengths"], report["sequence_lengths"]
    edges = sorted({*before["histogram"]["edges"], *after["histogram"]["edges"]})
    counts = _on_edges(after["histogram"], edges)
    outline = _on_edges(before["histogram"], edges)

    def place(length: float) -> float:
        """Where a length lies, in bars from the left."""
        number = max(n for n, edge in enumerate(edges) if edge <= max(length, edges[0]))
        if number == len(edges) - 1:
            return float(number)
        low, high = math.log(edges[number]), math.log(edges[number + 1])
        return number + (math.log(max(length, edges[0])) - low) / max(high - low, 1e-9)

    marks = [(place(after["median"]), f"median {after['median']:,}")]
    if place(after["p95"]) - marks[0][0] > 0.36 * len(counts):
        marks.append((place(after["p95"]), f"95 % {after['p95']:,}"))
    chart = histogram(
        "Sequences by their length in tokens",
        "tokens, logarithmic",
        [brief(edge) for edge in edges],
        counts,
        outline=outline if outline != counts else None,
        marks=marks,
        every=max(1, math.ceil(len(edges) / 7)),
    )
    names = {"min": "shortest", "p5": "5 %", "median": "median", "mean": "mean", "p95": "95 %", "p99": "99 %"}
    names["max"] = "longest"
    rows = [(word, f"{before[name]:,.0f}", f"{after[name]:,.0f}") for name, word in names.items()]
    legend = (
        key([("third", "before cutting and dropping"), ("now", "as packed")]) if outline != counts else ""
    )
    numbers = table("Lengths in tokens", ("tokens", "before", "after"), rows)
    return _section("lengths", legend, chart, _details(numbers))


def _on_edges(found: dict[str, Any], edges: Sequence[int]) -> list[int]:
    """A histogram's counts in bins that begin at its own edges, and others that hold nothing."""
    counts = dict(zip(found["edges"], found["sequences"], strict=False))
    return [counts.get(edge, 0) for edge in edges[:-1]]


def _per_pack(report: dict[str, Any]) -> str:
    rows = [
        (text(word), *(f"{value:,}" for value in report["per_pack"][name].values()))
        for name, word in PER_PACK.items()
    ]
    return _section("per_pack", table("What a pack holds", ("of a pack", "5 %", "median", "95 %"), rows))


def _steps(report: dict[str, Any]) -> str:
    rows = [
        (
            size,
            f"{row['unpacked_steps']:,}",
            f"{row['packs_per_step']:,}",
            f"{row['rows_per_step']:,.1f}",
            f"{row['packed_steps']:,}",
        )
        for size, row in report["steps"].items()
    ]
    columns = ("rows a step", "steps", "packs a step", "rows then", "steps then")
    return _section("steps", table("Steps of an epoch", columns, rows, words=()))


def _idle(report: dict[str, Any]) -> str:
    if not report["idle"]:
        return _section("idle", "<p>There are too few packs for several ranks.</p>")
    rows = []
    for ranks, shares in report["idle"].items():
        for word, kind in (("random", "was"), ("balanced", "now")):
            label = f"{ranks} ranks, {word}: {shares[word]:.1%} of the time"
            rows.append((f"{ranks}, {word}", f"{shares[word]:.1%}", strip([(kind, shares[word])], label)))
    return _section("idle", table("Waiting by ranks", ("ranks", "waiting", "(as a bar)"), rows, words=(0, 2)))


def _alternatives(report: dict[str, Any]) -> str:
    rows, here = [], []
    for row in report["alternatives"]:
        here.append(is_here(row, report))
        rows.append(
            (
                f"{row['max_length']:,}",
                text(row["strategy"]),
                f"{row['packs']:,}",
                f"{row['bound_packs']:,}",
                f"{row['utilization']:.2%}",
                strip([("now", row["utilization"])], f"{row['utilization']:.1%} full"),
                f"{row['sequences_per_pack']:,.1f}",
                f"{row['too_long']:,}",
            )
        )
    notes = "".join(f'<p class="quiet">{note}</p>' for note in notes_on_plans(report))
    columns = ("length", "strategy", "packs", "bound", "full", "(as a bar)", "sequences a pack", "too long")
    return _section(
        "alternatives",
        table("Other plans", columns, rows, words=(1, 5), wide=(3, 5, 6), here=here),
        notes,
    )


def _footer() -> str:
    from padless.packer.identity import version_of

    return f'<p class="quiet">Made by pack-dataset report, padless {text(version_of("padless"))}.</p>'
