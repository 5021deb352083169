"""What the sections of a report are called and mean, in one place for all its views."""

from __future__ import annotations

from typing import Any

MEANINGS: dict[str, tuple[str, str]] = {
    "useful": (
        "Useful share",
        "Tokens of sequences as a share of all places for tokens. Packed: tokens / (packs x pack length). "
        "Before: batches drawn at random and padded to their longest sequence; the mean over all orders, "
        "exact.",
    ),
    "speed_up": (
        "Gain at the same rows",
        "What an epoch costs in padded batches, over what it costs packed. Linear part: places for tokens, "
        "which every weight of a model goes by. Attention: pairs of tokens, squared lengths; padded rows "
        "against sequences by themselves. A model's config.json (--model) weighs the two by its FLOPs.",
    ),
    "padding": (
        "Padding without packing",
        "Share of padding in batches of that size, each padded to its longest sequence. Random: the exact "
        "mean over all orders. Grouped: sorted by length first, which no shuffled training can reach.",
    ),
    "pack_utilization": (
        "How full the packs are",
        "Packs by their tokens as a share of the pack length.",
    ),
    "lengths": (
        "Sequence lengths",
        "Tokens of a sequence, on a logarithmic scale. Before: as tokenized, dropped and cut ones too. "
        "After: as packed.",
    ),
    "per_pack": (
        "What a pack holds",
        "A pack at the 5 % mark, in the middle and at the 95 % mark, each row sorted by itself. Attention "
        "cost is the sum of squared sequence lengths.",
    ),
    "steps": (
        "Steps of an epoch",
        "Packing changes the batch: a pack holds many rows. The packs a step that keep the rows of an "
        "unpacked step, and the steps an epoch then has.",
    ),
    "fates": (
        "What became of the tokens",
        "Trained: tokens with a label. Masked: context, and the first token of each sequence. Cut: in no "
        "pack, since a record was dropped or truncated. Rows count from 0.",
    ),
    "mix": (
        "The mix",
        "Shares that each argument of the build was asked to give, and gave, counted in what the weights "
        "count; a record counts each time that it is packed.",
    ),
    "idle": (
        "Waiting for the slowest rank",
        "Share of the time for which data-parallel ranks wait for the one with the costliest pack of the "
        "step, one pack a rank, in the first epoch's order with seed 0. Balanced: "
        "PackedStream(balance='attention').",
    ),
    "alternatives": (
        "Other strategies and lengths",
        "The same sequences packed otherwise, planned from their lengths just now. The bound is a number of "
        "packs that no plan goes below. Sequences over the length are left out, and counted.",
    ),
    "notable": (
        "Longest and oddest",
        "Sequences at the ends of the scale: their tokens before cutting, the trained and the cut ones among "
        "them, and the source and row they came from (rows count from 0).",
    ),
    "duplicates": (
        "Duplicates",
        "Sequences that are token for token the same as an earlier one.",
    ),
}
NOTABLE = {
    "longest": "longest",
    "shortest": "shortest",
    "least_trained": "least trained (of 16 tokens or more)",
    "most_cut": "most cut",
}
PER_PACK = {
    "sequences": "sequences",
    "tokens": "tokens",
    "trained_tokens": "trained tokens",
    "longest": "longest sequence",
    "attention_cost": "attention cost",
}


def gain_sentence(speed_up: dict[str, Any] | None, model: dict[str, Any] | None) -> str:
    """What packing saves, in a sentence that says what was counted."""
    if speed_up is None:
        return "There are no sequences, so there is nothing to gain."
    parts = (
        f"Against batches of {speed_up['batch_size']}, the same rows take {_fewer(speed_up['linear'])} "
        f"places for tokens and {_fewer(speed_up['quadratic'])} pairs of tokens in attention"
    )
    if model is None:
        return f"{parts}; --model CONFIG weighs the two for a model."
    return (
        f"{parts}: {_fewer(speed_up['total'])} FLOPs for {model['name']}, of whose work now "
        f"{speed_up['attention_share']:.1%} is attention. FLOPs are not seconds, but padding costs both."
    )


def _fewer(before_over_now: float) -> str:
    """How many times fewer, or more where a few short sequences leave their pack empty."""
    if round(before_over_now, 2) == 1:
        return "as many"
    if before_over_now < 1:
        return f"{1 / before_over_now:.2f} times as many"
    return f"{before_over_now:.2f} times fewer"


def share_of(part: int, whole: int) -> str:
    """A share of records or tokens, of which a few in very many are not none."""
    share = part / max(1, whole)
    return "< 0.01%" if 0 < share < 0.0001 else f"{share:.2%}"


def counted(number: int, word: str) -> str:
    """A number with its word: 1 pack, 2 packs."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
