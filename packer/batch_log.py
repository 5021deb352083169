"""What a trainer wasted, from a log of the lengths in its batches: `report --batches FILE`.

    JSONL   a batch a line: [120, 45, 380], or {"lengths": [120, 45, 380], "padded_to": 512}
    CSV     a sequence a line, with the columns batch and length (and padded_to); those of a batch together

A batch is padded to its longest sequence unless the log says to what. Beside it stands what packs of the same
sequences would hold.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from padless.packer.alternatives import try_plans
from padless.packer.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

_WORST = 5
_MOST = 2**31 - 1
_STRATEGIES = ("bfd", "spread", "ordered")
_WAYS = "a JSON line is a list of lengths or has `lengths`, a CSV file has the columns batch and length"


class Batch(NamedTuple):
    """A batch as it was trained on."""

    name: str
    lengths: list[int]
    padded_to: int


def report_batches(path: str | Path) -> dict[str, Any]:
    """Padding of the batches in a log, and packs of their sequences; shares are fractions.

    Raises InputError for a line that is no batch, with its number.
    """
    batches = list(read_batches(Path(path)))
    if not batches:
        raise InputError(f"{path} holds no batches: {_WAYS}")
    tokens = np.array([sum(batch.lengths) for batch in batches], np.int64)
    places = np.array([len(batch.lengths) * batch.padded_to for batch in batches], np.int64)
    lengths = np.array([length for batch in batches for length in batch.lengths], np.int64)
    shares = 1 - tokens / places
    worst = np.argsort(-(places - tokens), kind="stable")[:_WORST].tolist()
    max_length = 1 << (int(lengths.max()) - 1).bit_length()
    return {
        "path": str(path),
        "batches": len(batches),
        "sequences": len(lengths),
        "rows_per_batch": len(lengths) / len(batches),
        "tokens": int(tokens.sum()),
        "places": int(places.sum()),
        "padding": 1 - int(tokens.sum()) / int(places.sum()),
        "padding_of_batches": {
            name: float(np.quantile(shares, share))
            for name, share in (("p5", 0.05), ("median", 0.5), ("p95", 0.95))
        },
        "worst": [
            {
                "batch": batches[at].name,
                "rows": len(batches[at].lengths),
                "padded_to": batches[at].padded_to,
                "tokens": int(tokens[at]),
                "padding": float(shares[at]),
            }
            for at in worst
        ],
        "packed": try_plans(
            lengths, [(name, max_length) for name in _STRATEGIES], max_sequences_per_pack=1024
        ),
    }


def read_batches(path: Path) -> Iterator[Batch]:
    """The batches of a log, CSV by its ending and JSON lines otherwise."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from (_from_csv if path.suffix.lower() == ".csv" else _from_lines)(file, path)
    except UnicodeDecodeError as problem:
        raise InputError(f"{path} is no text ({problem.reason}): {_WAYS}") from None
    except csv.Error as problem:
        raise InputError(f"{path} is no CSV ({problem}): {_WAYS}") from None


def _from_lines(file: Any, path: Path) -> Iterator[Batch]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{where} is no JSON ({problem}): {_WAYS}") from None
        fields = content if isinstance(content, dict) else {"lengths": content}
        yield _batch(str(number), fields.get("lengths"), fields.get("padded_to"), where)


def _from_csv(file: Any, path: Path) -> Iterator[Batch]:
    rows = csv.DictReader(file)
    if not {"batch", "length"} <= set(rows.fieldnames or ()):
        raise InputError(f"{path} has the columns {', '.join(rows.fieldnames or ()) or 'none'}: {_WAYS}")
    name, padded_to, where = None, None, ""
    lengths: list[Any] = []
    begun: set[str | None] = set()
    for row in rows:
        line = f"{path}, line {rows.line_num}"
        if row["batch"] != name or not lengths:
            if lengths:
                yield _batch(str(name), lengths, padded_to, where)
            name, lengths, padded_to, where = row["batch"], [], None, line
            if name in begun:
                raise InputError(
                    f"{line}: batch {name} goes on, or begins again, after another one; put the lines of a "
                    "batch together, and give every batch a name of its own"
                )
            begun.add(name)
        lengths.append(_number(row["length"]))
        if row.get("padded_to"):
            width = _number(row["padded_to"])
            if padded_to not in (None, width):
                raise InputError(
                    f"{line}: padded_to is {width!r}, and {padded_to!r} further up in the same batch"
                )
            padded_to = width
    if lengths:
        yield _batch(str(name), lengths, padded_to, where)


def _number(word: Any) -> Any:
    try:
        return int(word)
    except (TypeError, ValueError):
        return word


def _batch(name: str, lengths: Any, padded_to: Any, where: str) -> Batch:
    """Check what a batch says of itself."""
    if not isinstance(lengths, list) or not lengths:
        raise InputError(f"{where} has no lengths: {_WAYS}")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= _MOST:
            raise InputError(f"{where}: {length!r} is no length in tokens; it must be from 1 to {_MOST:,}")
    longest = max(lengths)
    if padded_to is None:
        return Batch(name, lengths, longest)
    if isinstance(padded_to, bool) or not isinstance(padded_to, int) or not longest <= padded_to <= _MOST:
        raise InputError(
            f"{where}: padded_to is {padded_to!r}, and the longest sequence has {longest:,} tokens; leave it "
            "out where batches are padded to their longest"
        )
    return Batch(name, lengths, padded_to)


def print_batches(report: dict[str, Any], console: Console) -> None:
    """Print what `report_batches` gave, the waste first."""
    from rich.table import Table

    from padless.packer.meanings import counted
    from padless.packer.report_view import bar

    useful = 1 - report["padding"]
    console.print(f"[bold]{report['padding']:.1%}[/] of these batches was padding")
    console.print(f"tokens {bar(useful, 60)} {useful:6.1%}", highlight=False)
    console.print(
        f"{report['batches']:,} {'batch' if report['batches'] == 1 else 'batches'} of "
        f"{report['rows_per_batch']:,.1f} sequences, "
        f"{counted(report['tokens'], 'token')} in {counted(report['places'], 'place')}"
    )
    spread = report["padding_of_batches"]
    console.print(
        f"padding of a batch: {spread['p5']:.1%} at the 5 % mark, {spread['median']:.1%} in the middle, "
        f"{spread['p95']:.1%} at the 95 % mark"
    )
    for row in report["packed"]:
        console.print(
            f"packed by {row['strategy']}: {counted(row['packs'], 'pack')} of {row['max_length']:,}, "
            f"{row['utilization']:.1%} full, {row['utilization'] / useful:.2f} times as much in a batch"
        )
    table = Table(title="The batches with most padding", title_justify="left", box=None, pad_edge=False)
    for name in ("batch", "rows", "padded to", "tokens", "padding"):
        table.add_column(name, justify="right")
    for row in report["worst"]:
        cells = (f"{row['rows']:,}", f"{row['padded_to']:,}", f"{row['tokens']:,}", f"{row['padding']:.1%}")
        table.add_row(_shown(row["batch"]), *cells)
    console.print(table)


def _shown(name: str) -> Any:
    from rich.text import Text

    from padless.packer.inspect import visible
    from padless.packer.report_view import short

    return Text(visible(short(name, 24)))
