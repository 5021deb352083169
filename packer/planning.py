"""Between tokenizing and writing: what is left of each split, what is drawn of it, and how it is packed.

Nothing here reads a token: lengths, sources and what belongs together are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from padless.packer.config import PackConfig
from padless.packer.copies import Block, mixed, times_of
from padless.packer.elements import lay_elements
from padless.packer.errors import InputError
from padless.packer.extra_columns import groups_of
from padless.packer.fragments import cut, firsts_of, joined_lengths, lines_of_split, places_of
from padless.packer.homogeneous import plan_by_source
from padless.packer.lines import FAULTS, REASONS
from padless.packer.meanings import counted
from padless.packer.mixing import Mix, arguments_of
from padless.packer.plan import Integers, PackPlan, shuffle_packs
from padless.packer.sources import SourceFile
from padless.packer.sources.splits import is_for_evaluation
from padless.packer.strategies import CUTS, KEEPS_ORDER, STRATEGIES
from padless.packer.strategies.by_length import plan_lengths
from padless.packer.tables import SplitLines
from padless.packer.token_store import ChunkStore


def strategy_of(config: PackConfig, split: str) -> str:
    """How a split is packed."""
    return config.eval_strategy if is_for_evaluation(split) else config.strategy


def check_losses(config: PackConfig, names: Sequence[str], lines: list[SplitLines]) -> None:
    """See that enough is left of every split; raises InputError."""
    total = sum(split.records["in"] for split in lines)
    dropped: dict[str, int] = {}
    for split in lines:
        for reason, count in split.dropped_by_reason.items():
            dropped[reason] = dropped.get(reason, 0) + count
    listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    if not any(len(split.lengths) for split in lines):
        raise InputError(f"nothing to pack: {counted(total, 'record')} in, 0 kept ({listed or 'no records'})")
    faults = sum(dropped.get(REASONS[reason], 0) for reason in FAULTS)
    if faults > config.max_drop_share * total:
        raise InputError(
            f"{faults:,} of {total:,} records ({faults / total:.1%}) would be dropped for faults "
            f"({listed}), more than max_drop_share {config.max_drop_share:.1%}: look at the source, "
            "or allow it with --max-drop-share"
        )
    if not any(split.trained for split in lines):
        raise InputError(
            "nothing to train on: all tokens of every sequence that was kept are masked; look at "
            "--train-on and --max-length"
        )
    for name, split in zip(names, lines, strict=True):
        if not len(split.lengths):
            raise InputError(
                f"the {name} split would be empty (0 of its {split.records['in']:,} records kept): "
                + _way_out_of_empty(config)
            )


def _way_out_of_empty(config: PackConfig) -> str:
    if config.eval_fraction:
        return "change --eval-fraction or --seed"
    if config.limit is not None:
        return f"raise --limit {config.limit:,}, which counts over all sources, or leave it out"
    return "leave its source or its name in --split out"


def enter_rollouts(
    store: ChunkStore,
    formats: Mapping[int, str],
    lines: list[SplitLines],
    files: Sequence[SourceFile],
    *,
    is_mixed: bool,
) -> None:
    """Give the splits the columns of rollouts; raises InputError where other records are among them."""
    if is_mixed:
        raise InputError(
            "rollouts are packed in their groups, once each: leave a mix (weights, caps, a target) out"
        )
    others = {name: files[n].name for n, name in sorted(formats.items()) if name != "rollout"}
    for name, file in others.items():
        raise InputError(
            f"{file} has {name} records and other sources have rollouts, whose values these lack: pack "
            "them into a folder of their own"
        )
    from padless.packer.rollouts import enter

    tokens, values = lay_elements(store)
    assert values is not None, "every rollout has values"
    enter(lines, tokens, values)


def draw_mix(
    mix: Mix, names: Sequence[str], store: ChunkStore, lines: list[SplitLines], files: Sequence[SourceFile]
) -> None:
    """Draw what is packed of each split to train on; what is for evaluation stays whole."""
    for number, (name, split) in enumerate(zip(names, lines, strict=True)):
        if is_for_evaluation(name):
            continue

        def blocks(number: int = number) -> Iterator[Block]:
            for entry, block in lines_of_split(store, number, len(lines), None, None):
                yield entry.source, block

        times = times_of(mix, blocks(), arguments_of(files))
        lines[number] = mixed(split, times, blocks(), len(files))


def enter_sources(store: ChunkStore, lines: list[SplitLines], files: Sequence[SourceFile]) -> None:
    """Tell the argument that each sequence came from, for packs of one source each."""
    arguments = arguments_of(files)
    for number, split in enumerate(lines):
        entries = lines_of_split(store, number, len(lines), split.times, None)
        per_entry = [np.full((b["length"] > 0).sum(), arguments[e.source]) for e, b in entries]
        split.sources = np.concatenate([np.zeros(0, np.int32), *per_entry])


def plan_splits(
    config: PackConfig,
    names: Sequence[str],
    lines: list[SplitLines],
    blocks: Callable[[int], Iterable[NDArray[np.void]]],
) -> list[PackPlan]:
    """A plan of whole sequences for each split.

    Where a strategy cuts, `lines` become the fragments'; `blocks` gives the lines of a split's table.
    """
    plans: list[PackPlan] = []
    for number, (name, split) in enumerate(zip(names, lines, strict=True)):
        cuts = strategy_of(config, name) in CUTS
        lengths = joined_lengths(split) if cuts else split.lengths
        groups = groups_of(split.extras, len(split.lengths))
        sources = split.sources
        if sources is not None and cuts:
            sources = sources[firsts_of(split)]
        plan = plan_split(config, name, lengths, groups, sources)
        if cuts:
            lines[number] = cut(split, plan, blocks(number))
            plan = PackPlan(places_of(plan), plan.offsets, buckets=plan.buckets)
        plans.append(plan)
    return plans


def plan_split(
    config: PackConfig,
    name: str,
    lengths: Integers,
    groups: NDArray[np.int64] | None,
    sources: NDArray[np.int32] | None,
) -> PackPlan:
    """The plan of one split's sequences, its packs in their order; of parts where the strategy cuts.

    `lengths` in tokens, `groups` for what shares packs and `sources` for packs of one each, [sequences].
    """
    strategy = strategy_of(config, name)
    shuffles = strategy not in KEEPS_ORDER  # decreasing orders put like with like
    planning = partial(
        plan_lengths,
        STRATEGIES[strategy],
        max_lengths=config.max_lengths,
        cuts=strategy in CUTS,
        max_sequences_per_pack=config.max_sequences_per_pack,
        seed=config.seed,
        align=config.align,
        # Evaluation takes every pack once, on however many ranks.
        packs_multiple=1 if is_for_evaluation(name) else config.packs_multiple,
        plan_window=config.plan_window,
        shuffle=shuffles,
    )
    if sources is None:
        return planning(lengths, groups=groups)
    plan = plan_by_source(lambda n, g: planning(n, groups=g), lengths, groups, sources)
    return shuffle_packs(plan, config.seed) if shuffles else plan
