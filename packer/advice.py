"""What a report warns of, and what to do about each: the only place that judges the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from padless.packer.lines import NOT_DRAWN, REASONS
from padless.packer.meanings import counted, share_of

if TYPE_CHECKING:
    from padless.packer.cost import ModelCost

FLASH_ROWS = 128
"""Rows that FlashAttention-2's backward sets aside for each sequence beside its tokens."""
_WIDEST_HEADS = 64 * 128
"""Heads x head size of the large models, for which packs should be safe."""
_LOOSE = 0.9
_FEWER_PACKS = 0.99
_FULLER = 1.05
_IDLE = 0.1
_BETTER_BALANCED = 0.9
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
        found.append("there are no packs: every record was dropped")
    dropped, reasons = _undrawn_aside(records["dropped"], report["dropped_by_reason"])
    if dropped:
        found.append(
            f"{dropped:,} of {counted(records['in'], 'record')} ({share_of(dropped, records['in'])}) dropped "
            f"({reasons}): look at the example rows"
        )
    cut, reasons = _undrawn_aside(fates["cut"], report["cut_by_reason"])
    if cut:
        longer = ": build with a larger --max-length" if "too-long" in report["cut_by_reason"] else ""
        found.append(
            f"{counted(cut, 'token')} ({share_of(cut, cut + report['tokens'])}) cut ({reasons}){longer}"
        )
    if report["tokens"]:
        trained = fates["trained"] / report["tokens"]
        if not fates["trained"]:
            found.append("no token is trained: every label is -100 (see --train-on)")
        elif trained < _HARDLY_TRAINED:
            found.append(f"only {trained:.1%} of the tokens are trained: see --train-on and the template")
    if empty := report["empty_replies"]:
        have = "has" if empty == 1 else "have"
        found.append(
            f"{counted(empty, 'record')} {have} an empty reply: --on-empty-reply drop leaves such records out"
        )
    flash = report["flash_attention_2_backward"]
    if warning := flash_warning(flash.get("rows", 0), model):
        found.append(warning)
    found += _of_packing(report)
    repeated = report["duplicates"]
    # A mix repeats records where the shares ask for it.
    if repeated and not report["mix"] and repeated["sequences"] > _REPEATED * report["sequences"]:
        share = repeated["sequences"] / report["sequences"]
        one = "repeats" if repeated["sequences"] == 1 else "repeat"
        found.append(
            f"{counted(repeated['sequences'], 'sequence')} ({share:.1%}) {one} another one token for token: "
            "leave them out of the sources, or repack with --exclude"
        )
    return found


def _undrawn_aside(count: int, by_reason: Mapping[str, int]) -> tuple[int, str]:
    """What was lost otherwise than by not being drawn for a mix, which is what a mix is for; and why."""
    reasons = {reason: n for reason, n in by_reason.items() if reason != REASONS[NOT_DRAWN]}
    count -= by_reason.get(REASONS[NOT_DRAWN], 0)
    if len(reasons) == 1:
        return count, next(iter(reasons))
    return count, ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())


def _of_packing(report: Mapping[str, Any]) -> list[str]:
    # One sequence a pack is asked for, as a rule for evaluation, and not meant to fill anything.
    if not report["packs"] or report["strategy"] == "none":
        return []
    found = []
    is_one_length = len(report["buckets"]) == 1  # packs of several are fewer the longer they are
    here = [r for r in report["alternatives"] if is_one_length and r["max_length"] == report["max_length"]]
    best = min(here, key=lambda row: row["packs"], default=None)
    every = report["lengths_tried"]["every"]
    if best and every == 1 and best["packs"] < _FEWER_PACKS * report["packs"]:
        fewer = 1 - best["packs"] / report["packs"]
        found.append(
            f"--strategy {best['strategy']} would make {counted(best['packs'], 'pack')} of the same "
            f"sequences, {fewer:.1%} fewer (pack-dataset repack)"
        )
    elif report["utilization"] < _LOOSE:
        found.append(_loose(report))
    idle = {ranks: shares for ranks, shares in report["idle"].items() if shares["random"] > _IDLE}
    for ranks, shares in list(idle.items())[:1]:
        waiting = (
            f"{ranks} ranks would wait {shares['random']:.0%} of their time for the one with the costliest "
            "pack"
        )
        if shares["balanced"] < _BETTER_BALANCED * shares["random"]:
            waiting += f", {shares['balanced']:.0%} with PackedStream(..., balance='attention')"
        found.append(
            f"{waiting}; --strategy spread makes packs that are alike"
            if is_one_length
            else f"{waiting}; PackedStream(..., tokens_per_batch=N) gives all of them packs of one length"
        )
    return found


def _loose(report: Mapping[str, Any]) -> str:
    """How full the packs are, and what of all that was tried would fill them best."""
    now = f"the packs are {report['utilization']:.1%} full"
    rows = [row for row in report["alternatives"] if not row["too_long"]]
    best = max(rows, key=lambda row: row["utilization"], default=None)
    if best is None or best["utilization"] < _FULLER * report["utilization"]:
        return f"{now}, and no strategy or length that was tried fills them much better"
    return (
        f"{now}; with --max-length {best['max_length']} --strategy {best['strategy']} they would be "
        f"{best['utilization']:.1%} full"
    )
