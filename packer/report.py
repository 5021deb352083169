"""How full the packs are, against naive batching of the same sequences and against the bound.

The share of padding in unpacked training is computed, not estimated by a formula: the stored
lengths are put into batches of B, each padded to its longest, in seeded random order (the mean of
some shuffles) and sorted by length. 52,002 lengths at seven sizes and 20 shuffles take 40 ms; above
200,000 sequences fewer shuffles are made, as their spread is then below a hundredth of a per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.packer.plan import lower_bound
from padless.packer.strategies.constraints import padded_lengths
from padless.runtime.format import Manifest
from padless.runtime.reader import Array, PackedReader

if TYPE_CHECKING:
    from rich.console import Console

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_SHUFFLED_LENGTHS = 4_000_000
_SEED = 0
_WIDEST_HEADS = 64 * 128
"""Heads x head size of the large models, for which packs should be safe."""
_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


def build_report(
    path: str | Path,
    *,
    split: str | None = None,
    plan: str | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    shuffles: int = 20,
) -> dict[str, Any]:
    """The report of one split by one of its plans, for `report --json`; shares are fractions.

    Raises SplitError for a folder of splits without `split`, and what opening a folder raises.
    """
    reader = PackedReader(path, split=split, plan=plan)
    manifest = reader.manifest
    statistics = manifest.statistics | _of_plan(reader)
    table = reader.sequence_columns("source", "length", "num_targets", "cut", "pack")
    packs, lengths = reader.pack_sizes()
    capacity = len(reader) * statistics["max_length"]
    tokens = int(lengths.sum())
    report = {
        "path": str(reader.path),
        "packs": len(reader),
        "sequences": len(lengths),
        "tokens": tokens,
        "max_length": statistics["max_length"],
        "capacity": capacity,
        "utilization": tokens / capacity if capacity else 0.0,
        "bound_packs": statistics["bound_packs"],
        "padding": {
            "random": random_padding(lengths, batch_sizes, shuffles),
            "grouped": {str(size): padding_share(np.sort(lengths), size) for size in batch_sizes},
        },
        "records": statistics["records"],
        "dropped_by_reason": statistics["dropped_by_reason"],
        "tokens_by_fate": {
            "trained": statistics["trained_tokens"],
            "masked": statistics["masked_tokens"],
            "cut": statistics["cut_tokens"],
        },
        "cut_by_reason": statistics["cut_by_reason"],
        "by_source": _by_source(manifest, table),
        "sequences_per_pack": _quantiles(np.bincount(packs)),
        "max_seqlen": _quantiles(_longest(packs, lengths, len(reader))),
        "flash_attention_2_backward": _flash_attention_2(packs, lengths),
    }
    return report | {"warnings": _warnings(report, manifest, statistics.get("strategy"))}


def _of_plan(reader: PackedReader) -> dict[str, Any]:
    """What a further plan has of its own; nothing for the packs as they are stored."""
    if reader.plan is None:
        return {}
    facts = reader.plan.facts
    padded = padded_lengths(reader.pack_sizes()[1], facts["align"])
    bound = lower_bound(padded, facts["max_length"], facts["max_sequences_per_pack"])
    return {"max_length": facts["max_length"], "bound_packs": bound, "strategy": facts["strategy"]}


def padding_share(lengths: Array, batch_size: int) -> float:
    """Padding as a share of all tokens when neighbours are batched: [3, 1, 2], 2 -> 2 / 8."""
    if not len(lengths):
        return 0.0
    starts = np.arange(0, len(lengths), batch_size)
    sizes = np.diff(np.append(starts, len(lengths)))
    padded = int((np.maximum.reduceat(lengths, starts).astype(np.int64) * sizes).sum())
    return 1.0 - int(lengths.sum(dtype=np.int64)) / padded


def random_padding(lengths: Array, batch_sizes: Sequence[int], shuffles: int) -> dict[str, float]:
    """The mean padding share over seeded shuffles, for each batch size (as a string)."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    shuffles = max(1, min(shuffles, _SHUFFLED_LENGTHS // max(1, len(lengths))))
    shares = np.zeros((shuffles, len(batch_sizes)))
    for row in shares:
        shuffled = generator.permutation(lengths)
        row[:] = [padding_share(shuffled, size) for size in batch_sizes]
    return dict(zip(map(str, batch_sizes), shares.mean(axis=0).tolist(), strict=True))


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print what `build_report` gave, the gain first."""
    from rich.markup import escape
    from rich.table import Table

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
    console.print(
        f"{report['sequences']:,} sequences, {report['tokens']:,} tokens in {report['packs']:,} "
        f"packs of {report['max_length']:,} (no plan has fewer than {report['bound_packs']:,})"
    )
    title = "Padding without packing, in random order or grouped by length"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("batch size", "random", "", "grouped", " "):
        table.add_column(name, justify="left" if not name.strip() else "right")
    for batch_size, share in naive.items():
        grouped = report["padding"]["grouped"][batch_size]
        table.add_row(batch_size, f"{share:.1%}", _bar(share), f"{grouped:.1%}", _bar(grouped))
    console.print(table)
    for name in ("records", "tokens_by_fate", "dropped_by_reason", "cut_by_reason"):
        parts = [f"{key} {count:,}" for key, count in report[name].items() if count]
        if parts:
            console.print(escape(f"{name.replace('_', ' ')}: {', '.join(parts)}"))
    for name in ("sequences_per_pack", "max_seqlen"):
        spread = ", ".join(f"{key} {value:,}" for key, value in report[name].items())
        console.print(f"{name.replace('_', ' ')}: {spread}")
    if len(report["by_source"]) > 1:
        for source in report["by_source"]:
            line = f"{source['source']}: {source['records']:,} records, {source['tokens']:,} tokens"
            console.print(escape(line))
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}")


def _bar(share: float, width: int = 16) -> str:
    return ("█" * round(share * width)).ljust(width, "·")


def _by_source(manifest: Manifest, table: dict[str, Array]) -> list[dict[str, Any]]:
    """Per source file: records, sequences, tokens, trained and cut tokens."""
    sources = manifest.sources
    sums = {
        "sequences": table["pack"] >= 0,
        "tokens": table["length"],
        "trained_tokens": table["num_targets"],
        "cut_tokens": table["cut"],
    }
    # Sums in float64 are exact up to 2**53 tokens.
    columns = {
        name: np.bincount(table["source"], weights=values, minlength=len(sources))
        for name, values in sums.items()
    }
    return [
        {
            "source": info.path,
            "records": info.records,
            **{name: int(values[number]) for name, values in columns.items()},
        }
        for number, info in enumerate(sources)
    ]


def _longest(packs: Array, lengths: Array, num_packs: int) -> Array:
    longest = np.zeros(num_packs, dtype=lengths.dtype)
    np.maximum.at(longest, packs, lengths)
    return longest


def _flash_attention_2(packs: Array, lengths: Array) -> dict[str, int]:
    """The pack that asks most of FlashAttention-2's backward, and the heads x head size it still takes.

    Releases before March 2025 number (tokens + 128 * sequences) * heads * head size, rounded up to 32, in
    int32 and fault beyond it (fixed by flash-attention's pull request 1500).
    """
    if not len(packs):
        return {}
    rows = np.bincount(packs, weights=lengths.astype(np.int64) + 128).astype(np.int64)
    most = int(rows.max())
    return {"rows": most, "heads_times_head_size": (2**31 - 1) // most}


def _quantiles(values: Array) -> dict[str, int]:
    if not len(values):
        return {}
    found = np.quantile(values, list(_QUANTILES.values()), method="nearest")
    return dict(zip(_QUANTILES, found.astype(int).tolist(), strict=True))


def _warnings(report: dict[str, Any], manifest: Manifest, planned_with: str | None) -> list[str]:
    records, fates = report["records"], report["tokens_by_fate"]
    options, empty_replies = manifest.options, manifest.statistics["empty_replies"]
    found = []
    if not report["packs"]:
        found.append("there are no packs: every record was dropped (see dropped_by_reason)")
    if records["dropped"]:
        share = records["dropped"] / records["in"]
        found.append(f"{records['dropped']:,} of {records['in']:,} records ({share:.2%}) dropped")
    if fates["cut"]:
        share = fates["cut"] / (fates["cut"] + report["tokens"])
        found.append(f"{fates['cut']:,} tokens ({share:.2%}) cut: build with a larger --max-length")
    if report["tokens"] and not fates["trained"]:
        found.append("no token is trained: every label is -100 (see --train-on)")
    if empty_replies:
        found.append(f"{empty_replies:,} records have an empty reply (--on-empty-reply drop)")
    flash = report["flash_attention_2_backward"]
    if flash and flash["heads_times_head_size"] < _WIDEST_HEADS:
        found.append(
            f"a pack's tokens and 128 for each of its sequences are {flash['rows']:,}: the backward of "
            f"FlashAttention-2 before March 2025 fails beyond {flash['heads_times_head_size']:,} heads x head"
            " size (64 heads of 128 are 8,192): lower --max-sequences-per-pack or --max-length"
        )
    # One sequence a pack is asked for, as a rule for evaluation, and not meant to fill anything.
    strategy = planned_with or options.get("packed_with", options.get("strategy"))
    if report["packs"] and report["utilization"] < 0.9 and strategy != "none":
        found.append(
            f"the packs are {report['utilization']:.1%} full: a larger --max-length or another "
            "--strategy fills them better"
        )
    return found
