"""A report for a terminal of 80 columns: the headline, then a table a question, each with its meaning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from padless.packer.meanings import MEANINGS, NOTABLE, PER_PACK, counted, gain_sentence
from padless.packer.measure import EXAMPLES
from padless.packer.mixture import UNITS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BAR = 24
_SOURCES, _ROWS = 12, 3
_NAME = 26


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print what `build_report` gave, the gain first and what to look at last."""
    _headline(report, console)
    if report["packs"]:
        _padding(report, console)
        _lengths(report, console)
        _packs(report, console)
        _steps(report, console)
    _fates(report, console)
    if report["packs"]:
        _idle(report, console)
        _alternatives(report, console)
        _notable(report, console)
    for warning in report["warnings"]:
        _line(console, "[yellow]warning:[/] {}", warning)


def _headline(report: dict[str, Any], console: Console) -> None:
    naive = report["padding"]["random"]
    size = "8" if "8" in naive else max(naive, key=int, default=None)
    used = report["utilization"]
    console.print(f"[bold green]{used:.1%}[/] of a batch is tokens now, {1 - used:.1%} is padding")
    if size is not None and report["sequences"]:
        before = 1 - naive[size]
        console.print(
            f"[bold]{before:.1%}[/] in batches of {size} padded to their longest: now "
            f"{used / before:.2f} times as much"
        )
        console.print(f"before {bar(before, 60)} {before:6.1%}", highlight=False)
        console.print(f"now    [green]{bar(used, 60)}[/] {used:6.1%}", highlight=False)
    _line(console, "{}", gain_sentence(report["speed_up"], report["model"]))
    console.print(
        f"{counted(report['sequences'], 'sequence')}, {counted(report['tokens'], 'token')} in "
        f"{counted(report['packs'], 'pack')} of {lengths_of(report)} "
        f"({no_fewer(report)} {report['bound_packs']:,})"
    )
    for bucket in report["buckets"] if len(report["buckets"]) > 1 else ():
        console.print(
            f"{bucket['max_length']:>9,} tokens: {counted(bucket['packs'], 'pack')}, "
            f"{counted(bucket['sequences'], 'sequence')}, {bucket['utilization']:.1%} full",
            highlight=False,
        )


def in_words(items: list[str]) -> str:
    """One, one and two; one, two and three."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def lengths_of(report: dict[str, Any]) -> str:
    """The lengths of a report's packs, in words."""
    return in_words([f"{bucket['max_length']:,}" for bucket in report["buckets"]])


def no_fewer(report: dict[str, Any]) -> str:
    """What the bound on packs bounds, in words that end before its number."""
    among = " of the same sequences at each length" if len(report["buckets"]) > 1 else ""
    return f"no plan{among} has fewer than"


def _padding(report: dict[str, Any], console: Console) -> None:
    table = _table(console, "padding", "batch size", "random", "", "grouped", " ")
    for size, share in report["padding"]["random"].items():
        grouped = report["padding"]["grouped"][size]
        table.add_row(size, f"{share:.1%}", bar(share, 16), f"{grouped:.1%}", bar(grouped, 16))
    console.print(table)


def _lengths(report: dict[str, Any], console: Console) -> None:
    before, after = report["record_lengths"], report["sequence_lengths"]
    names = ("min", "p5", "median", "mean", "p95", "p99", "max")
    table = _table(console, "lengths", "", *names)
    for word, facts in (("before", before), ("after", after)):
        table.add_row(word, *(f"{facts[name]:,.0f}" for name in names))
    console.print(table)
    counts, edges = after["histogram"]["sequences"], after["histogram"]["edges"]
    most = max(counts)
    for begin, end, count in zip(edges, edges[1:], counts, strict=False):
        filled = ("█" * max(round(count / most * 40), count > 0)).ljust(40)
        console.print(f"{begin:>9,} to {end - 1:<9,} {filled} {count:>11,}", highlight=False)


def _packs(report: dict[str, Any], console: Console) -> None:
    table = _table(console, "per_pack", "of a pack", "5 %", "median", "95 %")
    for key, word in PER_PACK.items():
        table.add_row(word, *(f"{value:,}" for value in report["per_pack"][key].values()))
    console.print(table)
    console.print(fullness(report), highlight=False)


def fullness(report: dict[str, Any]) -> str:
    """How many packs are full, and how many are not, in a sentence."""
    full, loose = report["pack_utilization"]["full"], sum(report["pack_utilization"]["packs"][:-1])
    return (
        f"{full:,} of {counted(report['packs'], 'pack')} {_are(full)} full to the last token, {loose:,} "
        f"{_are(loose)} 95 % full or less"
    )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _steps(report: dict[str, Any], console: Console) -> None:
    table = _table(console, "steps", "rows a step", "steps", "packs a step", "rows then", "steps then")
    for size, row in report["steps"].items():
        table.add_row(
            size,
            f"{row['unpacked_steps']:,}",
            f"{row['packs_per_step']:,}",
            f"{row['rows_per_step']:,.1f}",
            f"{row['packed_steps']:,}",
        )
    console.print(table)


def _fates(report: dict[str, Any], console: Console) -> None:
    _title(console, "fates")
    for name in ("records", "tokens_by_fate", "dropped_by_reason", "cut_by_reason"):
        parts = [f"{key} {count:,}" for key, count in report[name].items() if count]
        if parts:
            _line(console, "{}", f"{name.replace('_', ' ')}: {', '.join(parts)}")
    sources = sorted(report["by_source"], key=lambda source: -source["tokens"])
    if len(sources) > 1 or any(source["examples"] for source in sources):
        table = _plain("source", "records", "dropped", "tokens", "share", "trained", "cut")
        for source in sources[:_SOURCES]:
            table.add_row(
                _plain_text(short(source["source"], _NAME)),
                f"{source['records']:,}",
                f"{source['dropped']:,}",
                f"{source['tokens']:,}",
                f"{source['share']:.1%}",
                f"{source['trained_tokens'] / max(1, source['tokens']):.1%}",
                f"{source['cut_tokens']:,}",
            )
        console.print(table)
        if len(sources) > _SOURCES:
            console.print(f"... and {len(sources) - _SOURCES:,} more sources (--json has all)")
    for source in [source for source in sources if source["examples"]][:_SOURCES]:
        for reason, rows in source["examples"].items():
            _line(console, "{}", f"{reason}: {source['source']}, {_rows(rows)}")
    _mix(report, console)


def _rows(rows: list[int]) -> str:
    """The first rows of a reason, of which there may be more than were kept."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    return f"rows {', '.join(map(str, rows))}{', ...' if len(rows) >= EXAMPLES else ''}"


def _mix(report: dict[str, Any], console: Console) -> None:
    if report["mix"] is None:
        return
    unit = UNITS[report["mix"]["by"]]
    table = _table(console, "mix", "source", "weight", "asked", "given", unit)
    for one in report["mix"]["arguments"][:_SOURCES]:
        table.add_row(
            _plain_text(short(argument_name(one), _NAME)),
            *asked(one),
            f"{one['share']:.1%}",
            f"{one['amount']:,}",
        )
    console.print(table)
    if (more := len(report["mix"]["arguments"]) - _SOURCES) > 0:
        console.print(f"... and {more:,} more sources (--json has all)")


def argument_name(argument: dict[str, Any]) -> str:
    """What one argument of a mix named: its first file, and how many more."""
    more = argument["files"] - 1
    first: str = argument["sources"][0]
    return first + (f" and {more:,} more" if more else "")


def asked(argument: dict[str, Any]) -> tuple[str, str]:
    """The weight of an argument of a mix, and the share that it stands for."""
    if argument["weight"] is None:
        return "none", ""
    return f"{argument['weight']:g}", f"{argument['asked']:.1%}"


def _idle(report: dict[str, Any], console: Console) -> None:
    if not report["idle"]:
        return
    table = _table(console, "idle", "ranks", "random order", "", "balanced", " ")
    for ranks, shares in report["idle"].items():
        table.add_row(
            ranks,
            f"{shares['random']:.1%}",
            bar(shares["random"], 16),
            f"{shares['balanced']:.1%}",
            bar(shares["balanced"], 16),
        )
    console.print(table)


def _alternatives(report: dict[str, Any], console: Console) -> None:
    table = _table(
        console, "alternatives", "length", "strategy", "packs", "bound", "full", "a pack", "too long"
    )
    for row in report["alternatives"]:
        table.add_row(
            f"{row['max_length']:,}",
            row["strategy"],
            f"{row['packs']:,}",
            f"{row['bound_packs']:,}",
            f"{row['utilization']:.2%}",
            f"{row['sequences_per_pack']:,.1f}",
            f"{row['too_long']:,}",
            style="bold" if is_here(row, report) else "",
        )
    console.print(table)
    for note in notes_on_plans(report):
        console.print(note, highlight=False)


def notes_on_plans(report: dict[str, Any]) -> list[str]:
    """What is to be said of the alternatives."""
    found = []
    if len(report["buckets"]) > 1:
        found.append(f"Each of these has packs of one length; this folder's are of {lengths_of(report)}.")
    if (every := report["lengths_tried"]["every"]) > 1:
        found.append(f"Planned over one sequence in {every:,}, and scaled up.")
    return found


def is_here(row: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether an alternative is what the report is of; of packs of several lengths none is."""
    here = (report["strategy"], report["max_length"])
    return len(report["buckets"]) == 1 and (row["strategy"], row["max_length"]) == here


def _notable(report: dict[str, Any], console: Console) -> None:
    table = _table(console, "notable", "source", "row", "tokens", "trained", "cut", "what")
    for key, word in NOTABLE.items():
        for line in report["notable"].get(key, [])[:_ROWS]:
            table.add_row(
                _plain_text(short(line["source"], _NAME)),
                f"{line['row']:,}",
                f"{line['length'] + line['cut']:,}",
                f"{line['num_targets']:,}",
                f"{line['cut']:,}",
                word.split(" (")[0],
            )
    console.print(table)
    repeated = report["duplicates"]
    if repeated is None:
        console.print("duplicates: not looked for in more than 50 M tokens")
    else:
        repeat = "repeats" if repeated["sequences"] == 1 else "repeat"
        console.print(
            f"duplicates: {counted(repeated['sequences'], 'sequence')} "
            f"({counted(repeated['tokens'], 'token')}) {repeat} an earlier one"
        )


def print_comparison(reports: Sequence[dict[str, Any]], console: Console) -> None:
    """Two reports side by side, and by how much the second is more."""
    from rich.table import Table

    for letter, report in zip("AB", reports, strict=True):
        _line(console, "[bold]{}[/]", letter)
        _line(console, "  {}", report["path"] + (f", plan {report['plan']}" if report["plan"] else ""))
    table = Table(box=None)
    for name in ("", "A", "B", "B - A"):
        table.add_column(name, justify="right" if name else "left")
    for word, values, form in comparison(reports):
        first, second = values
        change = second - first
        sign = "" if not change else f"{change:+{form}}"
        table.add_row(word, f"{first:{form}}", f"{second:{form}}", sign)
    console.print(table)
    for letter, report in zip("AB", reports, strict=True):
        for warning in report["warnings"]:
            _line(console, "[yellow]warning:[/] {}", f"{letter}: {warning}")


def comparison(reports: Iterable[dict[str, Any]]) -> list[tuple[str, tuple[Any, Any], str]]:
    """(what, the two values, how to format them) for every number worth a look beside its like.

    Where one has packs of several lengths, each length has rows of its own, and 0 packs where it is not.
    """
    a, b = reports
    rows: list[tuple[str, tuple[Any, Any], str]] = [
        ("useful share", (a["utilization"], b["utilization"]), ".2%"),
        ("packs", (a["packs"], b["packs"]), ",d"),
        ("packs at least", (a["bound_packs"], b["bound_packs"]), ",d"),
        *_by_length(a, b),
        ("sequences", (a["sequences"], b["sequences"]), ",d"),
        ("tokens", (a["tokens"], b["tokens"]), ",d"),
    ]
    for name, values in a["tokens_by_fate"].items():
        rows.append((f"tokens {name}", (values, b["tokens_by_fate"][name]), ",d"))
    for name in ("in", "truncated", "split", "dropped"):
        rows.append((f"records {name}", (a["records"][name], b["records"][name]), ",d"))
    for size in ("8", "32"):
        shares = (a["padding"]["random"].get(size, 0.0), b["padding"]["random"].get(size, 0.0))
        rows.append((f"padding unpacked, batch {size}", shares, ".2%"))
    if a["per_pack"]["tokens"] and b["per_pack"]["tokens"]:
        for key, word in PER_PACK.items():
            values = (a["per_pack"][key]["median"], b["per_pack"][key]["median"])
            rows.append((f"{word} of a pack, median", values, ",d"))
    for ranks in [ranks for ranks in a["idle"] if ranks in b["idle"]]:
        shares = (a["idle"][ranks]["random"], b["idle"][ranks]["random"])
        rows.append((f"{ranks} ranks wait", shares, ".2%"))
    return rows


def _by_length(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, tuple[Any, Any], str]]:
    if len(a["buckets"]) == len(b["buckets"]) == 1:
        return [("pack length", (a["max_length"], b["max_length"]), ",d")]
    of_a, of_b = ({one["max_length"]: one for one in report["buckets"]} for report in (a, b))
    rows: list[tuple[str, tuple[Any, Any], str]] = []
    for length in sorted(of_a.keys() | of_b.keys()):
        both = (of_a.get(length), of_b.get(length))
        packs = tuple(one["packs"] if one else 0 for one in both)
        rows.append((f"packs of {length:,}", (packs[0], packs[1]), ",d"))
        if all(packs):
            shares = tuple(one["utilization"] for one in both if one)
            rows.append(("useful share of those", (shares[0], shares[1]), ".2%"))
    return rows


def bar(share: float, width: int = _BAR) -> str:
    """A share as a bar of so many characters."""
    return ("█" * round(share * width)).ljust(width, "·")


def short(name: str, width: int) -> str:
    """A name of at most `width` characters, its end kept: paths end in what tells them apart."""
    return name if len(name) <= width else "…" + name[1 - width :]


def _title(console: Console, section: str) -> None:
    from rich.text import Text

    title, meaning = MEANINGS[section]
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Text(meaning, style="dim"))


def _table(console: Console, section: str, *columns: str) -> Table:
    _title(console, section)
    return _plain(*columns)


def _plain(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        words = (
            not name.strip()
            or name in ("source", "of a pack", "strategy", "what")
            or number == 0
            and not name
        )
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    return table


def _plain_text(text: str) -> Any:
    from rich.text import Text

    from padless.packer.inspect import visible

    return Text(visible(text))


def _line(console: Console, form: str, *texts: str) -> None:
    """A line whose texts came from elsewhere and are no markup."""
    from rich.markup import escape

    from padless.packer.inspect import visible

    console.print(form.format(*(escape(visible(text)) for text in texts)), highlight=False)
