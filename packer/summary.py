"""What a build tells at its end: a summary that one would paste into a chat, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from padless.packer.advice import flash_warning
from padless.packer.meanings import counted
from padless.packer.report_view import in_words

if TYPE_CHECKING:
    from rich.console import Console

    from padless.packer.build_result import BuildResult
    from padless.runtime.format import Bucket, Manifest

_SUMS = (
    "sequences",
    "packs",
    "bound_packs",
    "tokens",
    "trained_tokens",
    "masked_tokens",
    "cut_tokens",
)


def build_json(result: BuildResult) -> dict[str, Any]:
    """The object that `build --json` prints; shares are fractions. Splits are summed, and listed."""
    splits = {name: _of_manifest(manifest) for name, manifest in result.manifests.items()}
    parts = list(splits.values())
    found: dict[str, Any] = {name: sum(part[name] for part in parts) for name in ("records", *_SUMS)}
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, count in part["dropped_by_reason"].items():
            dropped[reason] = dropped.get(reason, 0) + count
    capacity = sum(part["capacity"] for part in parts)
    found |= {
        "output": result.output,
        "kept_records": sum(part["kept_records"] for part in parts),
        "dropped_records": sum(part["dropped_records"] for part in parts),
        "dropped_by_reason": dropped,
        "truncated_records": sum(part["truncated_records"] for part in parts),
        "split_records": sum(part["split_records"] for part in parts),
        "empty_replies": sum(part["empty_replies"] for part in parts),
        "utilization": found["tokens"] / capacity if capacity else 0.0,
        "seconds": round(result.seconds, 3),
        "profile": {stage: round(seconds, 4) for stage, seconds in result.profile.items()},
        "backends": result.backends,
        "formats": result.formats,
        "was_finished": result.was_finished,
        "chunks": result.chunks,
        "resumed_chunks": result.resumed_chunks,
        "replaced_surrogates": result.replaced_surrogates,
    }
    if list(splits) != [""]:
        found["splits"] = splits
    return found


def _of_manifest(manifest: Manifest) -> dict[str, Any]:
    facts = manifest.statistics
    records = facts["records"]
    capacity = sum(bucket.max_length * bucket.packs for bucket in manifest.buckets)
    return {
        "records": records["in"],
        "kept_records": records["in"] - records["dropped"],
        "dropped_records": records["dropped"],
        "truncated_records": records["truncated"],
        "split_records": records["split"],
        "dropped_by_reason": facts["dropped_by_reason"],
        "empty_replies": facts["empty_replies"],
        **{name: facts[name] for name in _SUMS},
        "capacity": capacity,
        "utilization": facts["tokens"] / capacity if capacity else 0.0,
    }


def packs_of(buckets: Sequence[Bucket]) -> str:
    """How many packs of which length, in words."""
    return in_words([f"{counted(bucket.packs, 'pack')} of {bucket.max_length:,}" for bucket in buckets])


def print_summary(result: BuildResult, console: Console) -> None:
    """The build in a few lines."""
    facts = build_json(result)
    if result.was_finished:
        _line(
            console,
            f"{result.output} is finished already (same options, same sources); nothing done",
        )
    for source, name in list(result.formats.items())[:10]:
        columns = result.columns.get(source)
        told_by = (
            f" (columns: {', '.join(columns[:12])}{', ...' if len(columns) > 12 else ''})" if columns else ""
        )
        _line(console, f"{source}: {name}{told_by}")
    if len(result.formats) > 10:
        _line(console, f"... and {len(result.formats) - 10:,} more sources")
    records = f"{counted(facts['records'], 'record')}: {facts['kept_records']:,} kept"
    for name, word in (("truncated_records", "truncated"), ("split_records", "split")):
        if facts[name]:
            records += f" ({facts[name]:,} {word})"
    if facts["dropped_records"]:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(facts["dropped_by_reason"].items()))
        records += f", {facts['dropped_records']:,} dropped ({reasons})"
    _line(console, records)
    if facts["empty_replies"]:
        _line(
            console,
            f"{facts['empty_replies']:,} of them with an empty reply (--on-empty-reply drop leaves them out)",
        )
    if facts["replaced_surrogates"]:
        _line(console, f"{facts['replaced_surrogates']:,} lone surrogates became U+FFFD")
    share = facts["trained_tokens"] / facts["tokens"] if facts["tokens"] else 0.0
    cut = f", {facts['cut_tokens']:,} cut" if facts["cut_tokens"] else ""
    _line(console, f"{counted(facts['tokens'], 'token')}, {share:.1%} of them trained{cut}")
    for name, manifest in result.manifests.items():
        part = _of_manifest(manifest)
        _line(
            console,
            f"{name + ': ' if name else ''}{packs_of(manifest.buckets)}, "
            f"{part['utilization']:.2%} full (at least {part['bound_packs']:,} packs are needed)",
        )
        warning = flash_warning(manifest.statistics.get("flash_attention_2_rows", 0))
        if warning is not None:
            _line(console, f"warning: {warning}")
    if not result.was_finished:
        with_what = f"{result.backends['tokenizer']}, {result.backends['template']}"
        speed = facts["records"] / max(result.seconds, 1e-9)
        resumed = f", {facts['resumed_chunks']:,} chunks taken over" if facts["resumed_chunks"] else ""
        _line(console, f"{result.seconds:.1f} s, {speed:,.0f} records/s with {with_what}{resumed}")
    _line(console, f"written to {result.output}")


def print_profile(result: BuildResult, console: Console) -> None:
    """Seconds by stage, and what each stage holds."""
    meaning = {
        "start": "imports, sources, tokenizer.json parsed",
        "load": "tokenizer's load, and the rendering done meanwhile",
        "tokenize": "the rest of render and tokenize",
        "plan": "lengths, account, plan",
        "write": "gather, shards, sequence table, tokenizer, manifest",
        "commit": "sweep",
        "upload": "the folder to its URL",
    }
    for stage, seconds in result.profile.items():
        _line(console, f"{seconds:8.3f} s  {stage:<9} {meaning.get(stage, '')}")
    _line(console, f"{result.seconds:8.3f} s  in all, without the interpreter's start")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)
