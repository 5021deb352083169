"""How full the packs are, against naive batching of the same sequences and against the bound.

Everything follows from one pass over the sequence table (`measure`): nothing is estimated but the idle
shares, which go by one epoch's order, and the plans that are tried for large data, which go by some of the
lengths. What every number means stands in `meanings.py`, and beside the number in every view.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.advice import FLASH_ROWS, warnings_of
from padless.packer.alternatives import choices_around, try_plans
from padless.packer.cost import ModelCost
from padless.packer.duplicates import find_duplicates
from padless.packer.lengths import Lengths
from padless.packer.lines import STATUSES
from padless.packer.measure import Measured, PerPack, measure
from padless.packer.mixture import mixture
from padless.packer.plan import lower_bound
from padless.packer.progress import Report
from padless.packer.strategies import STRATEGIES
from padless.packer.strategies.constraints import padded_lengths
from padless.runtime.format import Bucket, Manifest, max_lengths
from padless.runtime.reader import Array, PackedReader, attention_costs, predicted_idle

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
SPEED_UP_BATCH = 8
RANKS = (2, 8, 64)
_SHORT = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
_SPREAD = {"p5": 0.05, "median": 0.5, "p95": 0.95}
_OF_LENGTHS = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
UTILIZATION_BINS = 20
_BINS_PER_DOUBLING = 2
_MOST_COST = 2.0**53
"""Up to which a float holds every integer."""


def build_report(
    path: str | Path,
    *,
    split: str | None = None,
    plan: str | None = None,
    model: ModelCost | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    progress: Report | None = None,
) -> dict[str, Any]:
    """The report of one split by one of its plans, for `report --json`; shares are fractions.

    With a `model` the gain and the ranks' idle time are those of its FLOPs, otherwise of padding alone.
    Raises SplitError for a folder of splits without `split`, and what opening a folder raises.
    """
    reader = PackedReader(path, split=split, plan=plan)
    manifest = reader.manifest
    window = model.window if model is not None else None
    found = measure(reader, window=window, progress=progress)
    facts = manifest.statistics | _planned(reader, found)
    capacity = sum(bucket.max_length * bucket.packs for bucket in reader.buckets)
    tokens = int(found.packs.tokens.sum())
    utilization = tokens / capacity if capacity else 0.0
    costs = _costs(found, model)
    align = int(facts["align"])
    report = {
        "path": reader.location,
        "plan": plan,
        "packs": len(reader),
        "sequences": len(found.lengths),
        "tokens": tokens,
        "max_length": facts["max_length"],
        "strategy": facts["strategy"],
        "capacity": capacity,
        "utilization": utilization,
        "bound_packs": facts["bound_packs"],
        "buckets": buckets_report(reader.buckets, found.packs),
        "padding": padding_of(found.lengths, batch_sizes),
        "speed_up": speed_up(found.lengths, utilization, model),
        "steps": _steps(len(found.lengths), len(reader), batch_sizes),
        "records": facts["records"],
        "dropped_by_reason": facts["dropped_by_reason"],
        "tokens_by_fate": {
            "trained": facts["trained_tokens"],
            "masked": facts["masked_tokens"],
            "cut": facts["cut_tokens"],
        },
        "cut_by_reason": facts["cut_by_reason"],
        "empty_replies": facts["empty_replies"],
        "by_source": _by_source(manifest, found),
        "mix": mixture(manifest, found.sources),
        "per_pack": {
            "sequences": quantiles(found.packs.sequences, _SPREAD),
            "tokens": quantiles(found.packs.tokens, _SPREAD),
            "trained_tokens": quantiles(found.packs.targets, _SPREAD),
            "longest": quantiles(found.packs.longest, _SPREAD),
            "attention_cost": quantiles(found.packs.squares, _SPREAD),
        },
        "sequences_per_pack": quantiles(found.packs.sequences, _SHORT),
        "max_seqlen": quantiles(found.packs.longest, _SHORT),
        "pack_utilization": pack_utilization(found.packs.tokens, max_lengths(reader.buckets)),
        "sequence_lengths": length_facts(found.lengths),
        "record_lengths": length_facts(found.before),
        "idle": {
            str(ranks): {
                "random": predicted_idle(costs, ranks, balanced=False),
                "balanced": predicted_idle(costs, ranks, balanced=True),
            }
            for ranks in RANKS
            if ranks <= len(reader)
        },
        "alternatives": try_plans(
            found.sample,
            choices_around(facts["strategy"], (facts["max_length"],), align),
            max_sequences_per_pack=facts["max_sequences_per_pack"],
            align=align,
            times=found.thinned,
        ),
        "lengths_tried": {"every": found.thinned, "sequences": len(found.sample)},
        "duplicates": find_duplicates(reader),
        "notable": _notable(manifest, found),
        "flash_attention_2_backward": _flash_attention_2(found.packs),
        "model": _model(model),
    }
    return report | {"warnings": warnings_of(report, model)}


def _planned(reader: PackedReader, found: Measured) -> dict[str, Any]:
    """How the packs were planned: strategy, cap and align; for a further plan its length and bound too."""
    options = reader.manifest.options
    if reader.plan is None:
        strategy = options.get("packed_with", options.get("strategy"))
        return {
            "strategy": strategy if strategy in list(STRATEGIES) else None,
            "max_sequences_per_pack": _count(options.get("max_sequences_per_pack")),
            "align": _count(options.get("align")) or 1,
        }
    facts = reader.plan.facts
    cap, max_length, bound = facts["max_sequences_per_pack"], facts["max_length"], facts.get("bound_packs")
    if bound is None:  # an earlier padless did not count it when it planned
        padded = padded_lengths(np.repeat(found.lengths.values, found.lengths.counts), facts["align"])
        bound = lower_bound(padded, max_length, cap)
    return {
        "strategy": facts["strategy"],
        "max_sequences_per_pack": cap,
        "align": facts["align"],
        "max_length": max_length,
        "bound_packs": bound,
        **(_of_fragments(found) if reader.plan.starts is not None else {}),
    }


def _of_fragments(found: Measured) -> dict[str, Any]:
    """The account by a plan that cuts: more records are split, and starts of fragments are untrained."""
    trained = int(found.packs.targets.sum())
    fates = {name: sum(source.statuses[name] for source in found.sources) for name in STATUSES}
    split = fates.pop("fragment")
    return {
        "records": {"in": sum(fates.values()) + split, **fates, "split": split},
        "trained_tokens": trained,
        "masked_tokens": int(found.packs.tokens.sum()) - trained,
    }


def buckets_report(buckets: Sequence[Bucket], packs: PerPack) -> list[dict[str, Any]]:
    """What is in the packs of each length, shortest first, and how full they are."""
    found, first = [], 0
    for bucket in buckets:
        mine = slice(first, first + bucket.packs)
        first += bucket.packs
        tokens, places = int(packs.tokens[mine].sum()), bucket.packs * bucket.max_length
        found.append(
            {
                "max_length": bucket.max_length,
                "packs": bucket.packs,
                "sequences": int(packs.sequences[mine].sum()),
                "tokens": tokens,
                "utilization": tokens / places if places else 0.0,
            }
        )
    return found


def _count(value: Any) -> int | None:
    """A number of a manifest's options, which anybody may have written; None for what is none."""
    return value if type(value) is int and 1 <= value < 2**31 else None


def padding_of(lengths: Lengths, batch_sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Shares of padding by batch size (as a string): random batches, and batches of like lengths."""
    return {
        "random": {str(size): lengths.padding(size) for size in batch_sizes},
        "grouped": {str(size): lengths.grouped_padding(size) for size in batch_sizes},
    }


def speed_up(
    lengths: Lengths, utilization: float, model: ModelCost | None, batch_size: int = SPEED_UP_BATCH
) -> dict[str, Any] | None:
    """How much less an epoch costs than in random batches of `batch_size`; None without sequences.

    `linear`: places of tokens, padded against packed (the packs' unused ends count). `quadratic`: squared
    lengths, of rows padded to their longest against sequences by themselves. `total`: FLOPs of the model.
    """
    if not len(lengths) or not utilization:
        return None
    padded, places = lengths.padded(batch_size), lengths.tokens / utilization

    def square(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values * values

    found: dict[str, Any] = {
        "batch_size": batch_size,
        "linear": padded / places,
        "quadratic": lengths.padded(batch_size, square) / lengths.total(square),
        "total": None,
        "attention_share": None,
    }
    if model is not None:
        attention = lengths.total(model.attention)
        before = model.linear * padded + lengths.padded(batch_size, model.attention)
        now = model.linear * places + attention
        found |= {"total": before / now, "attention_share": attention / now}
    return found


def _model(model: ModelCost | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {
        "name": model.name,
        "parameters": model.parameters,
        "flops_a_token": model.linear,
        "flops_a_pair": model.full + model.sliding,
        "heads": model.heads,
        "head_size": model.head_size,
    }


def _steps(sequences: int, packs: int, batch_sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """By rows of an unpacked step: its steps an epoch, and the packs a step that keep the rows."""
    if not packs:
        return {}
    a_pack = sequences / packs
    found = {}
    for size in batch_sizes:
        packs_a_step = max(1, round(size / a_pack))
        found[str(size)] = {
            "unpacked_steps": -(-sequences // size),
            "packs_per_step": packs_a_step,
            "rows_per_step": packs_a_step * a_pack,
            "packed_steps": -(-packs // packs_a_step),
        }
    return found


def _by_source(manifest: Manifest, found: Measured) -> list[dict[str, Any]]:
    """Per source file: what became of its records and tokens, why, and the first rows of each reason."""
    whole = max(1, sum(source.tokens for source in found.sources))
    return [
        {
            "source": info.path,
            "records": info.records,
            **{name.replace("fragment", "split"): here.statuses[name] for name in STATUSES},
            "sequences": here.sequences,
            "tokens": here.tokens,
            "share": here.tokens / whole,
            "trained_tokens": here.trained,
            "masked_tokens": here.tokens - here.trained,
            "cut_tokens": here.cut,
            "dropped_by_reason": here.dropped_by_reason,
            "cut_by_reason": here.cut_by_reason,
            "examples": here.examples,
        }
        for info, here in zip(manifest.sources, found.sources, strict=True)
    ]


def _notable(manifest: Manifest, found: Measured) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{**line, "source": manifest.sources[line["source"]].path} for line in lines]
        for name, lines in found.notable.items()
    }


def _costs(found: Measured, model: ModelCost | None) -> Array:
    """What each pack costs to train on beside the others, [packs]; without a model as in one of 7 billion.

    FLOPs of large models on long packs are more than 64 bits hold: such costs are scaled down.
    """
    tokens, squares = found.packs.tokens, found.packs.squares
    if model is None:
        return attention_costs(tokens, squares)
    pairs = (squares + tokens) // 2  # of a token with itself and those before it
    flops = float(model.linear) * tokens + float(model.full) * pairs + float(model.sliding) * found.packs.near
    most = flops.max(initial=0.0)
    costs: Array = np.rint(flops if most < _MOST_COST else flops * (_MOST_COST / most)).astype(np.int64)
    return costs


def length_facts(lengths: Lengths) -> dict[str, Any]:
    """Quantiles, mean, and a histogram whose bins begin at `edges` (half a doubling each) and end there."""
    if not len(lengths):
        return {}
    first = np.floor(np.log2(lengths.values[0]) * _BINS_PER_DOUBLING)
    last = np.floor(np.log2(lengths.values[-1]) * _BINS_PER_DOUBLING) + 1
    edges = np.unique(np.ceil(2 ** (np.arange(first, last + 1) / _BINS_PER_DOUBLING)).astype(np.int64))
    if edges[-1] <= lengths.values[-1]:
        edges = np.append(edges, lengths.values[-1] + 1)
    bins = np.searchsorted(edges, lengths.values, side="right") - 1
    counts, tokens = np.zeros(len(edges) - 1, np.int64), np.zeros(len(edges) - 1, np.int64)
    np.add.at(counts, bins, lengths.counts)
    np.add.at(tokens, bins, lengths.counts * lengths.values)
    return {
        **{name: lengths.quantile(share) for name, share in _OF_LENGTHS.items()},
        "max": lengths.longest,
        "mean": lengths.tokens / len(lengths),
        "histogram": {"edges": edges.tolist(), "sequences": counts.tolist(), "tokens": tokens.tolist()},
    }


def pack_utilization(tokens: Array, limits: Array) -> dict[str, Any]:
    """Packs by how full they are: bin k of 20 holds those up to (k + 1) / 20, the last the full ones.

    `limits`: the tokens that each may hold.
    """
    bins = np.clip(-(-tokens * UTILIZATION_BINS // limits) - 1, 0, UTILIZATION_BINS - 1)
    edges = [number / UTILIZATION_BINS for number in range(UTILIZATION_BINS + 1)]
    return {
        "edges": edges,
        "packs": np.bincount(bins, minlength=UTILIZATION_BINS).tolist(),
        "full": int((tokens == limits).sum()),
    }


def _flash_attention_2(packs: PerPack) -> dict[str, int]:
    """The pack that asks most of FlashAttention-2's backward, and the heads x head size it still takes."""
    if not len(packs.tokens):
        return {}
    most = int((packs.tokens + FLASH_ROWS * packs.sequences).max())
    return {"rows": most, "heads_times_head_size": (2**31 - 1) // most}


def quantiles(values: Array, shares: dict[str, float]) -> dict[str, int]:
    """Values that are there at some shares of the sorted values; {} where there are none."""
    if not len(values):
        return {}
    found = np.quantile(values, list(shares.values()), method="nearest")
    return dict(zip(shares, found.astype(np.int64).tolist(), strict=True))
