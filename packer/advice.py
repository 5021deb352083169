"""What a report warns of, and what to do about each: the only place that judges the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.packer.cost import ModelCost

FLASH_ROWS = 128
"""Rows that FlashAttention-2's backward sets aside for each sequence beside its tokens."""
_WIDEST_HEADS = 64 * 128
"""Heads x head size of the large models, for which packs should be safe."""
_LOOSE = 0.9
_FEWER_PACKS = 0.99
_IDLE = 0.1
_REPEATED = 0.01
_HARDLY_TRAINED = 0.1


def flash_warning(rows: int, model: ModelCost | None = None) -> str | None:
    """Where the pack of most `rows` (tokens, and 128 a sequence) is beyond FlashAttention-2's backward.

    Releases before March 2025 number rows * heads * head size (rounded up to 32) in int32 and fault
    beyond it (fixed by flash-attention's pull request 1500).
    """
    if not rows:
        return None
    most = (2**31 - 1) // rows
    heads = _WIDEST_HEADS if model is None else model.heads * (-(-model.head_size // 32) * 32)
    if heads <= most:
        return None
    whose = "64 heads of 128 are 8,192" if model is None else f"{model.name}'s are {heads:,}"
    return (
        f"a pack's tokens and 128 for each of its sequences are {rows:,}: the backward of FlashAttention-2 "
        f"before March 2025 fails beyond {most:,} heads x head size ({whose}): lower "
        "--max-sequences-per-pack or --max-length"
    )


def warnings_of(report: Mapping[str, Any], model: ModelCost | None = None) -> list[str]:
    """What is worth a look in a report, each with the way out."""
    records, fates = report["records"], report["tokens_by_fate"]
    found = []
    if not report["packs"]:
        found.append("there are no packs: every record was dropped (see dropped_by_reason)")
    if records["dropped"]:
        share = records["dropped"] / records["in"]
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in report["dropped_by_reason"].items())
        found.append(
            f"{records['dropped']:,} of {records['in']:,} records ({share:.2%}) dropped ({reasons}): look at "
            "the example rows"
        )
    if fates["cut"]:
        share = fates["cut"] / (fates["cut"] + report["tokens"])
        found.append(f"{fates['cut']:,} tokens ({share:.2%}) cut: build with a larger --max-length")
    if report["tokens"]:
        trained = fates["trained"] / report["tokens"]
        if not fates["trained"]:
            found.append("no token is trained: every label is -100 (see --train-on)")
        elif trained < _HARDLY_TRAINED:
            found.append(f"only {trained:.1%} of the tokens are trained: see --train-on and the template")
    if report["empty_replies"]:
        found.append(f"{report['empty_replies']:,} records have an empty reply (--on-empty-reply drop)")
    flash = report["flash_attention_2_backward"]
    if warning := flash_warning(flash.get("rows", 0), model):
        found.append(warning)
    found += _of_packing(report)
    repeated = report["duplicates"]
    if repeated and repeated["sequences"] > _REPEATED * report["sequences"]:
        share = repeated["sequences"] / report["sequences"]
        found.append(
            f"{repeated['sequences']:,} sequences ({share:.1%}) repeat another one token for token: leave "
            "them out of the sources, or repack with --exclude"
        )
    return found


def _of_packing(report: Mapping[str, Any]) -> list[str]:
    # One sequence a pack is asked for, as a rule for evaluation, and not meant to fill anything.
    if not report["packs"] or report["strategy"] == "none":
        return []
    found = []
    here = [row for row in report["alternatives"] if row["max_length"] == report["max_length"]]
    best = min(here, key=lambda row: row["packs"], default=None)
    every = report["lengths_tried"]["every"]
    if best and every == 1 and best["packs"] < _FEWER_PACKS * report["packs"]:
        fewer = 1 - best["packs"] / report["packs"]
        found.append(
            f"--strategy {best['strategy']} would make {best['packs']:,} packs of the same sequences, "
            f"{fewer:.1%} fewer (pack-dataset repack)"
        )
    elif report["utilization"] < _LOOSE:
        found.append(
            f"the packs are {report['utilization']:.1%} full: a larger --max-length or another "
            "--strategy fills them better"
        )
    idle = {ranks: shares for ranks, shares in report["idle"].items() if shares["random"] > _IDLE}
    for ranks, shares in list(idle.items())[:1]:
        found.append(
            f"{ranks} ranks would wait {shares['random']:.0%} of their time for the one with the costliest "
            f"pack, {shares['balanced']:.0%} with PackedStream(..., balance='attention'); --strategy spread "
            "makes packs that are alike"
        )
    return found
